"""What can be asked of a fit that ranks share; its memory and messages; models that are shared."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deltabars
from deltabars.errors import BadValueError, DataError, ModelError, ProcessError, StorageError
from tests.ranked import fit, launched, results, subject

OPTIONS = {"estimator": "sandwich", "solver": "krylov", "rank": 20}


def refused(action, kind):
    """What is said of something that is refused."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def answers(rank, folder):
    """Everything that can be asked of a fit, on one rank of two."""
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
        "effective": (own.effective_parameters, own.effective_parameters_interval),
        "covariance": own.predict(some, covariance=True, classes="top2").covariance,
        "uneven": own.predict(data[0][: 3 if rank else 90], batch_size=7).std,
        "served": own.predict(some, estimator="opg", rank=7).std,
        "offloaded": own.offloaded().predict(some).std,
        "loaded": deltabars.load(folder / "plain", model).predict(some).std,
        "pickle": refused(lambda: pickle.dumps(own), StorageError),
        "copy": refused(lambda: copy.deepcopy(own), StorageError),
        "certify": refused(lambda: own.certify(some, data, estimator="opg"), BadValueError),
    }
    with deltabars.ranks.alone():
        found["alone"] = rank and fit(model, data, **OPTIONS).predict(some).std
    return found


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The answers of two ranks, and the folder that they have written to."""
    folder = tmp_path_factory.mktemp("asked")
    subject()
    return results(2, partial(answers, folder=folder), folder / "ranks"), folder


@pytest.fixture(scope="module")
def plain():
    return fit(*subject(), **OPTIONS)


class TestAnswers:
    def test_are_those_of_one_process(self, asked, plain):
        data = subject()[1]
        some = data[0][:5]
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-9)
        for rank, found in enumerate(asked[0]):
            close(found["sample"], plain.sample(3))
            close(found["with_l2"], plain.with_l2(0.05).predict(some).std)
            close(found["uneven"], plain.predict(data[0][: 3 if rank else 90]).std)
            close(found["served"], plain.predict(some, estimator="opg", rank=7).std)
            expected = plain.predict(some, covariance=True, classes="top2").covariance
            close(found["covariance"], expected)
            for name in ("loaded", "offloaded"):
                close(found[name], plain.predict(some).std)
            tuned = plain.tune_l2().l2, plain.tune_l2(data, "validation").l2
            assert found["tuned"] == pytest.approx(tuned, rel=1e-5)
            assert found["effective"][0] == pytest.approx(plain.effective_parameters)
            assert found["effective"][1] == pytest.approx(plain.effective_parameters_interval)
            assert found["repr"].splitlines()[0] == repr(plain).splitlines()[0]
            assert "<table" in found["html"]

    def test_what_is_refused_says_what_to_do(self, asked):
        for found in asked[0]:
            for name in ("pickle", "copy"):
                assert "got those that 2 ranks share. Save the fit, and load it" in found[name]
            assert "certify: expected one process, got 2 ranks. Save the fit" in found["certify"]

    def test_one_rank_may_fit_alone(self, asked, plain):
        expected = plain.predict(subject()[1][0][:5]).std
        assert torch.equal(asked[0][1]["alone"], expected)

    def test_files_of_ranks_load_in_one_process(self, asked, plain):
        model, data = subject()
        some, expected = data[0][:5], plain.predict(data[0][:5])
        for name in ("plain", "files"):
            loaded = deltabars.load(asked[1] / name, model)
            torch.testing.assert_close(loaded.predict(some).std, expected.std)
            data_too = loaded.certify(some, data, estimator="opg", tolerance=1e-2)
            assert bool(data_too.std.isfinite().all())
        assert len(list((asked[1] / "plain").glob("vectors-*"))) == 2
        assert len(list((asked[1] / "files").glob("vectors-*"))) > 4
        short = deltabars.load(asked[1] / "short", model)
        assert 0 < short.diagnostics["storage"]["opg"]["norm"] < 0.01
        found = short.predict(some)
        assert bool((found.std_low <= expected.std).all() & (expected.std <= found.std_high).all())

    def test_inputs_that_are_missing_on_a_rank(self, tmp_path):
        def work(rank):
            own = fit(*subject(), **OPTIONS)
            own.predict(subject()[1][0][: 0 if rank else 5])

        first, second = launched(2, work, tmp_path / "ranks").outcomes()
        assert second.error == f"{DataError.__name__}: Inputs: expected at least one on every " + (
            "rank, got none."
        )
        assert first.error.startswith(ProcessError.__name__)
        assert "error on rank 1: Inputs: expected at least one on every rank" in first.error


class TestModels:
    def test_of_training_on_several_processes(self, tmp_path, plain):
        def work(rank):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
            from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

            model, data = subject()
            wrapped = fit(DistributedDataParallel(copy.deepcopy(model)), data, **OPTIONS)
            wrapped.save(tmp_path / "wrapped")
            names, std = wrapped.network.parameters.names, wrapped.predict(data[0][:5]).std
            mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")
            first, second, third = (copy.deepcopy(model) for _ in range(3))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, about its older ways
                sharded = [
                    fully_shard(first, mesh=mesh),
                    FullyShardedDataParallel(second, device_id=cpu),
                    parallelize_module(third, mesh, {"0": ColwiseParallel()}),
                ]
            said = [refused(partial(fit, each, data), ModelError) for each in sharded]
            return names, std, said

        for names, std, said in results(2, work, tmp_path / "ranks"):
            assert names == ("0.weight", "0.bias", "2.weight", "2.bias")
            torch.testing.assert_close(std, plain.predict(subject()[1][0][:5]).std)
            for kind, text in zip(
                ("DTensor", "FullyShardedDataParallel", "DTensor"), said, strict=True
            ):
                assert f"expected whole parameters on every process, got {kind}, which" in text
                assert "Load a full state dict into a plain model" in text
        loaded = deltabars.load(tmp_path / "wrapped", subject()[0])
        torch.testing.assert_close(loaded.predict(subject()[1][0][:5]).std, std)


def anonymous():
    """The resident memory of this process that no file stands for, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def measured(rank, count):
    """A fit with P = 299,050 and K = 40: its memory beyond what was there, and its messages."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(500, 400), nn.Tanh(), nn.Linear(400, 240), nn.Tanh(), nn.Linear(240, 10)
    )
    data = torch.randn(64, 500), torch.randint(0, 10, (64,))
    options = {"estimator": "opg", "solver": "krylov", "batch_size": 8, "memory_budget": 1 << 30}
    fit(*subject(), **options).predict(subject()[1][0][:4])  # what comes with the first one
    gc.collect()
    before, peak, is_over = anonymous(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = fit(model, data, rank=40, **options)
    is_over.set()
    watcher.join()
    vectors = found.spectra["opg"].vectors
    kept = vectors if count == 1 else vectors.part
    return peak - before, kept.nbytes, found.diagnostics.get("ranks"), found.diagnostics["opg"]


def memory_of(counts, folder):
    """By the number of ranks: the peak of one and the bytes of its eigenvectors, at the most."""
    found = {
        count: results(count, partial(measured, count=count), folder / str(count))
        for count in counts
    }
    return {
        count: (max(peak for peak, *_ in ranks), max(size for _, size, *_ in ranks))
        for count, ranks in found.items()
    }


class TestCosts:
    @pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
    def test_memory_falls_with_the_ranks(self, tmp_path):
        (peak, kept), (peak_of_two, kept_of_two) = memory_of((1, 2), tmp_path).values()
        assert kept == 40 * 299_050 * 4
        assert kept_of_two == kept / 2
        assert peak_of_two < 0.85 * peak

    @pytest.mark.parametrize(("estimator", "most"), [("hessian", 7), ("opg", 12)])
    def test_messages_a_step_are_few(self, tmp_path, estimator, most):
        """One step is a product of one row for the Hessian, of a block for the others."""

        def work(rank):
            found = fit(*subject(), estimator=estimator, solver="krylov", rank=60)
            return found.diagnostics["ranks"], found.diagnostics[estimator]["products"]

        (sent, products), _ = results(2, work, tmp_path / "ranks")
        steps = products / (1 if estimator == "hessian" else 6)
        print(estimator, sent["messages"], products, sent["messages"] / steps)
        assert sent["messages"] < most * steps + 60
