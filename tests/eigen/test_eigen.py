"""Every solver on matrices of known spectrum, hard ones among them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy import sparse
from scipy.sparse import linalg

from deltabars.eigen import arpack, dense, incremental_svd
from deltabars.eigen.krylov import block_krylov, lanczos
from deltabars.eigen.pairs import residual_scale
from deltabars.errors import ConvergenceWarning, DeltaBarsError
from tests.spectra import SIZE, SPECTRA, matrix_with

SOLVERS = {"lanczos": lanczos, "block_krylov": block_krylov, "dense": dense, "arpack": arpack}


@pytest.mark.parametrize("rank", [1, 9, 30, SIZE])
@pytest.mark.parametrize("spectrum", list(SPECTRA))
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_finds_the_largest_pairs(solver, spectrum, rank):
    if solver == "arpack" and (rank == SIZE or spectrum == "zero"):
        pytest.skip("ARPACK needs rank < P and a matrix that is not zero")
    values = SPECTRA[spectrum].sort(descending=True).values[:rank]
    matrix = matrix_with(SPECTRA[spectrum])
    pairs = SOLVERS[solver](matrix, rank)
    scale = float(residual_scale(values).max())
    eye = torch.eye(rank, dtype=torch.float64)
    # An eigenvalue is off by the residual at most; solvers stop at 1e-10.
    torch.testing.assert_close(pairs.values, values, rtol=0, atol=1e-9 * scale)
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-12)
    norms = (matrix @ pairs.vectors.T - pairs.vectors.T * pairs.values).norm(dim=0)
    assert float((norms / residual_scale(pairs.values)).max()) < 1e-9
    assert bool((pairs.values.diff() <= 0).all())


@pytest.mark.parametrize("shift", [0.0, 2.5])
@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_reported_residuals_are_the_measured_ones(solver, shift):
    """Those of a shifted matrix as well."""
    eye = torch.eye(SIZE, dtype=torch.float64)
    matrix = matrix_with(SPECTRA["indefinite"])
    pairs = solver(matrix, 12, tolerance=1e-4)
    assert float(pairs.residuals.max()) <= 1e-4
    pairs, matrix = pairs.mapped(1.0, shift), matrix + shift * eye
    norms = (matrix @ pairs.vectors.T - pairs.vectors.T * pairs.values).norm(dim=0)
    norms /= residual_scale(pairs.values)
    torch.testing.assert_close(pairs.residuals, norms, rtol=1e-6, atol=1e-12)
    assert pairs.least == pytest.approx(float(torch.linalg.eigvalsh(matrix)[0]), abs=1e-2)


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_float32_vectors_of_a_large_matrix_are_orthonormal(solver):
    """Float32 dot products of 10⁵ numbers are good for five digits: too few."""
    diagonal = torch.full((100_000,), 0.01)
    diagonal[:40] = torch.logspace(-1, 1.5, 40)
    matrix = SimpleNamespace(
        shape=(100_000, 100_000), dtype=torch.float32, matmat=lambda rows: rows * diagonal
    )
    pairs = solver(matrix, 25)
    exact = pairs.vectors.double()
    eye = torch.eye(25, dtype=torch.float64)
    torch.testing.assert_close(exact @ exact.T, eye, rtol=0, atol=1e-6)
    largest = diagonal.sort(descending=True).values[:25].double()
    torch.testing.assert_close(pairs.values, largest, rtol=2e-6, atol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("solver", [lanczos, block_krylov, arpack])
def test_copies_close_to_the_last_pair_are_found_where_the_rest_is_small(solver, seed):
    """Five of eight copies of 1.5 are wanted, and other eigenvalues are just below."""
    near = 1.5 - torch.logspace(-5, -1, 20, dtype=torch.float64)
    values = torch.cat([torch.linspace(2, 9, 10), torch.full((8,), 1.5), near])
    pairs = solver(matrix_with(values, seed), 15, seed=seed)
    exact = values.sort(descending=True).values[:15]
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_both_ends_of_the_spectrum(solver):
    exact = SPECTRA["indefinite"].sort().values
    pairs = solver(matrix_with(SPECTRA["indefinite"]), 5, smallest=6)
    torch.testing.assert_close(pairs.smallest[:6], exact[:6], rtol=0, atol=1e-9)
    assert float(pairs.smallest_residuals[:6].max()) <= 1e-10


@pytest.mark.parametrize("solver", [lanczos, block_krylov, arpack])
def test_one_seed_gives_one_answer(solver):
    matrix = matrix_with(SPECTRA["decaying"])
    first, again, other = (solver(matrix, 6, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.vectors, again.vectors)
    assert not torch.equal(first.vectors, other.vectors)


def test_products_are_few():
    values = torch.cat([SPECTRA["decaying"] + 1, torch.full((440,), 0.01)]).double()
    assert lanczos(matrix_with(values), 10, tolerance=1e-6).statistics["products"] < 60


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_unconverged_pairs_are_counted_in_a_warning(solver):
    matrix = matrix_with(SPECTRA["spread"])
    with pytest.warns(ConvergenceWarning, match=r"got \d+ that have not converged; the largest"):
        pairs = solver(matrix, 10, max_products=14)
    assert pairs.statistics["products"] <= 14


def test_incremental_svd_completes_a_basis_beyond_the_rows():
    rows, eye = torch.randn(4, 9, dtype=torch.float64), torch.eye(7, dtype=torch.float64)
    pairs = incremental_svd([rows[:2], rows[2:]], 7)
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-12)
    exact = torch.linalg.eigvalsh(rows.T @ rows / 4).flip(0)[:7]
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["decaying", "rank_deficient"])
def test_incremental_svd_of_a_matrix(name):
    exact = SPECTRA[name].sort(descending=True).values
    pairs, cut = (incremental_svd(matrix_with(SPECTRA[name]), rank) for rank in (SIZE, 12))
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-12)
    assert bool((cut.values <= exact[:12] + 1e-12).all())
    assert bool((exact[:12] - cut.values <= cut.slack + 1e-12).all())


FORMS = {
    "array": lambda m: m.numpy(),
    "float32": lambda m: m.float(),
    "requires grad": lambda m: m.clone().requires_grad_(),
    "sparse": lambda m: sparse.csr_array(m.numpy()),
    "linear operator": lambda m: linalg.aslinearoperator(m.numpy().astype("float32")),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_matrix_serves(form):
    pairs = lanczos(FORMS[form](matrix_with(SPECTRA["spread"])), 4)
    exact = SPECTRA["spread"].sort(descending=True).values[:4]
    torch.testing.assert_close(pairs.values, exact, rtol=1e-5, atol=0)


EYE = torch.eye(4)
REFUSED = {
    "rank: expected a whole number from 1 .* P = 4": lambda: lanczos(EYE, 0),
    "got 5": lambda: lanczos(EYE, 5),
    "expected a square one": lambda: lanczos(torch.zeros(4, 3), 1),
    "max_products: .* number from 3": lambda: lanczos(EYE, 3, max_products=2),
    "smallest: .* from 0 to 1": lambda: lanczos(EYE, 3, smallest=2),
    "tolerance: expected .* from 2.2e-16 on": lambda: lanczos(EYE.double(), 4, tolerance=1e-17),
    "tolerance: expected .* from 1.2e-07 on": lambda: lanczos(EYE, 4, tolerance=1e-8),
    "block_size": lambda: block_krylov(EYE, 2, block_size=0),
    "expected below P = 4 for ARPACK": lambda: arpack(EYE, 4),
    "expected an operator, a matrix or blocks": lambda: incremental_svd(3.0, 1),
    "at least one block": lambda: incremental_svd([], 1),
    "finite": lambda: lanczos(torch.full((3, 3), float("nan")), 1),
    "solver='krylov'": lambda: arpack(torch.zeros(8, 8, dtype=torch.float64), 2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused(message):
    with pytest.raises(DeltaBarsError, match=message):
        REFUSED[message]()
