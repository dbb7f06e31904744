"""Inner products of long rows, and eigenvectors that are not one tensor, against float64."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch

import deltabars
from deltabars.runtime import vectors
from deltabars.runtime.vectors import Part, PartedVectors, add_inner, inner
from tests.conftest import cached_case

CPU = torch.device("cpu")
ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")


def rows_of(count, size, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64).to(dtype)


def parted(rows, *ends, dtype=None):
    """Rows in parts that end at some columns."""
    borders = [0, *ends, rows.shape[1]]
    parts = tuple(Part(low, high, rows[:, low:high].clone()) for low, high in pairwise(borders))
    return PartedVectors(parts, len(rows), dtype or rows.dtype, CPU)


@pytest.mark.parametrize("size", [0, 511, 1536, 5000, 200_000])
@pytest.mark.parametrize("shape", [(), (3, 2)], ids=["rows", "batches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_float64(size, shape, dtype):
    a, one = torch.randn(*shape, 3, size, dtype=dtype), torch.randn(4, size, dtype=dtype)
    for b in (one, one.expand(*shape, 4, size)):
        exact, found = a.double() @ b.double().mT, inner(a, b)
        assert found.dtype == torch.float64
        # Float32 units of rounding of the norms' product, √size·√size; a lost number is O(1).
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-7 * size + 1e-6)
        ones = inner(torch.ones_like(a), torch.ones_like(b))
        assert torch.equal(ones, torch.full_like(exact, size))
        total = torch.full_like(exact, 1e6)
        assert add_inner(total, a, b) is total
        torch.testing.assert_close(total - 1e6, found, rtol=0, atol=1e-8)


def test_columns_of_wider_rows_a_stretch_at_a_time():
    wide = rows_of(2104, 1400, dtype=torch.float32)
    a, b = wide[:2100, 100:1200], wide[4:, 100:1200]
    exact = a.double() @ b.double().T
    torch.testing.assert_close(inner(a, b), exact, rtol=0, atol=5e-4)  # of up to 1,200


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_columns_of_parts_are_those_of_the_whole(stored):
    rows = rows_of(3, 40).to(stored)
    held = parted(rows, 1, 7, 30, dtype=torch.float64)
    for indices in (slice(6, 8), slice(1, 7), slice(29, 31), slice(5, 5), slice(None)):
        found = held.columns(indices)
        assert found.dtype == torch.float64
        assert torch.equal(found, rows.double()[:, indices])
    held.columns(slice(0, 10)).zero_()  # not a view of what is stored
    assert torch.equal(held.whole(), rows.double())
    assert torch.equal(pickle.loads(pickle.dumps(held.first(2))).whole(), rows[:2].double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_of_parts(dtype):
    a, b = rows_of(3, 1700, 1, dtype), rows_of(4, 1700, 2, dtype)
    tolerance, exact = 1e-12 if dtype == torch.float64 else 1e-5, a.double() @ b.double().T
    rows = rows_of(40, 150_000, 3, dtype)  # of more than one block
    torch.testing.assert_close(parted(rows, 70_000).whole(), rows)
    for left, right in (a, parted(b, 600)), (parted(a, 3, 1000), b), (parted(a, 9), parted(b, 513)):
        found = vectors.products(left, right)
        torch.testing.assert_close(found, exact, rtol=0, atol=tolerance * 1700)
    there, weights = parted(b, 512, 1024), rows_of(2, 4, 3, dtype)
    torch.testing.assert_close(vectors.projected(a, there), a @ b.T, rtol=0, atol=1e-3)
    torch.testing.assert_close(vectors.combined(weights, there), weights @ b)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_a_fit_whose_vectors_come_by_columns_is_the_same(kind, estimator):
    case = cached_case(kind)
    fit = deltabars.fit(case.model, case.data, l2=0.05, estimator=estimator, rank=8, progress=False)
    away = fit.offloaded()
    assert all(isinstance(each.vectors, PartedVectors) for each in away.spectra.values())
    options = ({}, {"rank": 3, "bound": "paper"}, {"space": "logit", "covariance": True},
               {"classes": "top2", "moderation": None}, {"batch_size": 2})  # fmt: skip
    for asked in options:
        there, here = away.predict(case.unseen, **asked), fit.predict(case.unseen, **asked)
        assert torch.equal(there.mean, here.mean)
        for name in ("std", "std_low", "std_high", "score", "score_error"):
            # The last bits of a product depend on how far apart the rows are in memory.
            pair = getattr(there, name), getattr(here, name)
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(away.sample(2, seed=1), fit.sample(2, seed=1))
    if estimator in ("opg", "ggn"):
        there, here = (each.certify(case.unseen[:3], case.data) for each in (away, fit))
        torch.testing.assert_close(there.std, here.std, rtol=2e-3, atol=0)
