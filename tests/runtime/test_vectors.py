"""Eigenvectors that are not one tensor, against dense float64; and what rounding them can do."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch

import deltabars
from deltabars.runtime import vectors
from deltabars.runtime.vectors import Part, PartedVectors
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


class TestParts:
    @pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
    def test_columns_are_those_of_the_whole(self, stored):
        rows = rows_of(3, 40).to(stored)
        held = parted(rows, 1, 7, 30, dtype=torch.float64)
        expected = rows.double()
        for indices in (slice(0, 40), slice(6, 8), slice(1, 7), slice(29, 31), slice(5, 5)):
            found = held.columns(indices)
            assert found.dtype == torch.float64
            assert torch.equal(found, expected[:, indices])
        assert torch.equal(held.columns(slice(None)), expected)
        assert torch.equal(held.whole(), expected)
        assert torch.equal(held.first(2).whole(), expected[:2])
        assert held.first(2).shape == (2, 40)
        assert held.stored == stored

    def test_columns_are_not_views_of_what_is_stored(self):
        held = parted(rows_of(2, 10))
        held.columns(slice(0, 10)).zero_()
        assert bool(held.columns(slice(0, 10)).all())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_products(self, dtype):
        a, b = rows_of(3, 1700, 1, dtype), rows_of(4, 1700, 2, dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        exact = a.double() @ b.double().T
        for left, right in (
            (a, parted(b, 600)),
            (parted(a, 3, 1000), b),
            (parted(a, 9), parted(b, 513)),
        ):
            found = vectors.products(left, right)
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, exact, rtol=0, atol=tolerance * 1700)
        there = parted(b, 512, 1024)
        torch.testing.assert_close(vectors.projected(a, there), a @ b.T, rtol=0, atol=1e-3)
        weights = rows_of(2, 4, 3, dtype)
        torch.testing.assert_close(vectors.combined(weights, there), weights @ b)

    def test_blocks_cover_everything_once(self):
        for size in (1, 511, 512, 513, 100_000):
            seen = list(vectors.ranges(3, 3 + size, 8 << 12, CPU))
            assert seen[0].start == 3
            assert seen[-1].stop == 3 + size
            assert all(a.stop == b.start for a, b in pairwise(seen))

    def test_of_more_than_one_block(self):
        rows = rows_of(40, 150_000)  # 48 MB; a block has 32
        held = parted(rows, 70_000)
        torch.testing.assert_close(vectors.products(held, held), rows @ rows.T)
        weights = rows_of(2, 40, 3)
        torch.testing.assert_close(vectors.combined(weights, held), weights @ rows)

    def test_pickles(self):
        held = parted(rows_of(2, 9), 4)
        assert torch.equal(pickle.loads(pickle.dumps(held)).whole(), held.whole())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_a_fit_whose_vectors_come_by_columns_is_the_same(kind, estimator):
    case = cached_case(kind)
    fit = deltabars.fit(case.model, case.data, l2=0.05, estimator=estimator, rank=8, progress=False)
    away = fit.offloaded()
    assert all(isinstance(each.vectors, PartedVectors) for each in away.spectra.values())
    options = [{}, {"rank": 3}, {"full_rank": False}, {"space": "logit", "covariance": True},
               {"bound": "paper"}, {"classes": "top2", "moderation": None},
               {"moderation": "probit"}, {"batch_size": 2}]  # fmt: skip
    for asked in options:
        there, here = away.predict(case.unseen, **asked), fit.predict(case.unseen, **asked)
        assert torch.equal(there.mean, here.mean)
        for name in ("std", "std_low", "std_high", "score", "score_error"):
            # The last bits of a product depend on how far apart the rows are in memory.
            pair = getattr(there, name), getattr(here, name)
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(away.sample(2, seed=1), fit.sample(2, seed=1))
    moved = away.with_l2(0.2).predict(case.unseen).std
    torch.testing.assert_close(moved, fit.with_l2(0.2).predict(case.unseen).std)
    if estimator in ("opg", "ggn"):
        there, here = (each.certify(case.unseen[:3], case.data) for each in (away, fit))
        torch.testing.assert_close(there.std, here.std, rtol=2e-3, atol=0)
    again = pickle.loads(pickle.dumps(away))
    assert torch.equal(again.predict(case.unseen).std, away.predict(case.unseen).std)
