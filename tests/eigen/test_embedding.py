"""Eigenpairs of a matrix that is another one at some indices, and a multiple of I beyond."""

from __future__ import annotations

import pytest
import torch

from deltabars.eigen.pairs import LEAST_RITZ, EigenPairs, embed
from deltabars.runtime.distributed import Group
from deltabars.runtime.vectors import Spaces
from tests.silence import randn

ELSEWHERE = 0.7


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


@pytest.mark.parametrize("smallest", [0, 3])
@pytest.mark.parametrize(("others", "level"), [(0, 0.5), (1, 0.5), (3, 0.5), (20, 0.5), (2, 9.0)])
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_pairs_are_those_of_the_whole(rank, level, others, smallest):
    """Eigenvalues on both sides of the one elsewhere, or all of them above."""
    inside = randn(12, 12)
    inside = (inside + inside.T) / 2 + level * torch.eye(12, dtype=torch.float64)
    order = torch.randperm(12 + others, generator=torch.Generator().manual_seed(0))
    indices = order[:12].sort().values
    whole = ELSEWHERE * torch.eye(12 + others, dtype=torch.float64)
    whole[indices[:, None], indices] = inside
    spaces = Spaces.of(12 + others, indices, Group())
    pairs = embed(pairs_of(inside, rank, smallest), spaces, ELSEWHERE)
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
