"""The space that eigenvectors are in, whole or shared out between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltabars.columns import Columns
from deltabars.ranks import Ranks
from deltabars.summation import inner


@dataclass(frozen=True)
class Space:
    """ℝᴾ, of which each rank has a range of the columns.

    Attributes:
        size: P.
        ranks: who it is shared out between; nobody else by default.
        columns: which columns each of them has.
    """

    size: int
    ranks: Ranks = field(default_factory=Ranks)
    columns: Columns = field(default_factory=lambda: Columns(()))

    @property
    def own(self) -> slice:
        """The columns that are here."""
        return self.columns.own if self.ranks.count > 1 else slice(0, self.size)

    @property
    def width(self) -> int:
        """How many they are."""
        return self.own.stop - self.own.start

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """The products a bᵀ of rows (n, p) and (m, p), summed over all columns: (n, m), float64.

        Cost: one message.
        """
        return self.ranks.sum_(inner(a, b))

    def sum_(self, parts: Tensor) -> Tensor:
        """Numbers that each rank has a part of, in place."""
        return self.ranks.sum_(parts)

    def agree_(self, found: Tensor) -> Tensor:
        """A small result as the first rank has it, in place.

        The last bits of a decomposition may differ from machine to machine, and where eigenvalues
        repeat, its vectors differ with them.
        """
        return found if found.numel() == 1 else self.ranks.agree_(found)

    def dealt(
        self, blocks: Iterable[Tensor], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Rows (n, P) of all ranks, a block of each at a time: of these the columns that are here.

        The ranks may have different numbers of rows. Cost: five messages a block.
        """
        if self.ranks.count == 1:
            yield from blocks
            return
        nothing = torch.zeros(0, self.size, device=device, dtype=dtype)
        own = iter(blocks)
        while True:
            block = next(own, None)
            if not any(self.ranks.gather(block is not None)):
                return
            yield self.ranks.exchanged(nothing if block is None else block, self.columns)

    def random_rows(
        self, count: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Standard normal rows (count, p): the same ones on every device and for any ranks."""
        rows = torch.empty(count, self.width, device=device, dtype=dtype)
        for row in rows:
            whole = torch.randn(self.size, generator=generator, dtype=torch.float32)
            row.copy_(whole[self.own])
        return rows


@dataclass(frozen=True)
class Spaces:
    """The space of all parameters, and that of those that the examples reach.

    Attributes:
        whole: ℝᴾ.
        reached: ℝᴾ', of which each rank has what lies in its range of ℝᴾ.
        places: where in ℝᴾ the columns of the second are, (P',), ascending; None for everywhere.
    """

    whole: Space
    reached: Space
    places: Tensor | None

    @classmethod
    def of(cls, size: int, places: Tensor | None, ranks: Ranks) -> Spaces:
        """Both, shared out between ranks."""
        columns = Columns.even(size, ranks)
        count = size if places is None else len(places)
        return cls(Space(size, ranks, columns), Space(count, ranks, columns.among(places)), places)

    @property
    def places_here(self) -> Tensor | None:
        """The places of this rank's columns of the second among its columns of the first."""
        if self.places is None:
            return None
        return self.places[self.reached.own] - self.whole.own.start

    def put_back(self, rows: Tensor) -> Tensor:
        """Rows (b, p') in the second among zeros in the first, (b, p)."""
        here = self.places_here
        if here is None:
            return rows
        return rows.new_zeros(len(rows), self.whole.width).index_copy_(1, here, rows)

    def picked(self, rows: Tensor) -> Tensor:
        """Of rows (b, p) in the first their columns in the second, (b, p')."""
        here = self.places_here
        return rows if here is None else rows.index_select(1, here)
