"""Eigenpairs of a matrix that is another one at some places, and a multiple of I beyond."""

from __future__ import annotations

import pytest
import torch

from deltabars.eigen.pairs import LEAST_RITZ, EigenPairs, embed
from deltabars.runtime.distributed import Group
from deltabars.runtime.vectors import Spaces
from tests.silence import randn

ELSEWHERE = 0.7


def assembled(size, others, seed=0):
    """A symmetric matrix with eigenvalues on both sides of ELSEWHERE, its places, and the whole."""
    inside = randn(size, size, seed=seed)
    inside = (inside + inside.T) / 2 + 0.5 * torch.eye(size, dtype=torch.float64)
    order = torch.randperm(size + others, generator=torch.Generator().manual_seed(seed))
    places = order[:size].sort().values
    whole = ELSEWHERE * torch.eye(size + others, dtype=torch.float64)
    whole[places[:, None], places] = inside
    return inside, places, whole


def pairs_of(matrix, rank, smallest=0):
    values, vectors = torch.linalg.eigh(matrix)
    return EigenPairs(
        values.flip(0)[:rank],
        vectors.T.flip(0)[:rank],
        torch.full((rank,), 1e-12, dtype=torch.float64),
        values[:smallest],
        torch.full((smallest,), 2e-12, dtype=torch.float64),
        {LEAST_RITZ: float(values[0])},
    )


@pytest.mark.parametrize("smallest", [0, 1, 3])
@pytest.mark.parametrize("others", [0, 1, 3, 20])
@pytest.mark.parametrize("rank", [1, 4, 7, 9])
def test_pairs_are_those_of_the_whole(rank, others, smallest):
    inside, places, whole = assembled(12, others)
    pairs = embed(
        pairs_of(inside, rank, smallest), Spaces.of(12 + others, places, Group()), ELSEWHERE
    )
    exact = torch.linalg.eigvalsh(whole)
    eye = torch.eye(rank, dtype=torch.float64)
    torch.testing.assert_close(pairs.values, exact.flip(0)[:rank], rtol=0, atol=1e-12)
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-12)
    images = pairs.vectors @ whole
    torch.testing.assert_close(images, pairs.values[:, None] * pairs.vectors, rtol=0, atol=1e-12)
    assert pairs.smallest.shape == pairs.smallest_residuals.shape == (smallest,)
    torch.testing.assert_close(pairs.smallest, exact[:smallest], rtol=0, atol=1e-12)
    assert pairs.least == pytest.approx(float(exact[0]), abs=1e-12)
    above = int((torch.linalg.eigvalsh(inside) > ELSEWHERE).sum())
    units = (pairs.values == ELSEWHERE).sum()
    assert int(units) == min(others, max(0, rank - above))
    assert torch.equal(pairs.residuals == 0, pairs.values == ELSEWHERE)  # unit vectors are exact


def test_the_least_eigenvalue_may_be_the_one_elsewhere():
    inside, places, _ = assembled(6, 2)
    inside = inside + 9 * torch.eye(6, dtype=torch.float64)
    pairs = embed(pairs_of(inside, 3, 3), Spaces.of(8, places, Group()), ELSEWHERE)
    lowest = float(torch.linalg.eigvalsh(inside)[0])
    assert pairs.least == ELSEWHERE
    assert pairs.smallest.tolist() == pytest.approx([ELSEWHERE, ELSEWHERE, lowest])
    assert pairs.smallest_residuals.tolist() == [0.0, 0.0, 2e-12]
    assert bool((pairs.values > ELSEWHERE).all())


def test_float32_vectors_stay_float32():
    inside, places, _ = assembled(5, 2)
    pairs = pairs_of(inside, 5)
    single = EigenPairs(pairs.values, pairs.vectors.float(), pairs.residuals)
    result = embed(single, Spaces.of(7, places, Group()), ELSEWHERE)
    assert result.vectors.dtype == torch.float32
    assert result.values.dtype == torch.float64
