"""fᵀA⁻¹f between two values: they hold for every matrix, preconditioner and number of steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from deltabars.eigen.quadrature import enclose_inverse_forms, least_tolerance

SIZE = 40
FLOOR = 0.01
SPECTRA = {
    "spread": lambda g: FLOOR * 10 ** (4 * torch.rand(SIZE, generator=g)),
    "clustered": lambda g: FLOOR * (1 + torch.randint(0, 3, (SIZE,), generator=g) * 7),
    "floor": lambda g: torch.where(torch.rand(SIZE, generator=g) < 0.5, FLOOR, 3.0),
    "far": lambda g: torch.cat([torch.full((SIZE - 1,), FLOOR), torch.tensor([1e4])]),
}


def random_matrix(kind, seed, dtype=torch.float64):
    """A = B Bᵀ + floor, as G is: products in that form keep the floor, whatever B is rounded to."""
    generator = torch.Generator().manual_seed(seed)
    values = SPECTRA[kind](generator).double().clamp(min=FLOOR)
    values[0] = FLOOR  # the floor is as high as it can be
    vectors = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    rows = torch.randn(6, SIZE, generator=generator, dtype=torch.float64).to(dtype)
    rows[0] = vectors[:, 0]
    rows[1] = 0.0
    root = (vectors * (values - FLOOR).sqrt()).to(dtype)
    left, singular, _ = torch.linalg.svd(root.double())
    exact = ((rows.double() @ left).square() / (singular.square() + FLOOR)).sum(1)
    return lambda x: x @ root @ root.T + FLOOR * x, exact, values, vectors, rows


def preconditioner(values, vectors, kind):
    """Exact on some of the eigenvectors, none at all, or a bad one."""
    if kind == "none":
        return lambda rows: rows
    order = values.argsort(descending=True)[: 3 if kind == "three pairs" else 20]
    scale = 1.0 if kind != "wrong" else 30.0
    basis, weights = vectors[:, order], scale / values[order] - 1 / FLOOR
    return lambda rows: (rows @ basis * weights) @ basis.T + rows / FLOOR


@pytest.mark.parametrize("kind", list(SPECTRA))
@pytest.mark.parametrize("known", ["none", "three pairs", "twenty pairs", "wrong"])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-4, 1e-10])
def test_intervals_hold_and_are_narrow(kind, known, tolerance):
    """Wherever it stops they hold; in the end they are as narrow as was asked."""
    for seed, products in product(range(4), (3, 8, 500)):
        matmat, exact, values, vectors, rows = random_matrix(kind, seed)
        inverse = preconditioner(values, vectors, known)
        found = enclose_inverse_forms(matmat, rows, FLOOR, inverse, tolerance, products)
        assert bool(((found.low <= exact) & (exact <= found.high)).all())
        assert found.products <= products + 2
        low, high = found.low.sqrt(), found.high.sqrt()
        assert torch.equal(high - low <= tolerance * (high + low), found.is_close)
        assert float(found.high[1]) == 0.0  # of a row of zeros
    assert bool(found.is_close.all())


@pytest.mark.parametrize("kind", list(SPECTRA))
def test_single_precision_keeps_its_promise(kind):
    for seed in range(30):
        matmat, exact, values, vectors, rows = random_matrix(kind, seed, torch.float32)
        inverse = preconditioner(values.float(), vectors.float(), "twenty pairs")
        tolerance = 2 * least_tolerance(torch.float32)
        found = enclose_inverse_forms(matmat, rows, FLOOR, inverse, tolerance, 99)
        assert bool((found.low <= exact).all() & (exact <= found.high).all())
