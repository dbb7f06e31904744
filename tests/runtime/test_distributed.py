"""Fits on several processes: the numbers of one process, whoever reads what, and how they fail."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deltabars
from deltabars import Problem
from deltabars.errors import BadValueError, DeltaBarsError, ModelError, StorageError
from tests import stopping
from tests.processes import (
    CASES,
    CLASSES,
    DATA,
    ESSENTIALS,
    case,
    fit,
    launched,
    of_data,
    results,
    subject,
)

SAME_EIGENVALUES, SAME_PREDICTIONS = 1e-6, 1e-5  # relative
FOR_FOUR = ("distributed sampler", "shards")
OPTIONS = {"estimator": "sandwich", "solver": "krylov", "rank": 20}


def work(names: Any, kinds: Any, count: int) -> Any:
    """All of the cases and kinds of data in one process."""
    return lambda process: (
        {name: case(name, count) for name in names},
        {kind: of_data(kind, process, count) for kind in kinds},
    )


def found_by(count, names, kinds, folders):
    for name in ESSENTIALS:
        alone(name)  # what torch loads for a first fit is loaded once, before they part
    return results(count, work(names, kinds, count), folders.mktemp("some") / "processes")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return found_by(2, CASES, DATA, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return found_by(4, ESSENTIALS, FOR_FOUR, tmp_path_factory)


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

    @pytest.mark.parametrize("name", ESSENTIALS)
    def test_of_four_processes(self, four, name):
        check_same(name, [cases[name] for cases, _ in four])

    def test_the_cases_are_what_they_are_called(self, two):
        found = two[0][0]
        size = sum(weight.numel() for weight in subject()[0].parameters())
        assert found["opg krylov"]["reached"] < size
        assert found["restarts"]["statistics"]["hessian"]["restarts"] > 0
        assert found["restarted blocks"]["statistics"]["opg"]["restarts"] > 0
        values = found["repeated eigenvalues"]["values"]["ggn"]
        assert float(values[0] - values[-1]) < 1e-9  # forty copies of one


class TestData:
    @pytest.mark.parametrize("kind", DATA)
    def test_of_two_processes(self, two, kind):
        check_same_data(kind, [kinds[kind] for _, kinds in two])

    @pytest.mark.parametrize("kind", FOR_FOUR)
    def test_of_four_processes(self, four, kind):
        check_same_data(kind, [kinds[kind] for _, kinds in four])

    def test_who_reads_what(self, two):
        sources = {kind: found["processes"]["source"] for kind, found in two[0][1].items()}
        counts = {kind: found["processes"]["examples"] for kind, found in two[0][1].items()}
        assert sources["tensors"] == sources["shuffled"] == sources["own sampler"] == "split"
        assert sources["distributed sampler"] == "sampler"
        assert sources["shards"] == sources["stream"] == sources["batches"] == "own"
        assert counts["tensors"] == counts["distributed sampler"] == [51, 50]
        assert counts["shards"] == [94, 7]


def refused(action, kind):
    """What is said of something that is refused."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def answers(process, folder):
    """Everything that can be asked of a fit, in one process of two."""
    model, data = subject()
    own = fit(model, data, **OPTIONS)
    some = data[0][:5]
    own.save(folder / "plain")
    own.save(folder / "short", dtype="bfloat16")
    own.save(folder / "files", max_file_size="20KB")
    tuned = own.tune_l2()
    found = {
        "repr": repr(own),
        "html": own._repr_html_(),
        "sample": own.sample(3),
        "with_l2": own.with_l2(0.05).predict(some).std,
        "tuned": (tuned.l2, own.tune_l2(data, "validation").l2),
        "effective": own.effective_parameters_interval,
        "covariance": own.predict(some, covariance=True, classes="top2").covariance,
        "uneven": own.predict(data[0][: 3 if process else 90], batch_size=7).std,
        "served": own.predict(some, estimator="opg", rank=7).std,
        "offloaded": own.offloaded().predict(some).std,
        "loaded": deltabars.load(folder / "plain", model).predict(some).std,
        "pickle": refused(lambda: pickle.dumps(own), StorageError),
        "certify": refused(lambda: own.certify(some, data, estimator="opg"), BadValueError),
    }
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
        data = subject()[1]
        some = data[0][:5]
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-9)
        tuned = plain.tune_l2().l2, plain.tune_l2(data, "validation").l2
        for process, found in enumerate(asked[0]):
            close(found["sample"], plain.sample(3))
            close(found["with_l2"], plain.with_l2(0.05).predict(some).std)
            close(found["uneven"], plain.predict(data[0][: 3 if process else 90]).std)
            close(found["served"], plain.predict(some, estimator="opg", rank=7).std)
            expected = plain.predict(some, covariance=True, classes="top2").covariance
            close(found["covariance"], expected)
            for name in ("loaded", "offloaded"):
                close(found[name], plain.predict(some).std)
            assert found["tuned"] == pytest.approx(tuned, rel=1e-5)
            assert found["effective"] == pytest.approx(plain.effective_parameters_interval)
            assert found["repr"].splitlines()[0] == repr(plain).splitlines()[0]
            assert "<table" in found["html"]

    def test_what_is_refused_says_what_to_do(self, asked):
        for found in asked[0]:
            assert "that 2 processes share. Save the fit, and load it" in found["pickle"]
            assert "certify: expected one process, got 2" in found["certify"]

    def test_one_process_may_fit_alone(self, asked, plain):
        expected = plain.predict(subject()[1][0][:5]).std
        assert torch.equal(asked[0][1]["alone"], expected)

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

    def test_models_of_training_on_several_processes(self, tmp_path, plain):
        def work(process):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

            model, data = subject()
            wrapped = fit(DistributedDataParallel(copy.deepcopy(model)), data, **OPTIONS)
            names, std = wrapped.network.parameters.names, wrapped.predict(data[0][:5]).std
            mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")
            first, second = (copy.deepcopy(model) for _ in range(2))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, about its older ways
                sharded = [
                    fully_shard(first, mesh=mesh),
                    FullyShardedDataParallel(second, device_id=cpu),
                ]
            return names, std, [refused(partial(fit, each, data), ModelError) for each in sharded]

        for names, std, texts in results(2, work, tmp_path / "processes"):
            assert names == ("0.weight", "0.bias", "2.weight", "2.bias")
            torch.testing.assert_close(std, plain.predict(subject()[1][0][:5]).std)
            for kind, text in zip(("DTensor", "FullyShardedDataParallel"), texts, strict=True):
                assert f"got {kind}, which" in text
                assert "Load a full state dict into a plain model" in text


