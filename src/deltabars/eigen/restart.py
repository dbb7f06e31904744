"""Restarts of a Krylov basis: what is kept, when to stop, and what is returned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltabars.eigen.basis import Basis, Ritz
from deltabars.eigen.pairs import LEAST_RITZ, EigenPairs, lower_scale, residual_scale

# So many restarts, and products for so many bases: three times the longest lull seen.
_RESTARTS, _BASES = 200, 40
_LESS = 0.9


@dataclass
class Patience:
    """Notice when restarts stand still: a cluster of eigenvalues that the basis cannot hold.

    Attributes:
        distance: the smallest so far (see `Ritz.distance`), but for falls of less than a tenth.
        restarts: since then.
        products: that were done then.
    """

    distance: float = math.inf
    restarts: int = 0
    products: int = 0

    def is_over(self, distance: float, products: int, max_vectors: int) -> bool:
        """Return whether to stop, at a restart after so many products."""
        if distance < _LESS * self.distance:
            self.distance, self.restarts, self.products = distance, 0, products
            return False
        self.restarts += 1
        return self.restarts > _RESTARTS and products - self.products > _BASES * max_vectors


def to_keep(size: int, rank: int, smallest: int, block_size: int) -> Tensor:
    """Choose which of `size` ascending Ritz pairs to keep: those wanted, and a third of the rest.

    What is kept beyond the wanted pairs need not be found again; what is not leaves room.
    """
    rest = size - rank - smallest
    spare = max(0, min(rest // 3, rest - 2 * block_size))
    below = smallest + spare // 2 if smallest else 0
    above = rank + smallest + spare - below
    return torch.cat([torch.arange(below), torch.arange(size - above, size)])


def insert(pairs: EigenPairs, missed: EigenPairs) -> EigenPairs:
    """Insert one more pair in order and drop the last. The vectors move in place."""
    rank = len(pairs)
    position = int((pairs.values >= missed.values).sum())
    for row in range(rank - 1, position, -1):
        pairs.vectors[row] = pairs.vectors[row - 1]
    if position < rank:
        pairs.vectors[position] = missed.vectors[0]
    values, residuals = (
        torch.cat([own[:position], new, own[position:]])[:rank]
        for own, new in ((pairs.values, missed.values), (pairs.residuals, missed.residuals))
    )
    return replace(pairs, values=values, residuals=residuals)


def found_pairs(basis: Basis, ritz: Ritz, rank: int, least: float, tolerance: float) -> EigenPairs:
    """Return the `rank` largest Ritz pairs; their vectors take the place of the basis.

    Args:
        least: the smallest Ritz value so far.
        tolerance: for the eigenvalues of the lower end that are known as well.
    """
    values = ritz.values.flip(0)[:rank]
    basis.keep(ritz.coordinates.flip(1)[:, :rank])
    residuals = ritz.norms.flip(0)[:rank] / residual_scale(values)
    rest = ritz.values.shape[0] - values.shape[0]
    lower, lower_norms = ritz.values[:rest], ritz.norms[:rest]
    lower_residuals = lower_norms / lower_scale(lower, values[:1].expand_as(lower))
    known = int((lower_residuals <= tolerance).long().cumprod(0).sum())
    vectors = basis.take()
    device = vectors.device
    return EigenPairs(
        values.to(device),
        vectors,
        residuals.to(device),
        lower[:known].to(device),
        lower_residuals[:known].to(device),
        {LEAST_RITZ: least},
    )
