"""The same seed gives the same bits; and the manifest says what else must be the same."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import deltabars
from deltabars.runtime.precision import same_bits
from tests.conftest import cached_case

CASE = cached_case("dense")
WAYS = {
    "plain": {},
    "sandwich": {"estimator": "sandwich"},
    "streamed": {"memory_budget": 4096, "rank": 2},  # bytes: every product reads the data again
    "auto": {"rank": "auto"},
}


def loader(workers, **options):
    return DataLoader(TensorDataset(*CASE.data), 7, shuffle=True, num_workers=workers, **options)


def fitted(data, estimator="opg", **options):
    options = {"l2": CASE.l2, "rank": 9, "solver": "krylov", "progress": False, **options}
    return deltabars.fit(CASE.model, data, estimator=estimator, **options)


def assert_same_bits(one, other):
    for name, pairs in one.spectra.items():
        for field in ("values", "vectors", "residuals", "smallest"):
            assert torch.equal(getattr(pairs, field), getattr(other.spectra[name], field)), field
    here, there = one.predict(CASE.unseen), other.predict(CASE.unseen)
    for field in ("std", "std_error", "mutual_information"):
        assert torch.equal(getattr(here, field), getattr(there, field)), field
    assert one.diagnostics["manifest"] == other.diagnostics["manifest"]


@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_workers_and_whatever_else_the_program_drew(way):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = fitted(loader(0), **WAYS[way])
        for workers in (0, 2) if way in ("plain", "sandwich") else (0,):
            torch.manual_seed(2)
            torch.randn(5)
            state = torch.get_rng_state()
            assert_same_bits(first, fitted(loader(workers), **WAYS[way]))
            assert torch.equal(torch.get_rng_state(), state)  # the program's own are left alone


def test_a_generator_of_ones_own_decides_for_itself():
    generators = (torch.Generator().manual_seed(seed) for seed in (3, 3, 4))
    first, same, other = (fitted(loader(0, generator=each)) for each in generators)
    assert_same_bits(first, same)
    assert not torch.equal(first.spectra["opg"].vectors, other.spectra["opg"].vectors)


def test_deterministic_is_kept_with_a_fit_and_changes_nothing_on_a_cpu(tmp_path):
    plain, asked = (fitted(CASE.data, deterministic=each) for each in (False, True))
    assert torch.equal(plain.spectra["opg"].vectors, asked.spectra["opg"].vectors)
    asked.save(tmp_path / "fit")
    loaded = deltabars.load(tmp_path / "fit", CASE.model)
    assert (plain.network.deterministic, loaded.network.deterministic) == (False, True)


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize("own", [None, ":16:8"])
def test_torchs_switches_are_set_and_put_back(own, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if own:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = switches()
    with same_bits(True):
        assert switches() == (True, False, False, own or ":4096:8")
    assert switches() == before


def test_the_manifest_says_what_must_be_the_same_and_goes_with_the_fit(tmp_path):
    fit = fitted(
        CASE.data, "ggn", seed=7, l2={"*": 0.05, "*.bias": 0.1}, params=["0.*"],
        residual_tolerance=1e-6, batch_size=5, dtype=torch.float32,
    )  # fmt: skip
    found = fit.diagnostics["manifest"]
    assert json.loads(json.dumps(found)) == found
    assert (found["deltabars"], found["torch"]) == (deltabars.__version__, torch.__version__)
    assert (found["device"], found["dtype"], found["threads"]) == ("cpu", "torch.float32", 1)
    assert found["data"]["fingerprint"] == fit.diagnostics["data_fingerprint"]
    expected = {
        "estimator": "ggn", "seed": 7, "l2": {"*": 0.05, "*.bias": 0.1}, "rank": 9,
        "params": ["0.weight", "0.bias"], "solver": "krylov", "residual_tolerance": 1e-6,
        "batch_size": 5, "likelihood": "categorical", "deterministic": False,
        "memory_budget": None, "max_products": None, "smallest": 0,
    }  # fmt: skip
    assert expected.items() <= found["options"].items()
    fit.save(tmp_path / "fit")
    loaded = deltabars.load(tmp_path / "fit", CASE.model)
    moved = fit.with_l2({"*": 0.1, "*.bias": 0.2})
    for each in (loaded, copy.deepcopy(fit), moved):
        assert each.diagnostics["manifest"] == found
