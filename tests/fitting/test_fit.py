"""What a fit promises beyond its error bars: seeds, subsets, λ, samples, diagnostics."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import BadValueError, OptimumWarning, SpectrumWarning
from tests.conftest import cached_case
from tests.oracles import Oracle

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")


def fitted(case, estimator="opg", rank=10, **options):
    options = {"l2": case.l2, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, rank=rank, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_seed_one_result_bit_for_bit(dense_case, estimator, dtype):
    first, second = (
        fitted(dense_case, estimator, solver="krylov", seed=7, dtype=dtype) for _ in range(2)
    )
    for name, pairs in first.spectra.items():
        assert torch.equal(pairs.values, second.spectra[name].values)
        assert torch.equal(pairs.vectors, second.spectra[name].vectors)
    a, b = first.predict(dense_case.unseen), second.predict(dense_case.unseen)
    assert torch.equal(a.std, b.std)
    assert torch.equal(a.std_error, b.std_error)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_solvers_agree(dense_case, estimator):
    exact = fitted(dense_case, estimator, solver="dense").predict(dense_case.unseen)
    for solver in ("krylov", "arpack"):
        out = fitted(dense_case, estimator, solver=solver).predict(dense_case.unseen)
        torch.testing.assert_close(out.std, exact.std, rtol=1e-8, atol=0)


@pytest.mark.parametrize("estimator", ["hessian", "opg", "sandwich"])
@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (["2.*"], ["2.weight", "2.bias"]),
        ("*.bias", ["0.bias", "2.bias"]),
        (lambda name: name.startswith("0"), ["0.weight", "0.bias"]),
        (lambda name, p: p.ndim == 2, ["0.weight", "2.weight"]),
        (deltabars.last_layer(), ["2.weight", "2.bias"]),
    ],
    ids=["patterns", "one pattern", "predicate", "predicate of two", "last layer"],
)
def test_parameter_subsets_are_exact(selection, names, estimator):
    case = cached_case("dense", l2=0.1)
    oracle = Oracle(case.model, case.inputs, case.targets, case.l2, names=names)
    with torch.no_grad():
        fit = fitted(case, estimator, oracle.size, params=selection)
    assert fit.network.parameters.names == tuple(names)
    exact = oracle.std(estimator, case.unseen)
    torch.testing.assert_close(fit.predict(case.unseen).std, exact, rtol=0, atol=1e-8)


def test_last_layer_names(dense_case):
    assert deltabars.last_layer(dense_case.model) == ["2.weight", "2.bias"]


def test_tied_weights_count_once_under_either_name():
    case = cached_case("shared")
    whole = fitted(case)
    assert whole.num_parameters == sum(p.numel() for p in case.model.parameters()) == 39
    for name in ("first.weight", "second.weight"):
        assert fitted(case, params=[name]).network.parameters.names == ("first.weight",)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_with_l2_is_the_fit_of_that_l2(estimator):
    case = cached_case("linear", l2=0.05)
    moved = fitted(case, estimator).with_l2(0.1)
    fresh = fitted(case, estimator, l2=0.1)
    assert moved.l2 == 0.1
    torch.testing.assert_close(
        moved.predict(case.unseen).std, fresh.predict(case.unseen).std, rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        moved.predict(case.unseen).std_error, fresh.predict(case.unseen).std_error,
        rtol=1e-6, atol=1e-8,  # the tail is λ itself here: what is left is √rounding
    )  # fmt: skip
    back = moved.with_l2(0.05)
    torch.testing.assert_close(
        back.predict(case.unseen).std, fitted(case, estimator).predict(case.unseen).std
    )


def test_with_l2_warns_where_the_hessian_turns_negative(dense_case):
    fit = fitted(dense_case, "hessian", dense_case.oracle.size)
    with pytest.warns(SpectrumWarning, match=r"got \d+ of 43 at or below zero"):
        weaker = fit.with_l2(1e-4)
    assert bool(weaker.predict(dense_case.unseen).std.isfinite().all())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_samples_have_the_covariance(estimator):
    case = cached_case("linear", l2=0.1)
    size, count = case.oracle.size, 200_000
    fit = fitted(case, estimator, size)
    draws = fit.sample(count, seed=3)
    exact = case.oracle.parameter_covariance(estimator)
    assert draws.shape == (count, size)
    scale = float(exact.diagonal().max())
    # The error of a sample covariance is about scale·√(2/count) = 0.003 of the scale.
    torch.testing.assert_close(draws.T.cov(), exact, rtol=0, atol=0.02 * scale)
    torch.testing.assert_close(draws.mean(0), case.oracle.point, rtol=0, atol=0.02 * scale**0.5)
    assert torch.equal(fit.sample(3, seed=1), fit.sample(3, seed=1))
    assert not torch.equal(fit.sample(3, seed=1), fit.sample(3, seed=2))


def test_samples_of_a_low_rank_fit_have_its_closed_covariance(dense_case):
    fit = fitted(dense_case, "opg", 6)
    pairs, n, l2 = fit.spectra["opg"], fit.num_examples, fit.l2
    closed = (1 / l2 + 1 / float(pairs.values[-1])) / 2
    q = pairs.vectors.T
    eye = torch.eye(fit.num_parameters, dtype=torch.float64)
    exact = (q / pairs.values @ q.T + closed * (eye - q @ q.T)) / n
    draws = fit.sample(100_000)
    torch.testing.assert_close(draws.T.cov(), exact, rtol=0, atol=0.03 * float(exact.max()))


@pytest.mark.parametrize("estimator", ["hessian", "opg", "ggn"])
def test_effective_parameters(dense_case, estimator):
    values = torch.linalg.eigvalsh(dense_case.oracle.matrix(estimator)).flip(0)
    shares = (values - dense_case.l2) / values
    fit = fitted(dense_case, estimator, 10)
    assert fit.effective_parameters == pytest.approx(float(shares[:10].sum()), rel=1e-9)
    low, high = fit.effective_parameters_interval
    if estimator != "hessian":
        assert low <= float(shares.sum()) <= high
    whole = fitted(dense_case, "opg", dense_case.oracle.size)
    assert whole.effective_parameters_interval == pytest.approx((whole.effective_parameters,) * 2)


def test_both_ends_of_the_hessian(dense_case):
    exact = torch.linalg.eigvalsh(dense_case.oracle.hessian())
    for solver in ("krylov", "dense"):
        fit = fitted(dense_case, "hessian", 5, solver=solver, smallest=4)
        pairs = fit.spectra["hessian"]
        torch.testing.assert_close(pairs.values, exact.flip(0)[:5], rtol=1e-8, atol=0)
        torch.testing.assert_close(pairs.smallest[:4], exact[:4], rtol=0, atol=1e-9)
        below = fit.diagnostics["hessian"]["tail_below_l2"]
        assert below == pytest.approx(dense_case.l2 - float(exact[0]), abs=1e-9)


def test_diagnostics_say_how_good_the_fit_is(dense_case):
    fit = fitted(dense_case, "sandwich", 8, solver="krylov")
    gradient = dense_case.oracle.gradient()
    assert fit.diagnostics["gradient_norm"] == pytest.approx(float(gradient.norm()), abs=1e-10)
    for name in ("hessian", "opg"):
        found = fit.diagnostics[name]
        assert found["converged"] == 8
        assert found["products"] > 8
        assert found["orthogonality"] < 1e-12
        assert found["residual_rms"] < 1e-9
    assert fit.diagnostics["opg"]["tail_below_l2"] == pytest.approx(0, abs=1e-12)


def test_a_fit_is_immutable_and_readable(dense_case):
    fit = fitted(dense_case, "sandwich", 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.l2 = 3.0
    text = repr(fit)
    for part in ("sandwich", "N = 29", "P = 43", "K = 8", "λ = 0.05", "hessian", "opg"):
        assert part in text
    assert fit._repr_html_().count("<table>") == 2
    assert "K=8" in repr(fit.spectra["opg"])


def test_untrained_weights_get_a_warning_with_the_number():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    data = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 3, (40,))
    with pytest.warns(OptimumWarning, match=r"gradient of norm 0\.\d+, which is \d+%"):
        deltabars.fit(model, data, l2=0.01, rank=3, progress=False)


def test_half_precision_models_are_computed_in_float32(dense_case):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model.load_state_dict(dense_case.model.state_dict())
    data = dense_case.inputs.half(), dense_case.targets
    fit = deltabars.fit(model.half(), data, l2=0.05, rank=5, progress=False)
    assert fit.network.dtype == torch.float32
    out = fit.predict(dense_case.unseen.half())
    close = fitted(dense_case, rank=5).predict(dense_case.unseen)
    torch.testing.assert_close(out.std.double(), close.std, rtol=0.05, atol=1e-3)  # half: 3 digits


@pytest.mark.parametrize("estimator", ["hessian", "opg", "ggn"])
def test_examples_worked_on_at_a_time_only_change_rounding(dense_case, estimator):
    whole = fitted(dense_case, estimator).predict(dense_case.unseen)
    for size in (1, 4, 28):
        parts = fitted(dense_case, estimator, batch_size=size).predict(dense_case.unseen)
        torch.testing.assert_close(parts.std, whole.std, rtol=1e-10, atol=0)
    for size in (0, 2.5):
        with pytest.raises(BadValueError, match="batch_size: expected a whole number from 1"):
            fitted(dense_case, estimator, batch_size=size)


def test_numbers_of_numpy_are_numbers(dense_case, tmp_path):
    fit = fitted(dense_case, rank=np.int64(5), seed=np.int64(1), l2=np.float32(0.05))
    fit.save(tmp_path / "a")
    assert deltabars.load(tmp_path / "a", dense_case.model).rank == 5


def test_effective_parameters_leave_out_what_is_not_positive():
    case = cached_case("rectified")
    with pytest.warns(SpectrumWarning):
        fit = fitted(case, "hessian", case.oracle.size)
    values = torch.linalg.eigvalsh(case.oracle.hessian())
    positive = values[values > 0]
    expected = float(((positive - case.l2) / positive).sum())
    assert fit.effective_parameters == pytest.approx(expected, rel=1e-6)
    assert "below λ" in repr(fit)


def test_spectra_and_diagnostics_cannot_be_changed(dense_case):
    fit = fitted(dense_case)
    with pytest.raises(TypeError):
        fit.spectra["opg"] = None
    with pytest.raises(TypeError):
        fit.diagnostics["seed"] = 3
