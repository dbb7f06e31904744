"""Fits on several processes: how to launch them, what they fit, and in how many ways."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

import deltabars
from deltabars.errors import DataWarning, LossWarning, OptimumWarning, SpectrumWarning
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.recipes.digits import train_to_convergence
from tests.stopping import start

L2 = 0.02
CLASSES = 5
EXAMPLES = 101  # which no number of processes divides


@dataclass(frozen=True)
class Outcome:
    """How one process has ended: what its work returned, or what it raised, and its exit status."""

    result: Any
    error: str | None
    status: int


@dataclass(frozen=True)
class Launch:
    """Processes that are at work."""

    pids: list[int]
    folder: Path

    def kill(self, process: int) -> None:
        """Kill one of them."""
        os.kill(self.pids[process], signal.SIGKILL)

    def outcomes(self, within: float = 60.0) -> list[Outcome]:
        """Return how each has ended, when all have; fail if one is still there after so long."""
        began = time.monotonic()
        left, ended = dict(enumerate(self.pids)), {}
        while left and time.monotonic() - began < within:
            for process, pid in list(left.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[process] = os.waitstatus_to_exitcode(status)
                    del left[process]
            time.sleep(0.01)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert not left, f"Still at work after {within} s: {sorted(left)}."
        return [self._outcome(process, ended[process]) for process in range(len(self.pids))]

    def _outcome(self, process: int, status: int) -> Outcome:
        path = self.folder / f"{process}.pt"
        result, error = torch.load(path, weights_only=False) if path.exists() else (None, None)
        return Outcome(result, error, status)


def launched(count: int, work: Callable[[int], Any], folder: Path, timeout: float = 60.0) -> Launch:
    """Start `work(process)` in so many forked processes of one group.

    Args:
        folder: a new one, for what they return.
        timeout: seconds that a collective may take.
    """
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def one(process: int) -> None:
        log = os.open(folder / f"{process}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)  # torch's own library writes there
        result, error = None, None
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=process,
            world_size=count,
            timeout=timedelta(seconds=timeout),
        )
        try:
            result = work(process)
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        torch.save((result, error), folder / f"{process}.new")
        os.replace(folder / f"{process}.new", folder / f"{process}.pt")
        if error is not None:
            os._exit(1)
        with suppress(RuntimeError):
            dist.barrier()  # the store ends with the first process

    return Launch([start(lambda k=k: one(k)) for k in range(count)], folder)


def results(count: int, work: Callable[[int], Any], folder: Path, within: float = 100.0) -> list:
    """Return what `work(process)` returns in each process."""
    outcomes = launched(count, work, folder).outcomes(within)
    failed = [(outcome.error, outcome.status) for outcome in outcomes if outcome.status]
    assert not failed, f"{failed}\n{(folder / '0.log').read_text()}"
    return [outcome.result for outcome in outcomes]


@cache
def subject() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a trained network with ReLU units that no example switches on, and its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, CLASSES)).double()
        inputs = torch.randn(EXAMPLES, 10, dtype=torch.float64)
        targets = (inputs[:, :3].sum(1).mul(2).round().long() % CLASSES).clamp(0, CLASSES - 1)
    inputs[:, 9] = 0.0  # an input that says nothing
    train_to_convergence(model, inputs, targets, L2, steps=200)
    with torch.no_grad():
        model[0].bias[5:11] = -100.0
    return model, (inputs, targets)


@cache
def regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a trained network with two real outputs, and its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        inputs = torch.randn(EXAMPLES, 4, dtype=torch.float64)
        noise = 0.3 * torch.randn(EXAMPLES, 2, dtype=torch.float64)
    targets = torch.stack([inputs.sum(1).sin(), inputs.prod(1)], 1) + noise
    loss = nn.functional.mse_loss
    train_to_convergence(model, inputs, targets, L2, steps=200, loss=loss)
    return model, (inputs, targets)


def repeated() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a linear network whose GGN has each eigenvalue many times, and its data."""
    model = nn.Linear(8, 6, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    inputs = torch.eye(8, dtype=torch.float64).repeat_interleave(3, 0) * 2
    return model, (inputs, torch.arange(24) % 6)


def fit(model: nn.Module, data: Any, **options: Any) -> deltabars.DeltaFit:
    """Fit without the warnings about weights and data."""
    with warnings.catch_warnings():
        for category in (OptimumWarning, SpectrumWarning, LossWarning, DataWarning):
            warnings.simplefilter("ignore", category)
        return deltabars.fit(model, data, **{"l2": L2, "rank": 12, "progress": False, **options})


_SINGLE = {"dtype": torch.float32}
_LOSS = nn.CrossEntropyLoss(
    weight=torch.linspace(0.2, 3.0, CLASSES, dtype=torch.float64), label_smoothing=0.1
)
# The options of fit, by the name of the case; `subject` and `vectors` are for `case`.
ESSENTIALS: dict[str, dict[str, Any]] = {
    "opg krylov": {"estimator": "opg", "solver": "krylov"},
    "ggn incremental": {"estimator": "ggn", "solver": "incremental", "batch_size": 36, "rank": 60},
    "sandwich krylov, single": {"estimator": "sandwich", "solver": "krylov", **_SINGLE},
    "auto": {"estimator": "opg", "solver": "krylov", "rank": "auto", "tolerance": 0.2},
}
CASES: dict[str, dict[str, Any]] = {
    **ESSENTIALS,
    "hessian dense": {"estimator": "hessian", "solver": "dense"},
    "ggn dense, single": {"estimator": "ggn", "solver": "dense", **_SINGLE},
    "sandwich arpack": {"estimator": "sandwich", "solver": "arpack"},
    "opg incremental": {"estimator": "opg", "solver": "incremental", "rank": 101},
    "both ends": {"estimator": "hessian", "solver": "krylov", "smallest": 5},
    "own probe": {"estimator": "ggn", "rank": "auto", "tolerance": 0.3, "probe": True},
    "patterns": {"estimator": "sandwich", "solver": "krylov", "l2": {"*": 0.02, "*.bias": 1e-3}},
    "last layer": {"estimator": "sandwich", "params": deltabars.last_layer()},
    "weights": {"estimator": "sandwich", "solver": "krylov", "likelihood": _LOSS},
    "restarts": {"estimator": "hessian", "solver": "krylov", "rank": 8, "vectors": 24},
    "restarted blocks": {"estimator": "opg", "solver": "krylov", "rank": 20, "vectors": 36},
    "more pairs than are reached": {"estimator": "opg", "solver": "krylov", "rank": 500},
    "regression": {"estimator": "sandwich", "solver": "krylov", "subject": regression,
                   "likelihood": Gaussian(noise="estimate")},
    "repeated eigenvalues": {"estimator": "ggn", "solver": "krylov", "subject": repeated,
                             "rank": 40},
}  # fmt: skip


def case(name: str, count: int) -> dict[str, Any]:
    """Return what comes of one of the cases in this process, one of `count`."""
    options = dict(CASES[name])
    model, data = options.pop("subject", subject)()
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
    if found.network.dtype == torch.float32:
        inputs = inputs.float()
    predicted = found.predict(inputs, moderation=None)
    return {
        "values": {name: pairs.values for name, pairs in found.spectra.items()},
        "smallest": {name: pairs.smallest for name, pairs in found.spectra.items()},
        "std": predicted.std,
        "high": predicted.std_high,
        "score": predicted.score,
        "examples": found.num_examples,
        "cost": found.diagnostics["cost"],
        "fingerprint": found.diagnostics["data_fingerprint"],
        "reached": found.diagnostics["parameters_reached"],
        "noise": found.noise,
        "statistics": {name: dict(found.diagnostics[name]) for name in found.spectra},
    }


class _Mappings(Dataset):
    """Examples by number, as mappings with names, as Hugging Face's are."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data[0])

    def __getitem__(self, number: int) -> Any:
        return {"input": self._data[0][number], "labels": self._data[1][number]}


class _Stream(IterableDataset):
    def __init__(self, data: tuple[Tensor, Tensor], process: int, count: int) -> None:
        self._part = tuple(part[process::count] for part in data)

    def __iter__(self) -> Any:
        return zip(*self._part, strict=True)


def shard(data: tuple[Tensor, Tensor], process: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the shard of this process: the first one has most of the examples."""
    bounds = [0, *(len(data[0]) - 7 * k for k in range(count - 1, -1, -1))]
    return tuple(part[bounds[process] : bounds[process + 1]] for part in data)


def _sampled(data: Any, process: int, count: int, **options: Any) -> DataLoader:
    dataset = TensorDataset(*data)
    sampler = DistributedSampler(dataset, count, process, **options) if count > 1 else None
    return DataLoader(dataset, batch_size=8, sampler=sampler)


def _own_sampler(data: Any, process: int, count: int, differs: bool) -> DataLoader:
    """Make a loader of half of the examples: the same half everywhere, or each its own part."""
    indices = range(process, len(data[0]), count) if differs else range(0, 90, 2)
    sampler = SubsetRandomSampler(indices, torch.Generator().manual_seed(process))
    return DataLoader(TensorDataset(*data), batch_size=4, sampler=sampler)


def _partly_labelled(make: Any, data: tuple[Tensor, Tensor], process: int, count: int) -> Any:
    """Make data in which each example comes three times, twice without a target."""
    inputs, targets = (part.repeat_interleave(3, 0) for part in data)
    targets[::3] = targets[1::3] = -100
    return make((inputs, targets), process, count)


# The data of one process, from those of all.
DATA: dict[str, Callable[[Any, int, int], Any]] = {
    "tensors": lambda data, process, count: data,
    "dataset": lambda data, process, count: TensorDataset(*data),
    "shuffled": lambda data, process, count: DataLoader(
        TensorDataset(*data), batch_size=9, shuffle=True
    ),
    "drop_last": lambda data, process, count: DataLoader(
        TensorDataset(*data), batch_size=9, drop_last=True
    ),
    "own sampler": partial(_own_sampler, differs=False),
    "samplers that differ": partial(_own_sampler, differs=True),
    "distributed sampler": _sampled,
    "distributed sampler, in order": partial(_sampled, shuffle=False),
    "shards": shard,
    "sharded loaders": lambda data, process, count: DataLoader(
        TensorDataset(*shard(data, process, count)), batch_size=5 + process, shuffle=True
    ),
    "batches": lambda data, process, count: list(
        zip(*(part.split(6) for part in shard(data, process, count)), strict=True)
    ),
    "stream": _Stream,
    "stream in a loader": lambda data, process, count: DataLoader(
        _Stream(data, process, count), batch_size=4
    ),
    "mappings": lambda data, process, count: DataLoader(_Mappings(data), batch_size=7),
    "tensors, some without a target": partial(_partly_labelled, lambda data, process, count: data),
    "shards, some without a target": partial(_partly_labelled, shard),
}


def of_data(kind: str, process: int, count: int) -> dict[str, Any]:
    """Return what depends on the data, of a fit of one kind of data in this process."""
    model, data = subject()
    made = DATA[kind](data, process, count)
    found = fit(model, made, estimator="ggn", solver="dense")
    return {
        "examples": found.num_examples,
        "cost": found.diagnostics["cost"],
        "fingerprint": found.diagnostics["data_fingerprint"],
        "values": found.spectra["ggn"].values,
        "processes": found.diagnostics.get("processes"),
    }
