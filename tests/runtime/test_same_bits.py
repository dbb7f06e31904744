"""The same seed gives the same bits; and the manifest says what else must be the same."""

from __future__ import annotations

import copy
import json
import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import deltabars
from deltabars.errors import BadValueError, DataError
from deltabars.runtime.precision import same_bits
from tests.conftest import cached_case

CASE = cached_case("dense")
STREAMED = 4096  # bytes: less than the data take, so that every product reads them again


def loader(workers, *, shuffle=True, batch_size=7, **options):
    dataset = TensorDataset(*CASE.data)
    return DataLoader(
        dataset, batch_size=batch_size, shuffle=shuffle, num_workers=workers, **options
    )


def fitted(data, estimator="opg", **options):
    options = {"l2": CASE.l2, "rank": 9, "solver": "krylov", "progress": False, **options}
    return deltabars.fit(CASE.model, data, estimator=estimator, **options)


def assert_same_bits(one, other):
    assert list(one.spectra) == list(other.spectra)
    for name, pairs in one.spectra.items():
        for field in ("values", "vectors", "residuals", "smallest"):
            assert torch.equal(getattr(pairs, field), getattr(other.spectra[name], field)), field
    here, there = one.predict(CASE.unseen), other.predict(CASE.unseen)
    for field in ("mean", "std", "std_error", "score", "moderated", "mutual_information"):
        assert torch.equal(getattr(here, field), getattr(there, field)), field
    assert one.diagnostics["mean_loss"] == other.diagnostics["mean_loss"]
    assert one.diagnostics["manifest"] == other.diagnostics["manifest"]


@pytest.mark.parametrize("estimator", ["opg", "sandwich"])
def test_any_number_of_workers_and_whatever_else_the_program_drew(estimator):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = fitted(loader(0), estimator)
        for workers in (0, 2):
            torch.manual_seed(2)
            torch.randn(5)
            state = torch.get_rng_state()
            assert_same_bits(first, fitted(loader(workers), estimator))
            assert torch.equal(torch.get_rng_state(), state)  # the program's own are left alone


@pytest.mark.parametrize("options", [{"memory_budget": STREAMED, "rank": 2}, {"rank": "auto"}])
def test_data_that_are_read_again_and_again(options):
    before = torch.get_rng_state()
    first = fitted(loader(0), **options)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert_same_bits(first, fitted(loader(0), **options))


def test_a_generator_of_ones_own_decides_for_itself():
    def order(seed):
        data = loader(0, generator=torch.Generator().manual_seed(seed))
        return fitted(data)

    assert_same_bits(order(3), order(3))
    assert not torch.equal(order(3).spectra["opg"].vectors, order(4).spectra["opg"].vectors)


class Trembling(Dataset):
    """Inputs that are never the same: an augmentation that was left on."""

    def __len__(self):
        return len(CASE.targets)

    def __getitem__(self, index):
        return CASE.inputs[index] + torch.randn(4, dtype=torch.float64), CASE.targets[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_random_inputs_are_still_seen(workers):
    with pytest.raises(DataError, match="Turn off random augmentation"):
        fitted(DataLoader(Trembling(), batch_size=7, num_workers=workers))


def test_deterministic_changes_nothing_on_a_cpu(tmp_path):
    plain, asked = (fitted(CASE.data, "sandwich", deterministic=each) for each in (False, True))
    for name, pairs in plain.spectra.items():
        assert torch.equal(pairs.vectors, asked.spectra[name].vectors)
    assert not torch.are_deterministic_algorithms_enabled()
    asked.save(tmp_path / "fit")
    loaded = deltabars.load(tmp_path / "fit", CASE.model)
    assert (plain.network.deterministic, loaded.network.deterministic) == (False, True)
    with pytest.raises(BadValueError, match="deterministic: expected True or False, got 1"):
        fitted(CASE.data, deterministic=1)


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


def switch(algorithms, warn_only, fill, benchmark):
    torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize("own", [(False, False, True, True), (True, True, False, False)])
def test_torchs_switches_are_set_and_put_back(own, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    switch(*own)  # as a user may have them
    try:
        with same_bits(False):
            assert switches() == own
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        with same_bits(True):
            assert switches() == (True, False, False, False)
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(ValueError, match="inside"), same_bits(True):
            raise ValueError("inside")
        assert switches() == own
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # a user's own
        with same_bits(True):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        switch(*before)


def test_the_manifest_says_what_must_be_the_same_and_goes_with_the_fit(tmp_path):
    fit = fitted(
        CASE.data, "ggn", seed=7, l2={"*": 0.05, "*.bias": 0.1}, params=["0.*"],
        residual_tolerance=1e-6, batch_size=5, dtype=torch.float32,
    )  # fmt: skip
    found = fit.diagnostics["manifest"]
    assert json.loads(json.dumps(found)) == found
    assert (found["deltabars"], found["torch"]) == (deltabars.__version__, torch.__version__)
    assert (found["device"], found["dtype"], found["threads"]) == ("cpu", "torch.float32", 1)
    assert found["weights"] == fit.weights
    assert found["data"]["num_examples"] == 29
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
    for each in (loaded, copy.deepcopy(fit), pickle.loads(pickle.dumps(fit)), moved):
        assert each.diagnostics["manifest"] == found


def test_the_manifest_differs_where_something_does():
    plain = fitted(CASE.data).diagnostics["manifest"]
    other = CASE.inputs.clone()
    other[3, 1] += 1e-9
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    changed = {
        "data": fitted((other, CASE.targets)),
        "options": fitted(CASE.data, rank="auto", likelihood=loss),
        "dtype": fitted(CASE.data, dtype=torch.float32),
    }
    for name, fit in changed.items():
        assert fit.diagnostics["manifest"][name] != plain[name]
    options = changed["options"].diagnostics["manifest"]["options"]
    assert (options["rank"], options["likelihood"]["label_smoothing"]) == ("auto", 0.1)
