"""What becomes of a fit on several processes when one of them fails, and of what it had done."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from deltabars import Problem
from deltabars.errors import DeltaBarsError
from deltabars.runtime import distributed as group
from tests import stopping
from tests.ranked import CLASSES, fit, launched, results, subject

SOON = 25.0  # seconds, on a machine that is busy
PATIENCE = 4.0


def too_few(rank):
    model, data = subject()
    fit(model, tuple(part[:1] for part in data))


def empty_shard(rank):
    model, data = subject()
    fit(model, tuple(part[: 0 if rank else None] for part in data))


def same_stream(rank):
    model, (inputs, targets) = subject()
    fit(model, [(inputs[:40], targets[:40]), (inputs[40:], targets[40:])])


def other_sampler(rank):
    model, data = subject()
    dataset = TensorDataset(*data)
    fit(model, DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 0), batch_size=8))


def nan(rank):
    model, (inputs, targets) = subject()
    inputs = inputs[50 * rank : 50 * rank + 50 - rank].clone()
    inputs[3, 2] = torch.nan if rank else 0.0
    fit(model, (inputs, targets[: len(inputs)]))


def other_weights(rank):
    model, data = subject()
    with torch.no_grad():
        model[0].weight[0, 0] += 0.01 * rank
    fit(model, data)


def other_options(rank):
    fit(*subject(), rank=10 + rank)


def other_l2(rank):
    fit(*subject(), l2=0.02 + 0.001 * rank)


class Failing(nn.Module):
    """A model that cannot go on after some passes."""

    def __init__(self, inner, passes, what):
        super().__init__()
        self.inner, self.passes, self.what = inner, passes, what

    def forward(self, inputs):
        self.passes -= 1
        if self.passes == 0:
            self.what()
        return self.inner(inputs)


def called_otherwise(rank):
    """What each of several calls raises that are not the same on both ranks."""
    model, data = subject()
    first, last = nn.Linear(10, 16 + 8 * rank).double(), nn.Linear(16 + 8 * rank, CLASSES).double()
    shaped = nn.Sequential(first, nn.ReLU(), last)
    shaped = shaped if rank else model
    curved = nn.Sequential(model[0], nn.Softplus() if rank else nn.ReLU(), model[2])
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1 * rank)
    summed = nn.CrossEntropyLoss(reduction="sum" if rank else "mean")
    calls = {
        "params": lambda: fit(model, data, params=["2.*"] if rank else None),
        "model": lambda: fit(shaped, data),
        "other outputs": lambda: fit(curved, data),
        "likelihood": lambda: [fit(model, data, likelihood=smoothed)],
        "another likelihood": lambda: [fit(model, data, likelihood=summed)],
        "dtype": lambda: fit(model, data, dtype=torch.float32 if rank else None),
        "checkpoint": lambda: fit(model, data, checkpoint="kept" if rank else None),
        "solver": lambda: fit(model, data, solver="none" if rank else "auto"),
        "another params": lambda: Problem(
            model, data, parameters=["0.*"] if rank else None, l2=0.1
        ),
    }
    raised = {}
    for name, call in calls.items():
        with pytest.raises(DeltaBarsError) as caught:
            call()
        raised[name] = str(caught.value)
    return raised


def _raises():
    raise OSError("no such shard")


def raising(rank):
    model, data = subject()
    passes = 7 if rank else 10**9
    fit(Failing(model, passes, _raises), data, estimator="hessian", solver="krylov")


def hanging(rank):
    model, data = subject()
    passes = 7 if rank else 10**9
    sleepy = Failing(model, passes, lambda: time.sleep(14.0))
    fit(sleepy, data, estimator="hessian", solver="krylov")


def one_rank_only(rank):
    if rank == 1:
        time.sleep(12.0)
    else:
        fit(*subject())


# By name: what a rank does, and what both of them say of it.
FAILURES = {
    "too few": (too_few, "expected an example for each of 2 ranks, got 1"),
    "empty shard": (empty_shard, "rank 1: Data: expected at least one example, got none"),
    "same stream": (same_stream, "expected a part of them on each of 2 ranks, got the same 101"),
    "other sampler": (other_sampler, "rank 1: DistributedSampler: expected that of rank 1 of 2"),
    "nan": (nan, "rank 1: Inputs: expected finite values, got NaN"),
    "other weights": (other_weights, "expected the same weights on every rank"),
    "other options": (other_options, "expected the same options on every rank"),
    "other l2": (other_l2, "expected the same options on every rank"),
    "raises": (raising, "error on rank 1: .*no such shard"),
    "hangs": (hanging, "got none from rank 1 in time"),
    "one rank only": (one_rank_only, "to the same call, got nothing from rank 1 so far"),
}


@pytest.fixture(scope="module", autouse=True)
def failing(tmp_path_factory):
    """Both ranks of every failure, from the start: they mostly wait, while others are killed."""
    folder = tmp_path_factory.mktemp("failures")
    subject()  # is there before they start
    return {
        name: launched(2, work, folder / name, timeout=8.0, patience=PATIENCE)
        for name, (work, _) in FAILURES.items()
    }


def work_with(folder, **options):
    """A fit of many steps that saves every one of them, and how many products it took."""

    def work(rank):
        found = stopping.fit(folder, **options)
        inputs = stopping.subject()[1][0][:9]
        predicted = found.predict(inputs, moderation=None)
        values = {name: pairs.values for name, pairs in found.spectra.items()}
        return values, predicted.std, found.diagnostics.get("ranks")

    return work


def killed(count, victim, folder, where, states, **options):
    """Kill one rank when so many states have been written; how the others ended, and when."""
    launch = launched(count, work_with(folder, **options), where, patience=PATIENCE)
    while len(list(folder.glob("state-*"))) < 1 or stopping._newest(folder) < states:
        assert os.waitpid(launch.pids[victim], os.WNOHANG)[0] == 0, "It ended before that."
        time.sleep(0.001)
    launch.kill(victim)
    began = time.monotonic()
    return launch.outcomes(SOON), time.monotonic() - began


WAYS = {
    "sandwich": {"estimator": "sandwich", "rank": 10},
    "opg": {"estimator": "opg", "rank": 24},
    "incremental": {"estimator": "opg", "rank": 60, "solver": "incremental", "batch_size": 3},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What comes of each way in one process, and how many files it writes on the way."""

    @cache
    def found(way):
        folder = tmp_path_factory.mktemp("plain") / "kept"
        values, std, _ = work_with(folder, **WAYS[way])(0)
        return values, std, stopping._newest(folder)

    return found


