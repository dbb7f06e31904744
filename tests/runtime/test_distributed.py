"""Fits on several processes: the numbers of one process, whoever reads what, and how they fail."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import signal
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import deltabars
from deltabars.errors import BadValueError, DeltaBarsError, ModelError, StorageError
from tests import stopping
from tests.processes import CASES, CLASSES, case, fit, launched, results, subject

SAME_EIGENVALUES, SAME_PREDICTIONS = 1e-6, 1e-5  # relative
STEPS = (("hessian", 7, 1), ("opg", 14, 6))  # most collectives of a step, and its products: few
FILES = {"plain": {}, "files": {"max_file_size": "20KB"}}
OPTIONS = {"estimator": "sandwich", "solver": "krylov", "rank": 20}


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
    """Make a loader with a sampler: of half of the data, the same in all, or of DDP's part."""
    dataset: Any = TensorDataset(*data)
    sampler: Any = random.Random(process).sample(range(0, 90, 2), 45)
    if kind == "distributed":
        sampler = DistributedSampler(dataset, count, process) if count > 1 else None
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def partly_labelled(data: tuple[Tensor, Tensor], process: int, count: int) -> Any:
    """Make a shard in which each example comes three times, twice without a target."""
    inputs, targets = (part.repeat_interleave(3, 0) for part in data)
    targets[::3] = targets[1::3] = -100
    return shard((inputs, targets), process, count)


# The data of one process, from those of all.
DATA: dict[str, Callable[[Any, int, int], Any]] = {
    "tensors": lambda data, process, count: data,
    "same sampler": partial(loader, kind="same"),
    "distributed sampler": partial(loader, kind="distributed"),
    "shards": shard,
    "stream": lambda data, process, count: DataLoader(Stream(data, process, count), batch_size=4),
    "some without a target": partly_labelled,
}


def of_data(kind: str, process: int, count: int) -> tuple:
    """Return what depends on the data, of a fit of one kind of data in this process."""
    model, data = subject()
    found = fit(model, DATA[kind](data, process, count), estimator="ggn", solver="dense")
    numbers = found.num_examples, found.diagnostics["data_fingerprint"]
    floats = found.diagnostics["cost"], found.spectra["ggn"].values
    return numbers, floats, found.diagnostics.get("processes")


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


@cache
def alone(name: str) -> dict[str, Any]:
    return case(name, 1)


def check_same(name, found):
    """Compare what processes have found with one process."""
    one, single, few = alone(name), "single" in name, CASES[name].get("smallest", 0)
    for other in found:
        for matrix, values in one["values"].items():
            scale = values.abs().max() if single else values.abs()
            far = (other["values"][matrix] - values) / scale
            assert float(far.abs().max()) < SAME_EIGENVALUES, matrix
            ends = other["smallest"][matrix][:few], one["smallest"][matrix][:few]
            torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)
        for part in ("std", "high", "score"):
            assert float((other[part] / one[part] - 1).abs().max()) < SAME_PREDICTIONS, part
        for part in ("examples", "fingerprint", "reached"):
            assert other[part] == one[part]
        assert other["cost"] == pytest.approx(one["cost"], rel=1e-6 if single else 1e-12)
        assert other["noise"] == pytest.approx(one["noise"])


class TestSameNumbers:
    @pytest.mark.parametrize("name", CASES)
    def test_of_two_processes(self, two, name):
        check_same(name, [cases[name] for cases, _ in two])

    @pytest.mark.parametrize("kind", DATA)
    def test_of_data_of_two_processes(self, two, kind):
        numbers, floats, _ = of_data(kind, 0, 1)
        for ours, our_floats, processes in (kinds[kind] for _, kinds in two):
            assert ours == numbers == (sum(processes["examples"]), numbers[1])
            torch.testing.assert_close(our_floats, floats, rtol=1e-6, atol=0)

    def test_of_four_processes(self, tmp_path):
        four = found_by(4, ["opg krylov", "ggn incremental"], [], tmp_path)
        for name in four[0][0]:
            check_same(name, [cases[name] for cases, _ in four])

    def test_the_cases_are_what_they_are_called(self, two):
        found, data = two[0]
        assert found["opg krylov"]["reached"] < sum(x.numel() for x in subject()[0].parameters())
        assert found["restarts"]["restarts"]["hessian"] > 0
        assert found["restarted blocks"]["restarts"]["opg"] > 0
        values = found["repeated eigenvalues"]["values"]["ggn"]
        assert float(values[0] - values[-1]) < 1e-9  # forty copies of one
        sources = {kind: processes["source"] for kind, (_, _, processes) in data.items()}
        assert sources["tensors"] == sources["same sampler"] == "split"
        assert sources["distributed sampler"] == "sampler"
        assert sources["shards"] == sources["stream"] == "own"
        assert data["shards"][2]["examples"] == [94, 7]


