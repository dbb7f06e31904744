"""Draws from the K computed directions alone; those of full rank are in test_fit.py."""

from __future__ import annotations

import pytest
import torch

import deltabars
from deltabars.errors import BadValueError
from tests.conftest import cached_case

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
RANK = 6


def fitted(estimator, rank=RANK):
    case = cached_case("dense", l2=0.1)
    return deltabars.fit(
        case.model, case.data, l2=case.l2, estimator=estimator, rank=rank, progress=False
    )


def dense_pairs(estimator, rank=RANK):
    """The largest eigenvalues and eigenvectors (P, K) of the oracle's own matrix."""
    values, vectors = torch.linalg.eigh(cached_case("dense", l2=0.1).oracle.matrix(estimator))
    return values.flip(0)[:rank], vectors.flip(1)[:, :rank]


def dense_root(estimator):
    """R with RRᵀ = Σ: Q Λ^{-½} Qᵀ/√N, or H⁺G^{½}/√N of the sandwich."""
    count = cached_case("dense", l2=0.1).oracle.count
    if estimator != "sandwich":
        values, q = dense_pairs(estimator)
        return q / values.sqrt() @ q.T / count**0.5
    (h, q_h), (g, q_g) = dense_pairs("hessian"), dense_pairs("opg")
    return (q_h / h @ q_h.T) @ (q_g * g.sqrt() @ q_g.T) / count**0.5


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_draws_stay_within_the_span_of_the_eigenvectors(estimator):
    fit, oracle = fitted(estimator), cached_case("dense", l2=0.1).oracle
    moved = fit.sample(50, seed=2, full_rank=False) - oracle.point
    _, q = dense_pairs("hessian" if estimator == "sandwich" else estimator)
    outside = moved - moved @ q @ q.T
    assert float(moved.norm(dim=1).min()) > 0
    # The eigenvectors of both solvers agree to about their tolerance, 1e-8 or better.
    assert float((outside.norm(dim=1) / moved.norm(dim=1)).max()) < 1e-7
    assert int(torch.linalg.matrix_rank(moved, rtol=1e-7)) == RANK
    at_full_rank = fit.sample(50, seed=2) - oracle.point
    assert int(torch.linalg.matrix_rank(at_full_rank, rtol=1e-7)) == fit.num_parameters


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_draws_have_the_covariance_of_the_dense_root(estimator):
    count = 100_000
    draws = fitted(estimator).sample(count, seed=3, full_rank=False)
    root = dense_root(estimator)
    exact = root @ root.T
    scale = float(exact.diagonal().max())
    # The error of a sample covariance is at most about scale·√(2/count) = 0.0045 of the scale.
    torch.testing.assert_close(draws.T.cov(), exact, rtol=0, atol=0.02 * scale)
    point = cached_case("dense", l2=0.1).oracle.point
    torch.testing.assert_close(draws.mean(0), point, rtol=0, atol=0.02 * scale**0.5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_seed_draws_the_same_noise_for_both_ranks(estimator):
    """The draw of low rank is the root times the noise that the draw of full rank has."""
    fit, oracle = fitted(estimator), cached_case("dense", l2=0.1).oracle
    whole = deltabars.fit(
        cached_case("dense", l2=0.1).model, cached_case("dense", l2=0.1).data, l2=0.1,
        estimator="opg", rank=oracle.size, progress=False,
    )  # fmt: skip
    values, q = dense_pairs("opg", oracle.size)
    noise = (whole.sample(20, seed=4) - oracle.point) @ (q * values.sqrt() @ q.T)
    expected = noise * oracle.count**0.5 @ dense_root(estimator).T
    found = fit.sample(20, seed=4, full_rank=False) - oracle.point
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7 * float(expected.abs().max()))


def test_at_rank_p_both_are_the_same():
    fit = fitted("opg", cached_case("dense").oracle.size)
    # Nothing is outside the span; what is left is rounding, enlarged by λ^{-½}.
    torch.testing.assert_close(fit.sample(5), fit.sample(5, full_rank=False), rtol=0, atol=1e-10)


@pytest.mark.parametrize("value", ["no", None, 0, 1])
def test_full_rank_is_true_or_false(value):
    fit, case = fitted("opg"), cached_case("dense", l2=0.1)
    with pytest.raises(BadValueError, match=f"full_rank: expected True or False, got {value!r}"):
        fit.sample(2, full_rank=value)
    with pytest.raises(BadValueError, match=f"full_rank: expected True or False, got {value!r}"):
        fit.predict(case.unseen, full_rank=value)
