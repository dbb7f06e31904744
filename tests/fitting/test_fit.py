"""What a fit promises beyond its error bars: seeds, subsets, λ, samples, diagnostics."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import SpectrumWarning
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


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_solvers_agree(dense_case, estimator):
    exact = fitted(dense_case, estimator, solver="dense").predict(dense_case.unseen)
    for solver in ("krylov", "arpack"):
        out = fitted(dense_case, estimator, solver=solver).predict(dense_case.unseen)
        torch.testing.assert_close(out.std, exact.std, rtol=1e-8, atol=0)
    if estimator in ("opg", "ggn"):
        out = fitted(dense_case, estimator, 43, solver="incremental").predict(dense_case.unseen)
        exact = dense_case.oracle.std(estimator, dense_case.unseen)
        torch.testing.assert_close(out.std, exact, rtol=1e-8, atol=0)


@pytest.mark.parametrize("estimator", ["hessian", "opg", "sandwich"])
@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("*.bias", ["0.bias", "2.bias"]),
        (lambda name, p: p.ndim == 2, ["0.weight", "2.weight"]),
        (deltabars.last_layer(), ["2.weight", "2.bias"]),
    ],
    ids=["pattern", "predicate", "last layer"],
)
def test_parameter_subsets_are_exact(selection, names, estimator):
    case = cached_case("dense", l2=0.1)
    oracle = Oracle(case.model, case.inputs, case.targets, case.l2, names=names)
    with torch.no_grad():
        fit = fitted(case, estimator, oracle.size, params=selection)
    assert fit.network.parameters.names == tuple(names)
    exact = oracle.std(estimator, case.unseen)
    torch.testing.assert_close(fit.predict(case.unseen).std, exact, rtol=0, atol=1e-8)


def test_with_l2_warns_where_the_hessian_turns_negative(dense_case):
    fit = fitted(dense_case, "hessian", dense_case.oracle.size)
    with pytest.warns(SpectrumWarning, match=r"got \d+ of 43 at or below zero"):
        weaker = fit.with_l2(1e-4)
    assert bool(weaker.predict(dense_case.unseen).std.isfinite().all())


def dense_root(oracle, estimator, rank):
    """R with RRᵀ = Σ of the first `rank` eigenpairs alone: Q Λ^{-½} Qᵀ/√N, or H⁺G^{½}/√N."""

    def power(name, exponent):
        values, vectors = torch.linalg.eigh(oracle.matrix(name))
        q = vectors[:, -rank:]
        return q * values[-rank:] ** exponent @ q.T

    both = estimator == "sandwich"
    root = power("hessian", -1) @ power("opg", 0.5) if both else power(estimator, -0.5)
    return root / oracle.count**0.5


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_samples_have_the_covariance(estimator):
    """At full rank that of the dense inverse; else that of the K directions, which they span."""
    case, count = cached_case("linear", l2=0.1), 100_000
    oracle = case.oracle
    exact = oracle.parameter_covariance(estimator)
    root = dense_root(oracle, estimator, 6)
    whole, few = fitted(case, estimator, oracle.size), fitted(case, estimator, 6)
    cases = [
        (whole.sample(count, seed=3), exact),
        (few.sample(count, seed=3, full_rank=False), root @ root.T),
    ]
    if estimator in ("opg", "ggn"):  # the rest of the spectrum is closed by its middle
        pairs = few.spectra[estimator]
        middle = (1 / few.l2 + 1 / pairs.values[-1]) / 2 / few.num_examples
        rest = oracle.eye() - pairs.vectors.T @ pairs.vectors
        cases.append((few.sample(count, seed=3), root @ root.T + middle * rest))
    for draws, expected in cases:
        assert draws.shape == (count, oracle.size)
        scale = float(expected.diagonal().max())
        # The error of a sample covariance is about scale·√(2/count) = 0.0045 of the scale.
        torch.testing.assert_close(draws.T.cov(), expected, rtol=0, atol=0.03 * scale)
        torch.testing.assert_close(draws.mean(0), oracle.point, rtol=0, atol=0.02 * scale**0.5)
    low = few.sample(50, seed=2, full_rank=False) - oracle.point
    assert int(torch.linalg.matrix_rank(low, rtol=1e-7)) == 6
    assert torch.equal(whole.sample(3, seed=1), whole.sample(3, seed=1))
    assert not torch.equal(whole.sample(3, seed=1), whole.sample(3, seed=2))
    if estimator != "sandwich":  # nothing is outside the span: what is left is rounding
        low = whole.sample(5, full_rank=False)
        torch.testing.assert_close(whole.sample(5), low, rtol=0, atol=1e-10)


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


def test_a_fit_is_immutable_and_readable(dense_case):
    fit = fitted(dense_case, "sandwich", 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.l2 = 3.0
    for values in (fit.spectra, fit.diagnostics):
        with pytest.raises(TypeError):
            values["opg"] = None
    assert "sandwich, N = 29, P = 43, K = 8, λ = 0.05" in repr(fit)


def test_half_precision_models_are_computed_in_float32(dense_case):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model.load_state_dict(dense_case.model.state_dict())
    data = dense_case.inputs.half(), dense_case.targets
    fit = deltabars.fit(model.half(), data, l2=0.05, rank=5, progress=False)
    assert fit.network.dtype == torch.float32
    out = fit.predict(dense_case.unseen.half())
    close = fitted(dense_case, rank=5).predict(dense_case.unseen)
    torch.testing.assert_close(out.std.double(), close.std, rtol=0.05, atol=1e-3)  # half: 3 digits