def sharded(model):
    """The model with parameters that processes share, in two ways of torch."""
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
    """The first line and the numbers of one process of two; what it refuses; files as well."""
    model, data = subject()
    own, some = fit(model, data, **OPTIONS), data[0][:5]
    numbers = asked_of(own, process)
    for name, options in FILES.items():
        own.save(folder / name, **options)
    numbers["loaded"] = deltabars.load(folder / "plain", model).predict(some).std
    wrapped = fit(DistributedDataParallel(copy.deepcopy(model)), data, **OPTIONS)
    assert wrapped.network.parameters.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    numbers["wrapped"] = wrapped.predict(some).std
    with pytest.raises(StorageError, match=r"that 2 processes share\. Save the fit, and load it"):
        pickle.dumps(own)
    with pytest.raises(BadValueError, match="certify: expected one process, got 2"):
        own.certify(some, data, estimator="opg")
    for each in sharded(model):
        with pytest.raises(ModelError, match="Load a full state dict into a plain model"):
            fit(each, data)
    for name, most, block in STEPS:
        costs = fit(model, data, estimator=name, rank=60, solver="krylov").diagnostics
        steps = costs[name]["products"] / block
        assert costs["processes"]["collectives"] < most * steps + 60
    with deltabars.distributed.alone():
        numbers["alone"] = fit(model, data, **OPTIONS).predict(some).std if process else None
    return repr(own).splitlines()[0], numbers


class TestAnswers:
    def test_are_those_of_one_process_and_so_are_files(self, tmp_path):
        (model, data), plain = subject(), fit(*subject(), **OPTIONS)
        some = data[0][:5]
        found = results(2, partial(answers, folder=tmp_path), tmp_path / "processes")
        for process, (line, numbers) in enumerate(found):
            expected = asked_of(plain, process)
            assert line == repr(plain).splitlines()[0]
            for name in numbers.keys() - {"alone"}:
                exact = expected.get(name, expected["std"])
                torch.testing.assert_close(numbers[name], exact, rtol=1e-5, atol=1e-9)
        assert torch.equal(numbers["alone"], expected["std"])
        for name in FILES:
            loaded = deltabars.load(tmp_path / name, model).predict(some).std
            torch.testing.assert_close(loaded, expected["std"])
        assert len(list((tmp_path / "plain").glob("vectors-*"))) == 2
        assert len(list((tmp_path / "files").glob("vectors-*"))) > 4


def other_sampler(process):
    model, data = subject()
    dataset = TensorDataset(*data)
    fit(model, DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 0), batch_size=8))


def raising(process):
    model, calls = copy.deepcopy(subject()[0]), itertools.count()
    model.register_forward_pre_hook(lambda *_: 1 / (next(calls) != 6 or not process) and None)
    fit(model, subject()[1], estimator="hessian", solver="krylov")


def missing(process):
    if not process:
        fit(*subject())


# By name: what a process does, and what the failing one says.
FAILURES = {
    "other sampler": (other_sampler, "expected that of process 1 of 2, got one of"),
    "raises": (raising, "division by zero"),
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
            other, none = copy.deepcopy(model), slice(0, 0 if process else None)
            other[0].weight.data[0, 0] += 0.01 * process
            curved = nn.Sequential(model[0], nn.Softplus() if process else nn.ReLU(), model[2])
            wide = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, CLASSES)).double()
            batches = [(inputs[:40], targets[:40]), (inputs[40:], targets[40:])]
            kept = "kept" if process else None
            calls = {
                "an example for each of 2 processes, got 1": (model, (inputs[:1], targets[:1])),
                "one example in process 1, got none": (model, (inputs[none], targets[none])),
                "a part of them in each of 2 processes, got": (model, batches),
                "the same weights in every process": (other, data),
                "every process": (curved, data),
                "another .*model.* in process 1": (wide if process else model, data),
                "another rank in process 1": (model, data, {"rank": 10 + process}),
                "another checkpoint in process 1": (model, data, {"checkpoint": kept}),
            }
            for said, (model, data, *options) in calls.items():
                with pytest.raises(DeltaBarsError, match=said):
                    fit(model, data, **dict(*options))

        subject()
        results(2, work, tmp_path / "processes")

    def test_a_killed_fit_is_resumed_by_as_many_processes(self, tmp_path):
        """The others end with an error, and the same launch ends with the numbers of one fit."""
        folder, options = tmp_path / "kept", stopping.WAYS["block_krylov"]

        def work(process):
            found = stopping.fit(folder, **options)
            return found.spectra["opg"].values, found.diagnostics["opg"]["products"]

        expected = stopping.fit(**options)
        launch = launched(2, work, tmp_path / "first", timeout=20.0)
        while not any(folder.glob("*.safetensors")):
            assert os.waitpid(launch.pids[1], os.WNOHANG)[0] == 0, "It ended before that."
            time.sleep(0.001)
        os.kill(launch.pids[1], signal.SIGKILL)
        first, second = launch.outcomes()
        assert second.status == -signal.SIGKILL
        assert first.error.startswith("ProcessError: ")
        for values, products in results(2, work, tmp_path / "second"):
            torch.testing.assert_close(values, expected.spectra["opg"].values, rtol=1e-6, atol=0)
            assert products == expected.diagnostics["opg"]["products"]
