"""Every solver on matrices of known spectrum, hard ones among them."""

from __future__ import annotations

import pytest
import torch
from scipy import sparse
from scipy.sparse import linalg

from deltabars.eigen import arpack, dense, incremental_svd
from deltabars.eigen.krylov import block_krylov, lanczos
from deltabars.eigen.pairs import residual_scale
from deltabars.errors import BadValueError, ConvergenceWarning, DeltaBarsError
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

    assert len(pairs) == rank
    # An eigenvalue is off by the residual at most; solvers stop at 1e-10.
    torch.testing.assert_close(pairs.values, values, rtol=0, atol=1e-9 * scale)
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-12)
    norms = (matrix @ pairs.vectors.T - pairs.vectors.T * pairs.values).norm(dim=0)
    assert float((norms / residual_scale(pairs.values)).max()) < 1e-9
    assert bool((pairs.values.diff() <= 0).all())


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_reported_residuals_are_the_measured_ones(solver):
    matrix = matrix_with(SPECTRA["decaying"])
    pairs = solver(matrix, 12, tolerance=1e-4)
    norms = (matrix @ pairs.vectors.T - pairs.vectors.T * pairs.values).norm(dim=0)
    torch.testing.assert_close(
        pairs.residuals, norms / residual_scale(pairs.values), rtol=1e-6, atol=1e-12
    )
    assert float(pairs.residuals.max()) <= 1e-4


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_float32_vectors_of_a_large_matrix_are_orthonormal(solver):
    """Float32 dot products of 10⁵ numbers are good for five digits: too few."""
    size = 100_000
    diagonal = torch.full((size,), 0.01)
    diagonal[:40] = torch.logspace(-1, 1.5, 40)

    class Diagonal:
        shape, dtype, device = (size, size), torch.float32, torch.device("cpu")

        def matmat(self, rows):
            return rows * diagonal

    pairs = solver(Diagonal(), 25)
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
    assert pairs.least == pytest.approx(float(exact[0]))
    assert float(pairs.values[0]) == pytest.approx(float(exact[-1]))


@pytest.mark.parametrize("solver", [lanczos, block_krylov, arpack])
def test_one_seed_gives_one_answer(solver):
    matrix = matrix_with(SPECTRA["decaying"])
    first, again, other = (solver(matrix, 6, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.vectors, again.vectors)
    assert torch.equal(first.values, again.values)
    torch.testing.assert_close(first.values, other.values, rtol=1e-9, atol=0)
    assert not torch.equal(first.vectors, other.vectors)


def test_products_are_counted_and_few():
    matrix = matrix_with(torch.cat([SPECTRA["decaying"] + 1, torch.full((440,), 0.01)]).double())
    pairs = lanczos(matrix, 10, tolerance=1e-6)
    assert pairs.statistics["products"] < 60
    assert pairs.statistics["converged"] == 10


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_unconverged_pairs_are_counted_in_a_warning(solver):
    matrix = matrix_with(SPECTRA["spread"])
    with pytest.warns(ConvergenceWarning, match=r"got \d+ that have not converged; the largest"):
        pairs = solver(matrix, 10, max_products=14)
    assert pairs.statistics["products"] <= 14
    assert len(pairs) == 10
    assert float(pairs.residuals.max()) > 1e-3


def test_shifted_pairs_are_those_of_the_shifted_matrix():
    matrix = matrix_with(SPECTRA["indefinite"])
    moved = lanczos(matrix, 6, tolerance=1e-3).mapped(1.0, 2.5)
    shifted = matrix + 2.5 * torch.eye(SIZE, dtype=torch.float64)
    norms = (shifted @ moved.vectors.T - moved.vectors.T * moved.values).norm(dim=0)
    torch.testing.assert_close(
        moved.residuals, norms / residual_scale(moved.values), rtol=1e-6, atol=1e-12
    )
    assert moved.least == pytest.approx(float(torch.linalg.eigvalsh(shifted)[0]), abs=1e-2)


def test_incremental_svd_completes_a_basis_beyond_the_rows():
    rows = torch.randn(4, 9, dtype=torch.float64)
    pairs = incremental_svd([rows[:2], rows[2:]], 7)
    eye = torch.eye(7, dtype=torch.float64)
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-12)
    exact = torch.linalg.eigvalsh(rows.T @ rows / 4).flip(0)[:7]
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-12)


def test_incremental_svd_of_a_matrix():
    for name in ("decaying", "rank_deficient"):
        pairs = incremental_svd(matrix_with(SPECTRA[name]), SIZE)
        exact = SPECTRA[name].sort(descending=True).values
        torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-12)
    cut = incremental_svd(matrix_with(SPECTRA["decaying"]), 12)
    exact = SPECTRA["decaying"].sort(descending=True).values[:12]
    assert bool((cut.values <= exact + 1e-12).all())
    assert bool((exact - cut.values <= cut.slack).all())


@pytest.mark.parametrize(
    "given",
    [
        lambda m: m.numpy(),
        lambda m: m.float(),
        lambda m: m.clone().requires_grad_(),
        lambda m: sparse.csr_array(m.numpy()),
        lambda m: linalg.aslinearoperator(m.numpy().astype("float32")),
    ],
    ids=["array", "float32", "requires grad", "sparse", "linear operator"],
)
def test_any_form_of_matrix_serves(given):
    pairs = lanczos(given(matrix_with(SPECTRA["spread"])), 4)
    exact = SPECTRA["spread"].sort(descending=True).values[:4]
    torch.testing.assert_close(pairs.values, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lanczos(torch.eye(4), 0), "rank: expected a whole number from 1 .* P = 4"),
        (lambda: lanczos(torch.eye(4), 5), "got 5"),
        (lambda: lanczos(torch.zeros(4, 3), 1), "expected a square one"),
        (lambda: lanczos(torch.eye(4), 1, tolerance=0.0), "tolerance"),
        (
            lambda: lanczos(torch.eye(4), 3, max_products=2),
            "max_products: expected a whole number from 3",
        ),
        (
            lambda: lanczos(torch.eye(4), 3, smallest=2),
            "smallest: expected a whole number from 0 to 1",
        ),
        (lambda: block_krylov(torch.eye(4), 2, block_size=0), "block_size"),
        (lambda: arpack(torch.eye(4), 4), "expected below P = 4 for ARPACK"),
        (lambda: incremental_svd(3.0, 1), "expected an operator, a matrix or blocks"),
        (lambda: incremental_svd([], 1), "at least one block"),
        (lambda: lanczos(torch.full((3, 3), float("nan")), 1), "finite"),
        (lambda: lanczos("no matrix", 1), "square"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(BadValueError, match=message):
        call()


def test_arpack_failure_says_what_to_use():
    with pytest.raises(DeltaBarsError, match="solver='krylov'"):
        arpack(torch.zeros(8, 8, dtype=torch.float64), 2)