def test_other_arguments_on_one_rank_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(group, "_FAREWELL", 0.2)
    subject()
    for raised in results(2, called_otherwise, tmp_path / "ranks"):
        for name, said in raised.items():
            assert "on every rank, got" in said
            assert name.removeprefix("another ") in said
            assert "on rank 1" in said


class TestKilled:
    @pytest.mark.parametrize(
        ("way", "counts", "victim"),
        [("opg", (2, 3), 1), ("opg", (3, 1), 2), ("sandwich", (2, 1), 0)],
    )
    def test_the_others_stop_and_another_number_goes_on(
        self, uninterrupted, tmp_path, way, counts, victim
    ):
        folder, options = tmp_path / "kept", WAYS[way]
        expected, std, files = uninterrupted(way)
        outcomes, seconds = killed(counts[0], victim, folder, tmp_path / "a", 12, **options)
        assert seconds < SOON
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert outcome.status == -signal.SIGKILL
                continue
            assert outcome.status == 1
            assert outcome.error.startswith("ProcessError: "), outcome.error
            assert f"rank {victim}" in outcome.error, outcome.error
        began = stopping._newest(folder)
        if counts[1] == 1:
            found = [work_with(folder, **options)(0)]
        else:
            found = results(counts[1], work_with(folder, **options), tmp_path / "b")
        assert stopping._newest(folder) - began < files - 3  # it has not begun again
        for values, predicted, _ in found:
            for name in expected:
                torch.testing.assert_close(values[name], expected[name], rtol=1e-6, atol=0)
            torch.testing.assert_close(predicted, std, rtol=1e-5, atol=0)

    def test_from_one_to_two(self, uninterrupted, tmp_path):
        folder, options = tmp_path / "kept", WAYS["sandwich"]
        expected, std, files = uninterrupted("sandwich")
        stopping.kill_after(folder, 14, **options)
        began = stopping._newest(folder)
        found = results(2, work_with(folder, **options), tmp_path / "b")
        assert stopping._newest(folder) - began < files - 3
        for values, predicted, _ in found:
            torch.testing.assert_close(values["hessian"], expected["hessian"], rtol=1e-6, atol=0)
            torch.testing.assert_close(predicted, std, rtol=1e-5, atol=0)

    def test_a_rank_that_is_stopped_is_named(self, tmp_path):
        work = work_with(tmp_path / "kept", **WAYS["sandwich"])
        launch = launched(2, work, tmp_path / "ranks", patience=PATIENCE)
        while not any((tmp_path / "kept").glob("state-*")):
            time.sleep(0.001)
        launch.kill(1, signal.SIGSTOP)
        began = time.monotonic()
        while os.waitid(os.P_PID, launch.pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() - began < SOON
            time.sleep(0.01)
        launch.kill(1, signal.SIGKILL)
        first, _ = launch.outcomes()
        assert first.error.startswith("ProcessError: "), first.error
        assert "got nothing any more from rank 1" in first.error


@pytest.fixture(scope="module")
def failures(failing):
    """How both ranks ended, of every failure."""
    return {name: launch.outcomes(50.0) for name, launch in failing.items()}


@pytest.mark.parametrize("name", FAILURES)
def test_every_rank_says_which_one_failed_and_of_what(failures, name):
    outcomes = failures[name]
    expected = FAILURES[name][1]
    own = {
        "empty shard": 1,
        "other sampler": 1,
        "nan": 1,
        "raises": 1,
        "hangs": 1,
        "one rank only": 1,
    }.get(name)
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < SOON + 10, rank
        if name == "one rank only" and rank == 1:
            assert outcome.error is None
            continue
        assert outcome.error is not None, rank
        if own in (None, rank):  # it has the error itself
            expected_here = expected.removeprefix("rank 1: ").removeprefix("error on rank 1: ")
            if name != "hangs":
                assert re.search(expected_here, outcome.error), outcome.error
        else:
            assert outcome.error.startswith("ProcessError: "), outcome.error
            assert re.search(expected, outcome.error), outcome.error
