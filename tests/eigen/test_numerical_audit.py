"""Eigenpairs are measured after every fit, and what breaks its promise is reported."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import deltabars
from deltabars.eigen.krylov import lanczos
from deltabars.eigen.pairs import audit, warn_of_audit
from deltabars.errors import ConvergenceWarning
from deltabars.runtime.vectors import Space
from tests.conftest import cached_case
from tests.eigen.test_eigen import SOLVERS
from tests.silence import Own
from tests.spectra import SIZE, SPECTRA, matrix_with

NOISE = 1e-4


class Matrix:
    """Products with a matrix of known spectrum, noisy or with a matrix that is not symmetric."""

    device, shape = torch.device("cpu"), (SIZE, SIZE)

    def __init__(self, dtype=torch.float64, spectrum="decaying", defect=None):
        self.dtype, self.defect = dtype, defect
        self.generator = torch.Generator().manual_seed(0)
        self.matrix = matrix_with(SPECTRA[spectrum]).to(dtype)
        if defect == "skew":
            extra = self.noise(SIZE, SIZE)
            self.matrix = self.matrix + extra - extra.T

    def matmat(self, rows):
        noise = self.noise(*rows.shape) if self.defect == "noise" else 0
        return rows @ self.matrix.T + noise

    def noise(self, *shape):
        return NOISE * torch.randn(*shape, generator=self.generator, dtype=self.dtype)


def audited(operator, pairs):
    found = audit(operator.matmat, Space(SIZE), pairs)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ConvergenceWarning)
        warn_of_audit("hessian", found)
    return found, [str(each.message) for each in given]


@pytest.mark.parametrize("rank", [1, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", [name for name in SPECTRA if name != "zero"])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_good_pairs_are_within_the_limits(solver, spectrum, dtype, rank):
    operator = Matrix(dtype, spectrum)
    assert audited(operator, SOLVERS[solver](operator, rank))[1] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("defect", ["noise", "skew"])
def test_products_that_are_not_those_of_a_symmetric_matrix_are_warned_of(defect, solver, dtype):
    """In float32 too: the noise is a thousand times its rounding, of a matrix of norm 3."""
    operator = Matrix(dtype, "spread", defect)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # ARPACK measures its own residuals
        pairs = SOLVERS[solver](operator, 10, **({} if solver == "dense" else {"tolerance": 1e-6}))
    pairs = replace(pairs, residuals=torch.zeros_like(pairs.residuals))
    _, (message,) = audited(operator, pairs)
    assert "not those of one symmetric matrix" in message


def test_vectors_that_are_not_orthonormal_are_warned_of():
    pairs = lanczos(Matrix(), 6)
    pairs.vectors[1] += 1e-6 * pairs.vectors[0]
    found, messages = audited(Matrix(), pairs)
    assert found["orthogonality"] == pytest.approx(1e-6, rel=1e-3)
    assert "expected orthonormal ones" in messages[0]


class WrongSlope(Own):
    """Its gradient depends on more than it should: no loss has these derivatives."""

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * (x > 0) + 0.1 * x.roll(1, -1)


class WrongModel(nn.Sequential):
    def forward(self, x):
        return self[2](WrongSlope.apply(self[0](x)))


def test_a_fit_with_derivatives_of_its_own_that_are_wrong_is_warned_of():
    case = cached_case("dense")
    options = {"l2": case.l2, "estimator": "hessian", "rank": 10, "progress": False}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        deltabars.fit(WrongModel(*case.model), case.data, solver="krylov", **options)
    (place,) = {each.filename for each in given if "autograd.Function" in str(each.message)}
    assert place == __file__


@pytest.mark.parametrize(
    ("estimator", "solver"), [("sandwich", "krylov"), ("ggn", "incremental"), ("opg", "arpack")]
)
def test_every_fit_reports_what_was_measured_and_the_limits(estimator, solver):
    case = cached_case("dense")
    options = {"l2": case.l2, "estimator": estimator, "rank": 7, "solver": solver}
    fit = deltabars.fit(case.model, case.data, progress=False, **options)
    for name, pairs in fit.spectra.items():
        found = fit.diagnostics[name]
        gram = pairs.vectors @ pairs.vectors.T - torch.eye(7, dtype=torch.float64)
        assert found["orthogonality"] == pytest.approx(float(gram.abs().max()), rel=1e-6)
        assert found["orthogonality"] <= found["orthogonality_limit"] == 1e-9
        exact = pairs.vectors @ case.oracle.matrix(name) - pairs.values[:, None] * pairs.vectors
        norms = float(exact.norm(dim=1).square().mean().sqrt())
        assert norms <= found["residual_limit"]
        # One measurement of a sum with random signs: the root of 7 at most, and not nothing.
        assert found["residual_rms"] <= 7**0.5 * norms + 1e-13
