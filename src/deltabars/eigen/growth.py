"""Pairs that are enough by a measure of their own: how far a Krylov space has to grow."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deltabars.eigen.projected import Ritz
from deltabars.space import Space


class Growth(Protocol):
    """What decides whether pairs are enough: from their values and what they show of some rows."""

    @property
    def rows(self) -> Tensor:
        """The rows (m, p) whose projections are followed."""

    def is_enough(self, values: Tensor, projections: Tensor) -> bool:
        """Whether the eigenvalues (k,), descending, and `rows`·Qᵀ (m, k) will do; both float64."""

    def looked(self) -> Tensor:
        """What the last look has left to be remembered, for a checkpoint."""

    def look_back(self, looked: Tensor) -> None:
        """Remember it again."""


class Followed:
    """The projections of rows on a basis, kept up while it grows. Cost: m·P operations a vector."""

    def __init__(self, growth: Growth, space: Space) -> None:
        self._growth, self._space = growth, space
        self._parts: list[Tensor] = []

    def append(self, block: Tensor) -> None:
        """Take in new rows (b, p) of the basis."""
        self._parts.append(self._space.inner(self._growth.rows, block))

    def fewest(self, ritz: Ritz, count: int) -> int | None:
        """How many of the `count` largest Ritz pairs will do; None where they do not."""
        if count == 0:
            return None
        on_basis = torch.cat(self._parts, dim=1)  # (m, rows of the basis)
        largest = ritz.coordinates.flip(1)[:, :count].to(on_basis.device)
        values = ritz.values.flip(0)[:count].to(on_basis.device)
        return fewest(self._growth, values, on_basis @ largest)


def fewest(growth: Growth, values: Tensor, projections: Tensor) -> int | None:
    """How many of the pairs are enough; None where all of them are not.

    By bisection: with more pairs the error only falls.
    """
    if not growth.is_enough(values, projections):
        return None
    low, high = 1, len(values)
    while low < high:
        middle = (low + high) // 2
        if growth.is_enough(values[:middle], projections[:, :middle]):
            high = middle
        else:
            low = middle + 1
    growth.is_enough(values[:low], projections[:, :low])  # it remembers its last look
    return low
