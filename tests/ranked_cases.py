"""Fits that ranks must agree on with one process, and data that they share in every way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

import deltabars
from deltabars.likelihoods.gaussian import Gaussian
from tests.ranked import CLASSES, L2, fit, regression, subject

SINGLE = {"dtype": torch.float32}
_WEIGHTS = torch.linspace(0.2, 3.0, CLASSES, dtype=torch.float64)

# By name; the options of fit, and which subject.
ESSENTIALS: dict[str, dict[str, Any]] = {
    "opg krylov": {"estimator": "opg", "solver": "krylov"},
    "ggn incremental": {"estimator": "ggn", "solver": "incremental", "batch_size": 36, "rank": 60},
    "sandwich krylov, single": {"estimator": "sandwich", "solver": "krylov", **SINGLE},
    "auto": {"estimator": "opg", "solver": "krylov", "rank": "auto", "tolerance": 0.2},
}
MORE: dict[str, dict[str, Any]] = {
    **{
        f"{estimator} {solver}": {"estimator": estimator, "solver": solver}
        for estimator in ("opg", "ggn", "hessian", "sandwich")
        for solver in ("krylov", "dense", "arpack")
    },
    "sandwich krylov": {"estimator": "sandwich", "solver": "krylov", "smallest": 3},
    "opg incremental": {"estimator": "opg", "solver": "incremental", "rank": 101},
    "opg krylov, single": {"estimator": "opg", "solver": "krylov", **SINGLE},
    "ggn dense, single": {"estimator": "ggn", "solver": "dense", **SINGLE},
    "hessian arpack, single": {"estimator": "hessian", "solver": "arpack", **SINGLE},
    "both ends": {"estimator": "hessian", "solver": "krylov", "smallest": 5},
    "auto, own probe": {"estimator": "ggn", "solver": "krylov", "rank": "auto",
                        "tolerance": 0.3, "probe": True},
    "auto dense": {"estimator": "ggn", "solver": "dense", "rank": "auto", "tolerance": 0.2},
    "patterns": {"estimator": "sandwich", "solver": "krylov", "l2": {"*": 0.02, "*.bias": 1e-3}},
    "last layer": {"estimator": "sandwich", "params": deltabars.last_layer()},
    "weights": {"estimator": "sandwich", "solver": "krylov",
                "likelihood": nn.CrossEntropyLoss(weight=_WEIGHTS, label_smoothing=0.1)},
    "sum": {"estimator": "ggn", "solver": "krylov", "l2": L2 * 101,
            "likelihood": nn.CrossEntropyLoss(reduction="sum")},
    "restarts": {"estimator": "hessian", "solver": "krylov", "rank": 8, "vectors": 24},
    "restarted blocks": {"estimator": "opg", "solver": "krylov", "rank": 20, "vectors": 36},
    "more pairs than are reached": {"estimator": "opg", "solver": "krylov", "rank": 500},
    "regression": {"estimator": "sandwich", "solver": "krylov", "subject": regression,
                   "likelihood": Gaussian(noise="estimate")},
    "regression auto": {"estimator": "opg", "solver": "krylov", "subject": regression,
                        "likelihood": nn.MSELoss(), "rank": "auto", "tolerance": 0.3},
    "repeated eigenvalues": {"estimator": "ggn", "solver": "krylov", "subject": None, "rank": 40},
    "repeated, of the hessian": {"estimator": "hessian", "solver": "krylov", "subject": None,
                                 "rank": 40},
}  # fmt: skip
# Of `make torture` alone: what they say beside the others is little for what they take.
LONG: dict[str, dict[str, Any]] = {
    "sandwich incremental": {"estimator": "sandwich", "solver": "incremental", "rank": 101},
    "auto sandwich": {"estimator": "sandwich", "solver": "krylov", "rank": "auto",
                      "tolerance": 1.0},
}  # fmt: skip
SHORT = {**ESSENTIALS, **MORE}
CASES = {**SHORT, **LONG}


def repeated() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A linear network whose GGN has each eigenvalue many times."""
    model = nn.Linear(8, 6, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    inputs = torch.eye(8, dtype=torch.float64).repeat_interleave(3, 0) * 2
    return model, (inputs, torch.arange(24) % 6)


def case(name: str, count: int) -> dict[str, Any]:
    """What comes of one of the cases in one process, or on one of several ranks."""
    options = dict(CASES[name])
    made = options.pop("subject", subject) or repeated
    model, data = made()
    vectors = options.pop("vectors", None)
    if vectors is not None:  # a budget whose share for the basis has room for so many
        size = sum(weight.numel() for weight in model.parameters())
        options["memory_budget"] = 4 * vectors * 8 * -(-size // count)
    inputs = data[0][:17]
    if options.get("probe"):
        options["probe"] = inputs
    if name == "ggn incremental":
        options["batch_size"] = -(-options["batch_size"] // count)
    found = fit(model, data, **options)
    return described(found, inputs)


def described(found: deltabars.DeltaFit, inputs: Tensor) -> dict[str, Any]:
    """Of a fit what does not depend on who computed it."""
    if found.network.dtype == torch.float32:
        inputs = inputs.float()
    predicted = found.predict(inputs, moderation=None)
    return {
        "values": {name: pairs.values.cpu() for name, pairs in found.spectra.items()},
        "smallest": {name: pairs.smallest.cpu() for name, pairs in found.spectra.items()},
        "std": predicted.std,
        "high": predicted.std_high,
        "score": predicted.score,
        "examples": found.num_examples,
        "cost": found.diagnostics["cost"],
        "fingerprint": found.diagnostics["data_fingerprint"],
        "reached": found.diagnostics["parameters_reached"],
        "noise": found.noise,
        "statistics": {name: dict(found.diagnostics[name]) for name in found.spectra},
        "ranks": found.diagnostics.get("ranks"),
    }


class _Plain(Dataset):
    """Examples by number; `names` makes mappings of them, as Hugging Face's are."""

    def __init__(self, data: tuple[Tensor, Tensor], names: bool = False) -> None:
        self._data, self._names = data, names

    def __len__(self) -> int:
        return len(self._data[0])

    def __getitem__(self, number: int) -> Any:
        one, target = (part[number] for part in self._data)
        return {"input": one, "labels": target} if self._names else (one, target)


class _Stream(IterableDataset):
    def __init__(self, data: tuple[Tensor, Tensor], rank: int, count: int) -> None:
        self._part = tuple(part[rank::count] for part in data)

    def __iter__(self) -> Any:
        return zip(*self._part, strict=True)


def _cut(data: tuple[Tensor, Tensor], rank: int, count: int) -> tuple[Tensor, Tensor]:
    """A shard of this rank: the first one has most of the examples."""
    bounds = [0, *(len(data[0]) - 7 * k for k in range(count - 1, -1, -1))]
    return tuple(part[bounds[rank] : bounds[rank + 1]] for part in data)


def _sampled(data: Any, rank: int, count: int, **options: Any) -> DataLoader:
    dataset = TensorDataset(*data)
    if count == 1:
        return DataLoader(dataset, batch_size=8)
    sampler = DistributedSampler(dataset, count, rank, **options)
    return DataLoader(dataset, batch_size=8, sampler=sampler)


def _some(data: Any, rank: int, count: int) -> DataLoader:
    sampler = SubsetRandomSampler(range(0, 90, 2), torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(*data), batch_size=4, sampler=sampler)


def _others(data: Any, rank: int, count: int) -> DataLoader:
    """Samplers of the same dataset that are not the same."""
    sampler = SubsetRandomSampler(range(rank, len(data[0]), count))
    return DataLoader(TensorDataset(*data), batch_size=4, sampler=sampler)


class _Things(_Plain):
    """Examples that are no tensors, and do not compare."""

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(example=super().__getitem__(index), itself=object())


def _joined(things: list[Any]) -> Any:
    return default_collate([thing.example for thing in things])


def _partly_labelled(make: Any, data: tuple[Tensor, Tensor], rank: int, count: int) -> Any:
    """Each of them twice, the first time without a target: one of two ranks would have none."""
    inputs, targets = (part.repeat_interleave(2, 0) for part in data)
    targets[::2] = -100
    return make((inputs, targets), rank, count)


# The data of one rank, from those of all.
DATA: dict[str, Callable[[Any, int, int], Any]] = {
    "tensors": lambda data, rank, count: data,
    "dataset": lambda data, rank, count: TensorDataset(*data),
    "own dataset": lambda data, rank, count: _Plain(data),
    "loader": lambda data, rank, count: DataLoader(TensorDataset(*data), batch_size=9),
    "shuffled": lambda data, rank, count: DataLoader(
        TensorDataset(*data), batch_size=9, shuffle=True
    ),
    "drop_last": lambda data, rank, count: DataLoader(
        TensorDataset(*data), batch_size=9, drop_last=True
    ),
    "own sampler": _some,
    "samplers that differ": _others,
    "things": lambda data, rank, count: DataLoader(_Things(data), batch_size=6, collate_fn=_joined),
    "distributed sampler": _sampled,
    "distributed sampler, in order": partial(_sampled, shuffle=False),
    "shards": lambda data, rank, count: _cut(data, rank, count),
    "strides": lambda data, rank, count: tuple(part[rank::count] for part in data),
    "sharded datasets": lambda data, rank, count: TensorDataset(*_cut(data, rank, count)),
    "sharded loaders": lambda data, rank, count: DataLoader(
        TensorDataset(*_cut(data, rank, count)), batch_size=5 + rank, shuffle=True
    ),
    "batches": lambda data, rank, count: list(
        zip(*(part.split(6) for part in _cut(data, rank, count)), strict=True)
    ),
    "stream": lambda data, rank, count: _Stream(data, rank, count),
    "stream in a loader": lambda data, rank, count: DataLoader(
        _Stream(data, rank, count), batch_size=4
    ),
    "mappings": lambda data, rank, count: DataLoader(_Plain(data, names=True), batch_size=7),
    "mapping": lambda data, rank, count: {"input": data[0], "labels": data[1]},
    **{
        f"{kind}, some without a target": partial(_partly_labelled, make)
        for kind, make in {
            "tensors": lambda data, rank, count: data,
            "dataset": lambda data, rank, count: _Plain(data),
            "loader": lambda data, rank, count: DataLoader(
                TensorDataset(*data), batch_size=9, shuffle=True
            ),
            "distributed sampler": _sampled,
            "shards": _cut,
        }.items()
    },
}


def of_data(kind: str, rank: int, count: int) -> dict[str, Any]:
    """What comes of a fit of one kind of data, in one process or on a rank."""
    model, data = subject()
    options: dict[str, Any] = {"estimator": "ggn", "solver": "dense"}
    return described_data(fit(model, DATA[kind](data, rank, count), **options))


def described_data(found: deltabars.DeltaFit) -> dict[str, Any]:
    """Of a fit what its data decide."""
    return {
        "examples": found.num_examples,
        "cost": found.diagnostics["cost"],
        "fingerprint": found.diagnostics["data_fingerprint"],
        "values": found.spectra["ggn"].values,
        "ranks": found.diagnostics.get("ranks"),
    }