def resident():
    """The resident memory of this process that no file stands for, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def measured(process, count):
    """A fit with P = 299,050 and K = 40: its memory beyond what was there, and its vectors'."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(500, 400), nn.Tanh(), nn.Linear(400, 240), nn.Tanh(), nn.Linear(240, 10)
    )
    data = torch.randn(64, 500), torch.randint(0, 10, (64,))
    options = {"estimator": "opg", "solver": "krylov", "batch_size": 8, "memory_budget": 1 << 30}
    fit(*subject(), **options).predict(subject()[1][0][:4])  # what comes with the first one
    gc.collect()
    before, peak, is_over = resident(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    vectors = fit(model, data, rank=40, **options).spectra["opg"].vectors
    is_over.set()
    watcher.join()
    return peak - before, (vectors if count == 1 else vectors.part).nbytes


class TestCosts:
    @pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
    def test_memory_falls_with_the_processes(self, tmp_path):
        peaks, sizes = {}, {}
        for count in (1, 2):
            found = results(count, partial(measured, count=count), tmp_path / str(count))
            peaks[count], sizes[count] = map(max, zip(*found, strict=True))
        assert sizes == {1: 40 * 299_050 * 4, 2: 40 * 299_050 * 2}
        assert peaks[2] < 0.85 * peaks[1]

    @pytest.mark.parametrize(("estimator", "most"), [("hessian", 7), ("opg", 14)])
    def test_collectives_a_step_are_few(self, tmp_path, estimator, most):
        """One step is a product of one row for the Hessian, of a block for the others."""

        def work(process):
            found = fit(*subject(), estimator=estimator, solver="krylov", rank=60)
            return found.diagnostics["processes"], found.diagnostics[estimator]["products"]

        (sent, products), _ = results(2, work, tmp_path / "processes")
        steps = products / (1 if estimator == "hessian" else 6)
        assert sent["collectives"] < most * steps + 60


def too_few(process):
    model, data = subject()
    fit(model, tuple(part[:1] for part in data))


def empty_shard(process):
    model, data = subject()
    fit(model, tuple(part[: 0 if process else None] for part in data))


def same_stream(process):
    model, (inputs, targets) = subject()
    fit(model, [(inputs[:40], targets[:40]), (inputs[40:], targets[40:])])


def other_sampler(process):
    model, data = subject()
    dataset = TensorDataset(*data)
    fit(model, DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 0), batch_size=8))


