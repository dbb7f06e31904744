"""max_seconds: a fit that stops in time, with pairs and bounds that hold, and can be resumed."""

from __future__ import annotations

import math
import time
import warnings
from functools import cache

import pytest
import torch
from torch import nn

from deltabars.errors import ConvergenceWarning
from tests import processes
from tests.stopping import LONGER, WAYS, differing, fit, subject

AT_ONCE = 1e-9  # seconds
OVER = "max_seconds"


@cache
def whole(estimator):
    """All eigenpairs, by the dense matrix."""
    return fit(estimator=estimator, rank=700, solver="dense")


ALL = {way: WAYS[way] for way in ("lanczos", "restarted lanczos", "incremental")} | {
    "ggn": {"estimator": "ggn", "rank": 40},
    "auto": {"estimator": "ggn", "rank": "auto", "tolerance": 1e-6},
    "auto sandwich": LONGER["auto sandwich"],
}


@pytest.mark.parametrize("way", ALL)
def test_it_stops_and_the_same_call_resumes_to_the_same_bits(way, tmp_path):
    options = ALL[way]
    folder, plain = tmp_path / "kept", fit(**options)
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        some = fit(folder, seconds=1e9, max_seconds=AT_ONCE, **options)
    assert OVER in [some.diagnostics[name].get("stopped_by") for name in some.spectra]
    assert all(0 < len(some.spectra[name]) <= len(plain.spectra[name]) for name in some.spectra)
    if options["rank"] == "auto":
        assert some.diagnostics["rank"]["stopped_by"] == OVER
    inputs = subject()[1][0]
    assert bool(some.predict(inputs).std.isfinite().all())
    found = fit(folder, seconds=1e9, **options)
    assert differing(found, plain) == []
    assert "stopped_by" not in found.diagnostics[next(iter(found.spectra))]


@pytest.mark.parametrize(
    ("estimator", "solver"),
    [("opg", "krylov"), ("ggn", "krylov"), ("hessian", "krylov"), ("opg", "incremental")],
)
def test_what_it_has_by_then_is_honest(estimator, solver):
    """Whatever the moment: pairs that are pairs, and intervals with the exact value in them."""
    inputs = subject()[1][0][:9]
    exact = whole(estimator).predict(inputs).std
    for seconds in (AT_ONCE, 0.04):
        options = {"estimator": estimator, "rank": 60, "solver": solver, "batch_size": 7}
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
            some = fit(max_seconds=seconds, **options)
        for name, pairs in some.spectra.items():
            vectors = pairs.vectors
            gap = vectors @ vectors.T - torch.eye(len(pairs), dtype=torch.float64)
            assert float(gap.abs().max()) < 1e-9
            matrix = whole(name).spectra[name]
            there = (vectors @ matrix.vectors.T * matrix.values) @ matrix.vectors
            rest = (there - pairs.values[:, None] * vectors).norm(dim=1)
            allowed = pairs.residuals * pairs.values.clamp(min=1) + 1e-9
            assert bool((rest <= allowed).all())
        if estimator in ("opg", "ggn"):  # of H the interval supposes a tail above λ
            out = some.predict(inputs)
            assert bool((out.std_low <= exact * (1 + 1e-9)).all())
            assert bool((exact <= out.std_high * (1 + 1e-9)).all())


class Slow(nn.Sequential):
    """A network that takes its time."""

    def forward(self, inputs):
        time.sleep(0.01)
        return super().forward(inputs)


def test_a_slow_network_is_stopped_in_time():
    """It takes several seconds without a limit."""
    options = {"estimator": "sandwich", "rank": 100, "batch_size": 20, "memory_budget": 400_000}
    began = time.monotonic()
    with pytest.warns(ConvergenceWarning, match="max_seconds"):
        found = fit(model=Slow(subject()[0]), max_seconds=0.4, **options)
    assert time.monotonic() - began < 3.5  # on a machine that is busy with other things
    assert found.rank >= 1


def test_enough_time_changes_nothing():
    for seconds in (1e6, math.inf):
        assert differing(fit(max_seconds=seconds, **WAYS["ggn"]), fit(**WAYS["ggn"])) == []


def test_processes_stop_together(tmp_path):
    """Though their clocks differ."""

    def work(process):
        time.sleep(0.05 * process)
        with warnings.catch_warnings(action="ignore"):
            some = fit(max_seconds=0.1, **WAYS["ggn"])
        return some.spectra["ggn"].values, some.diagnostics["ggn"].get("stopped_by")

    one, two = processes.results(2, work, tmp_path / "both")
    assert torch.equal(one[0], two[0])
    assert one[1] == two[1]
