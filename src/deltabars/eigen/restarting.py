"""What a Krylov basis goes on with: the pairs that a restart keeps, and one that was missed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deltabars.eigen.pairs import EigenPairs


def to_keep(size: int, rank: int, smallest: int, block_size: int) -> Tensor:
    """Which of `size` ascending Ritz pairs a restart keeps: those wanted, and a third of the rest.

    What is kept beyond the wanted pairs saves it from being found again; what is not leaves room.
    """
    rest = size - rank - smallest
    spare = max(0, min(rest // 3, rest - 2 * block_size))
    below = smallest + spare // 2 if smallest else 0
    above = rank + smallest + spare - below
    return torch.cat([torch.arange(below), torch.arange(size - above, size)])


def insert(pairs: EigenPairs, missed: EigenPairs) -> EigenPairs:
    """The pairs with one more among them and without the last. The vectors move in place."""
    rank = len(pairs)
    place = int((pairs.values >= missed.values).sum())
    for row in range(rank - 1, place, -1):
        pairs.vectors[row] = pairs.vectors[row - 1]
    if place < rank:
        pairs.vectors[place] = missed.vectors[0]
    values, residuals = (
        torch.cat([own[:place], new, own[place:]])[:rank]
        for own, new in ((pairs.values, missed.values), (pairs.residuals, missed.residuals))
    )
    return replace(pairs, values=values, residuals=residuals)
