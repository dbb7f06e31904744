"""Which columns of long rows are whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deltabars.ranks import Ranks


@dataclass(frozen=True)
class Columns:
    """Which columns of (b, P) each rank has: contiguous ranges, in the order of the ranks.

    Attributes:
        bounds: where they begin, and P: (R + 1,).
        rank: whose they are here.
    """

    bounds: tuple[int, ...]
    rank: int = 0

    @classmethod
    def even(cls, size: int, ranks: Ranks) -> Columns:
        """Ranges of one length, but for the last ones."""
        each = -(-size // ranks.count)
        return cls(tuple(min(each * k, size) for k in range(ranks.count + 1)), ranks.rank)

    @property
    def own(self) -> slice:
        """The range of this rank."""
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    @property
    def widths(self) -> list[int]:
        """How many columns each rank has."""
        return [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def among(self, places: Tensor | None) -> Columns:
        """The same ranges of the columns at some places (P',), ascending; of all if None."""
        if places is None:
            return self
        bounds = torch.searchsorted(places.cpu(), torch.tensor(self.bounds)).tolist()
        return Columns(tuple(bounds), self.rank)
