"""Fits on several processes: the numbers of one process, whoever reads what, and how they fail."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)  # fmt: skip

import deltabars
from deltabars.errors import BadValueError, DeltaBarsError, ModelError, StorageError
from tests import stopping
from tests.processes import CASES, CLASSES, case, fit, launched, results, subject

SAME_EIGENVALUES, SAME_PREDICTIONS = 1e-6, 1e-5  # relative
OF_FOUR = ("opg krylov", "ggn incremental")
STEPS = (("hessian", 7, 1), ("opg", 14, 6))  # most collectives of a step, and its products
FILES = {"plain": {}, "short": {"dtype": "bfloat16"}, "files": {"max_file_size": "20KB"}}
OPTIONS = {"estimator": "sandwich", "solver": "krylov", "rank": 20}


class Mappings(Dataset):
    """Examples by number, as mappings with names, as Hugging Face's are."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data[0])

    def __getitem__(self, number: int) -> Any:
        return {"input": self._data[0][number], "labels": self._data[1][number]}


class Stream(IterableDataset):
    def __init__(self, data: tuple[Tensor, Tensor], process: int, count: int) -> None:
        self._part = tuple(part[process::count] for part in data)

    def __iter__(self) -> Any:
        return zip(*self._part, strict=True)


def shard(data: tuple[Tensor, Tensor], process: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the shard of this process: the first one has most of the examples."""
    bounds = [0, *(len(data[0]) - 7 * k for k in range(count - 1, -1, -1))]
    return tuple(part[bounds[process] : bounds[process + 1]] for part in data)


def loader(data: Any, process: int, count: int, kind: str) -> DataLoader:
    """Make a loader with a sampler: of half of the data, the same or not, or of DDP's part."""
    dataset: Any = TensorDataset(*data)
    if kind == "distributed":
        sampler: Any = DistributedSampler(dataset, count, process) if count > 1 else None
    else:
        indices = range(process, len(dataset), count) if kind == "own" else range(0, 90, 2)
        sampler = SubsetRandomSampler(indices, torch.Generator().manual_seed(process))
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def partly_labelled(data: tuple[Tensor, Tensor], process: int, count: int) -> Any:
    """Make a shard in which each example comes three times, twice without a target."""
    inputs, targets = (part.repeat_interleave(3, 0) for part in data)
    targets[::3] = targets[1::3] = -100
    return shard((inputs, targets), process, count)


# The data of one process, from those of all.
DATA: dict[str, Callable[[Any, int, int], Any]] = {
    "tensors": lambda data, process, count: data,
    "drop_last": lambda data, process, count: DataLoader(
        TensorDataset(*data), batch_size=9, drop_last=True
    ),
    "same sampler": partial(loader, kind="same"),
    "samplers that differ": partial(loader, kind="own"),
    "distributed sampler": partial(loader, kind="distributed"),
    "shards": shard,
    "stream": lambda data, process, count: DataLoader(Stream(data, process, count), batch_size=4),
    "mappings": lambda data, process, count: DataLoader(Mappings(data), batch_size=7),
    "some without a target": partly_labelled,
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


def found_by(count, names, kinds, folder):
    """The cases and kinds of data in processes of one launch: for each process, both by name."""
    for name in ("opg krylov", "ggn incremental", "auto", "regression"):
        alone(name)  # what torch loads for a first fit is loaded once, before they part

    def work(process):
        cases = {name: case(name, count) for name in names}
        return cases, {kind: of_data(kind, process, count) for kind in kinds}

    return results(count, work, folder / "processes")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return found_by(2, CASES, DATA, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return found_by(4, OF_FOUR, ["shards"], tmp_path_factory.mktemp("four"))


@cache
def alone(name: str) -> dict[str, Any]:
    return case(name, 1)


def check_same(name, found):
    """Compare what processes have found with one process."""
    one, single = alone(name), "single" in name
    for other in found:
        for matrix, values in one["values"].items():
            ours = other["values"][matrix]
            scale = values.abs().max() if single else values.abs()
            assert float(((ours - values) / scale).abs().max()) < SAME_EIGENVALUES, matrix
            few = CASES[name].get("smallest", 0)
            ends = other["smallest"][matrix][:few], one["smallest"][matrix][:few]
            torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)
        for part in ("std", "high", "score"):
            assert float((other[part] / one[part] - 1).abs().max()) < SAME_PREDICTIONS, part
        for part in ("examples", "fingerprint", "reached"):
            assert other[part] == one[part]
        assert other["cost"] == pytest.approx(one["cost"], rel=1e-6 if single else 1e-12)
        assert other["noise"] == pytest.approx(one["noise"])


def check_same_data(kind, found):
    one = of_data(kind, 0, 1)
    for other in found:
        assert other["examples"] == one["examples"] == sum(other["processes"]["examples"])
        assert other["fingerprint"] == one["fingerprint"]
        assert other["cost"] == pytest.approx(one["cost"], rel=1e-12)
        torch.testing.assert_close(other["values"], one["values"], rtol=1e-6, atol=0)


class TestSameNumbers:
    @pytest.mark.parametrize("name", CASES)
    def test_of_two_processes(self, two, name):
        check_same(name, [cases[name] for cases, _ in two])

    @pytest.mark.parametrize("kind", DATA)
    def test_of_data_of_two_processes(self, two, kind):
        check_same_data(kind, [kinds[kind] for _, kinds in two])

    def test_of_four_processes(self, four):
        for name in OF_FOUR:
            check_same(name, [cases[name] for cases, _ in four])
        check_same_data("shards", [kinds["shards"] for _, kinds in four])

    def test_the_cases_are_what_they_are_called(self, two):
        found, data = two[0]
        size = sum(weight.numel() for weight in subject()[0].parameters())
        assert found["opg krylov"]["reached"] < size
        assert found["restarts"]["restarts"]["hessian"] > 0
        assert found["restarted blocks"]["restarts"]["opg"] > 0
        values = found["repeated eigenvalues"]["values"]["ggn"]
        assert float(values[0] - values[-1]) < 1e-9  # forty copies of one
        sources = {kind: each["processes"]["source"] for kind, each in data.items()}
        counts = {kind: each["processes"]["examples"] for kind, each in data.items()}
        assert sources["tensors"] == sources["same sampler"] == "split"
        assert sources["distributed sampler"] == "sampler"
        assert sources["shards"] == sources["stream"] == "own"
        assert counts["tensors"] == counts["distributed sampler"] == [51, 50]
        assert counts["shards"] == [94, 7]


def refused(action, kind):
    """What is said of something that is refused."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def sharded(model):
    """The model with parameters that processes share, in two ways of torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    first, second, cpu = copy.deepcopy(model), copy.deepcopy(model), torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its older ways
        mesh = init_device_mesh("cpu", (2,))
        return fully_shard(first, mesh=mesh), FullyShardedDataParallel(second, device_id=cpu)


def asked_of(own, process):
    """What is asked of a fit, in one process of two or in one alone: numbers by name."""
    data = subject()[1]
    some = data[0][:5]
    return {
        "std": own.predict(some).std,
        "sample": own.sample(3),
        "with_l2": own.with_l2(0.05).predict(some).std,
        "tuned": torch.tensor([own.tune_l2().l2, own.tune_l2(data, "validation").l2]),
        "effective": torch.tensor(own.effective_parameters_interval),
        "covariance": own.predict(some, covariance=True, classes="top2").covariance,
        "uneven": own.predict(data[0][: 3 if process else 90], batch_size=7).std,
        "served": own.predict(some, estimator="opg", rank=7).std,
        "offloaded": own.offloaded().predict(some).std,
    }


def answers(process, folder):
    """The numbers of one process of two, what it shows and what it refuses; some files as well."""
    model, data = subject()
    own = fit(model, data, **OPTIONS)
    some = data[0][:5]
    for name, options in FILES.items():
        own.save(folder / name, **options)
    wrapped = fit(DistributedDataParallel(copy.deepcopy(model)), data, **OPTIONS)
    found = {
        "numbers": asked_of(own, process),
        "repr": repr(own),
        "loaded": deltabars.load(folder / "plain", model).predict(some).std,
        "pickle": refused(lambda: pickle.dumps(own), StorageError),
        "certify": refused(lambda: own.certify(some, data, estimator="opg"), BadValueError),
        "wrapped": (wrapped.network.parameters.names, wrapped.predict(some).std),
        "sharded": [refused(partial(fit, each, data), ModelError) for each in sharded(model)],
        "widths": [pairs.vectors.part.shape[1] for pairs in own.spectra.values()],
        "costs": [],
    }
    for name, limit, block in STEPS:
        costs = fit(model, data, estimator=name, rank=60, solver="krylov").diagnostics
        most = limit * costs[name]["products"] / block + 60
        found["costs"].append((costs["processes"]["collectives"], most))
    with deltabars.distributed.alone():
        found["alone"] = process and fit(model, data, **OPTIONS).predict(some).std
    return found


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The answers of two processes, and the folder that they have written to."""
    folder = tmp_path_factory.mktemp("asked")
    subject()
    return results(2, partial(answers, folder=folder), folder / "processes"), folder


@pytest.fixture(scope="module")
def plain():
    return fit(*subject(), **OPTIONS)


class TestAnswers:
    def test_are_those_of_one_process(self, asked, plain):
        size = plain.num_parameters
        for process, found in enumerate(asked[0]):
            expected = asked_of(plain, process)
            for name, numbers in found["numbers"].items():
                torch.testing.assert_close(numbers, expected[name], rtol=1e-5, atol=1e-9)
            torch.testing.assert_close(found["loaded"], expected["std"], rtol=1e-5, atol=1e-9)
            assert found["repr"].splitlines()[0] == repr(plain).splitlines()[0]
            assert set(found["widths"]) == {-(-size // 2) if process == 0 else size // 2}
        assert torch.equal(asked[0][1]["alone"], plain.predict(subject()[1][0][:5]).std)

    def test_what_is_refused_says_what_to_do(self, asked):
        for found in asked[0]:
            assert "that 2 processes share. Save the fit, and load it" in found["pickle"]
            assert "certify: expected one process, got 2" in found["certify"]

    def test_files_of_processes_load_in_one(self, asked, plain):
        model, data = subject()
        some, expected = data[0][:5], plain.predict(data[0][:5])
        for name in ("plain", "files"):
            loaded = deltabars.load(asked[1] / name, model)
            torch.testing.assert_close(loaded.predict(some).std, expected.std)
        assert len(list((asked[1] / "plain").glob("vectors-*"))) == 2
        assert len(list((asked[1] / "files").glob("vectors-*"))) > 4
        short = deltabars.load(asked[1] / "short", model)
        assert 0 < short.diagnostics["storage"]["opg"]["norm"] < 0.01
        found = short.predict(some)
        assert bool((found.std_low <= expected.std).all() & (expected.std <= found.std_high).all())

    def test_models_of_training_on_several_processes(self, asked, plain):
        for found in asked[0]:
            names, std = found["wrapped"]
            assert names == ("0.weight", "0.bias", "2.weight", "2.bias")
            torch.testing.assert_close(std, plain.predict(subject()[1][0][:5]).std)
            for kind, text in zip(
                ("DTensor", "FullyShardedDataParallel"), found["sharded"], strict=True
            ):
                assert f"got {kind}, which" in text
                assert "Load a full state dict into a plain model" in text

    def test_collectives_a_step_are_few(self, asked):
        """One step is a product of one row for the Hessian, of a block for the others."""
        assert all(sent < most for found in asked[0] for sent, most in found["costs"])


def other_sampler(process):
    model, data = subject()
    dataset = TensorDataset(*data)
    fit(model, DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 0), batch_size=8))


def no_inputs(process):
    own = fit(*subject(), **OPTIONS)
    own.predict(subject()[1][0][: 0 if process else 5])


class Failing(nn.Module):
    """A model that cannot go on after some passes."""

    def __init__(self, inner, passes):
        super().__init__()
        self.inner, self.passes = inner, passes

    def forward(self, inputs):
        self.passes -= 1
        if self.passes == 0:
            raise OSError("no such shard")
        return self.inner(inputs)


def raising(process):
    model, data = subject()
    fit(Failing(model, 7 if process else 10**9), data, estimator="hessian", solver="krylov")


def missing(process):
    if not process:
        fit(*subject())


# By name: what a process does, and what the failing one says.
FAILURES = {
    "other sampler": (other_sampler, "expected that of process 1 of 2, got one of"),
    "no inputs": (no_inputs, "Inputs: expected at least one"),
    "raises": (raising, "no such shard"),
    "one process only": (missing, None),
}


class TestFailures:
    @pytest.mark.parametrize("name", FAILURES)
    def test_every_process_ends_and_says_why(self, tmp_path, name):
        work, said = FAILURES[name]
        subject()
        first, second = launched(2, work, tmp_path / "processes", timeout=5.0).outcomes(40.0)
        assert said is None or said in second.error
        assert first.error.startswith("ProcessError: Processes: expected an answer from all 2")
        assert "Another process has failed or was ended" in first.error

    def test_other_data_or_arguments_in_one_process_are_refused_by_all(self, tmp_path):
        def work(process):
            model, data = subject()
            inputs, targets = data
            other = copy.deepcopy(model)
            with torch.no_grad():
                other[0].weight[0, 0] += 0.01 * process
            curved = nn.Sequential(model[0], nn.Softplus() if process else nn.ReLU(), model[2])
            wide = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, CLASSES)).double()
            loss = nn.CrossEntropyLoss(label_smoothing=0.1 * process)
            none = slice(0, 0 if process else None)
            calls = {
                "an example for each of 2 processes, got 1": partial(
                    fit, model, (inputs[:1], targets[:1])
                ),
                "at least one example in process 1, got none": partial(
                    fit, model, (inputs[none], targets[none])
                ),
                "a part of them in each of 2 processes, got": partial(
                    fit, model, [(inputs[:40], targets[:40]), (inputs[40:], targets[40:])]
                ),
                "the same weights in every process": partial(fit, other, data),
                "rank": partial(fit, model, data, rank=10 + process),
                "params": partial(fit, model, data, params=["2.*"] if process else None),
                "l2": partial(fit, model, data, l2=0.02 + 0.001 * process),
                "model": partial(fit, wide if process else model, data),
                "every process": partial(fit, curved, data),
                "likelihood": partial(fit, model, data, likelihood=loss),
                "dtype": partial(fit, model, data, dtype=torch.float32 if process else None),
                "checkpoint": partial(fit, model, data, checkpoint="kept" if process else None),
            }
            return {name: refused(call, DeltaBarsError) for name, call in calls.items()}

        subject()
        for texts in results(2, work, tmp_path / "processes"):
            for name, said in texts.items():
                assert name in said
                assert len(name.split()) > 1 or "in every process, got" in said

    def test_a_killed_fit_is_resumed_by_as_many_processes(self, tmp_path):
        """The others end with an error, and the same launch ends with the numbers of one fit."""
        folder, options = tmp_path / "kept", stopping.WAYS["block_krylov"]

        def work(process):
            found = stopping.fit(folder, **options)
            return {name: pairs.values for name, pairs in found.spectra.items()}, dict(
                found.diagnostics[found.main_matrix]
            )

        expected = stopping.fit(**options)
        launch = launched(2, work, tmp_path / "first", timeout=20.0)
        while not any(folder.glob("*.safetensors")):
            assert os.waitpid(launch.pids[1], os.WNOHANG)[0] == 0, "It ended before that."
            time.sleep(0.001)
        os.kill(launch.pids[1], signal.SIGKILL)
        first, second = launch.outcomes()
        assert second.status == -signal.SIGKILL
        assert first.error.startswith("ProcessError: ")
        for values, statistics in results(2, work, tmp_path / "second"):
            for name, found in values.items():
                torch.testing.assert_close(found, expected.spectra[name].values, rtol=1e-6, atol=0)
            assert statistics["products"] == expected.diagnostics[name]["products"]