def other_weights(process):
    model, data = subject()
    with torch.no_grad():
        model[0].weight[0, 0] += 0.01 * process
    fit(model, data)


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


# By name: what a process does, what the failing one says, and whether both say it.
FAILURES = {
    "too few": (too_few, "expected an example for each of 2 processes, got 1", True),
    "empty shard": (empty_shard, "expected at least one example in process 1, got none", True),
    "same stream": (same_stream, "expected a part of them in each of 2 processes, got", True),
    "other weights": (other_weights, "expected the same weights in every process", True),
    "other sampler": (other_sampler, "expected that of process 1 of 2, got one of", False),
    "no inputs": (no_inputs, "Inputs: expected at least one", False),
    "raises": (raising, "no such shard", False),
    "one process only": (missing, None, False),
}


class TestFailures:
    @pytest.mark.parametrize("name", FAILURES)
    def test_every_process_ends_and_says_why(self, tmp_path, name):
        work, said, by_both = FAILURES[name]
        subject()
        first, second = launched(2, work, tmp_path / "processes", timeout=5.0).outcomes(40.0)
        if said is not None:
            assert said in second.error
        assert by_both is (said is not None and said in first.error)
        if not by_both:
            assert first.error.startswith("ProcessError: Processes: expected an answer from all 2")
            assert "Another process has failed or was ended" in first.error

    def test_other_arguments_in_one_process_are_refused_by_name(self, tmp_path):
        def work(process):
            model, data = subject()
            curved = nn.Sequential(model[0], nn.Softplus() if process else nn.ReLU(), model[2])
            wide = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, CLASSES)).double()
            loss = nn.CrossEntropyLoss(label_smoothing=0.1 * process)
            calls = {
                "rank": lambda: fit(model, data, rank=10 + process),
                "params": lambda: fit(model, data, params=["2.*"] if process else None),
                "l2": lambda: fit(model, data, l2=0.02 + 0.001 * process),
                "model": lambda: fit(wide if process else model, data),
                "other outputs": lambda: fit(curved, data),
                "likelihood": lambda: fit(model, data, likelihood=loss),
                "dtype": lambda: fit(model, data, dtype=torch.float32 if process else None),
                "checkpoint": lambda: fit(model, data, checkpoint="kept" if process else None),
                "of a problem params": lambda: Problem(
                    model, data, parameters=["0.*"] if process else None, l2=0.1
                ),
            }
            return {name: refused(call, DeltaBarsError) for name, call in calls.items()}

        subject()
        for texts in results(2, work, tmp_path / "processes"):
            for name, said in texts.items():
                assert "in every process, got" in said
                assert name.removeprefix("of a problem ") in said
                assert "in process 1" in said

    @pytest.mark.parametrize("way", ["lanczos", "block_krylov"])
    def test_a_killed_fit_is_resumed_by_as_many_processes(self, tmp_path, way):
        """The others end with an error, and the same launch ends with the numbers of one fit."""
        folder, options = tmp_path / "kept", stopping.WAYS[way]

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
        launch.kill(1)
        first, second = launch.outcomes()
        assert second.status == -signal.SIGKILL
        assert first.error.startswith("ProcessError: ")
        for values, statistics in results(2, work, tmp_path / "second"):
            for name, found in values.items():
                torch.testing.assert_close(found, expected.spectra[name].values, rtol=1e-6, atol=0)
            assert statistics["products"] == expected.diagnostics[name]["products"]
