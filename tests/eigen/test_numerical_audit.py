"""Eigenpairs are measured after every fit, and what breaks its promise is reported."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import deltabars
from deltabars.eigen import arpack, dense
from deltabars.eigen.krylov import block_krylov, lanczos
from deltabars.eigen.pairs import audit, warn_of_audit
from deltabars.errors import BadValueError, ConvergenceWarning
from deltabars.runtime.vectors import Space
from tests.conftest import cached_case
from tests.spectra import SIZE, SPECTRA, matrix_with

SOLVERS = {"lanczos": lanczos, "block_krylov": block_krylov, "dense": dense, "arpack": arpack}
NOISE = 1e-4


class Matrix:
    """Products with a matrix of known spectrum."""

    device = torch.device("cpu")
    shape = (SIZE, SIZE)

    def __init__(self, dtype=torch.float64, spectrum="decaying"):
        self.dtype = dtype
        self.matrix = matrix_with(SPECTRA[spectrum]).to(dtype)
        self.generator = torch.Generator().manual_seed(0)

    def matmat(self, rows):
        return rows @ self.matrix.T

    def noise(self, *shape):
        return NOISE * torch.randn(*shape, generator=self.generator, dtype=self.dtype)


class Noisy(Matrix):
    def matmat(self, rows):
        return super().matmat(rows) + self.noise(*rows.shape)


class Skew(Matrix):
    def __init__(self, *options):
        super().__init__(*options)
        extra = self.noise(SIZE, SIZE)
        self.matrix = self.matrix + extra - extra.T


def audited(operator, pairs):
    found = audit(operator.matmat, Space(SIZE), pairs)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        warn_of_audit("hessian", found)
    assert all(each.category is ConvergenceWarning for each in given)
    return found, [str(each.message) for each in given]


@pytest.mark.parametrize("rank", [1, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", [name for name in SPECTRA if name != "zero"])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_good_pairs_are_within_the_limits(solver, spectrum, dtype, rank):
    operator = Matrix(dtype, spectrum)
    found, given = audited(operator, SOLVERS[solver](operator, rank))
    assert given == []
    assert found["orthogonality"] < found["orthogonality_limit"]
    assert found["residual_rms"] < found["residual_limit"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("kind", [Noisy, Skew])
def test_products_that_are_not_those_of_a_symmetric_matrix_are_warned_of(kind, solver, dtype):
    """In float32 too: the noise is a thousand times its rounding, of a matrix of norm 3."""
    operator = kind(dtype, "spread")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # ARPACK measures its own residuals
        pairs = SOLVERS[solver](operator, 10, **({} if solver == "dense" else {"tolerance": 1e-6}))
    if solver == "arpack":
        assert float(pairs.residuals.max()) > 10 * 1e-6  # and it warned
        pairs = replace(pairs, residuals=torch.zeros_like(pairs.residuals))
    found, (message,) = audited(operator, pairs)
    assert "not those of one symmetric matrix" in message
    assert found["residual_rms"] > found["residual_limit"]


def test_vectors_that_are_not_orthonormal_are_warned_of():
    operator = Matrix()
    pairs = lanczos(operator, 6)
    bent = pairs.vectors.clone()
    bent[1] += 1e-6 * bent[0]
    found, messages = audited(operator, replace(pairs, vectors=bent))
    assert found["orthogonality"] == pytest.approx(1e-6, rel=1e-3)
    assert "expected orthonormal ones" in messages[0]


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-17), (torch.float32, 1e-8), (torch.float64, 0.0)]
)
def test_a_tolerance_below_rounding_is_refused(solver, dtype, tolerance):
    """The recurrence would go to zero, and claim it."""
    with pytest.raises(BadValueError, match=r"tolerance: expected .* from .*e-.. on"):
        solver(Matrix(dtype), 4, tolerance=tolerance)


class WrongTanh(torch.autograd.Function):
    """Its gradient depends on more than it should: no loss has these derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * (1 - x.tanh() ** 2) + 0.1 * x.roll(1, -1)

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * (1 - x.tanh() ** 2)


class WrongSlope(nn.Sequential):
    def forward(self, x):
        return self[2](WrongTanh.apply(self[0](x)))


@pytest.mark.parametrize("solver", ["dense", "krylov"])
def test_a_fit_with_derivatives_of_its_own_that_are_wrong_is_warned_of(solver):
    case = cached_case("dense")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        fit = deltabars.fit(
            WrongSlope(*case.model), case.data, l2=case.l2, estimator="hessian", rank=10,
            solver=solver, progress=False,
        )  # fmt: skip
    texts = [str(each.message) for each in given if each.category is ConvergenceWarning]
    assert any("Eigenpairs of the hessian: expected" in text for text in texts)
    assert any("autograd.Function" in text for text in texts)
    (place,) = {each.filename for each in given if "autograd.Function" in str(each.message)}
    assert place == __file__
    found = fit.diagnostics["hessian"]
    assert found["residual_rms"] > found["residual_limit"]


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
