"""ℝᴾ, of which each process holds a range of the columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltabars.distributed.group import Columns, Group
from deltabars.runtime.sums import inner


@dataclass(frozen=True)
class Space:
    """Hold the split of ℝᴾ between processes.

    Attributes:
        size: P.
        group: the processes; this one alone by default.
        columns: which columns each of them holds.
    """

    size: int
    group: Group = field(default_factory=Group)
    columns: Columns = field(default_factory=lambda: Columns(()))

    @property
    def own(self) -> slice:
        """The columns of this process."""
        return self.columns.own if self.group.size > 1 else slice(0, self.size)

    @property
    def width(self) -> int:
        """The number of columns of this process."""
        return self.own.stop - self.own.start

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a bᵀ for rows (n, p) and (m, p), over all columns: (n, m), float64.

        Cost: one collective.
        """
        return self.group.all_reduce_(inner(a, b))

    def broadcast_(self, found: Tensor) -> Tensor:
        """Broadcast a small decomposition of the first process, in place.

        Its last bits may differ between machines, and so do its vectors where eigenvalues repeat.
        """
        return found if found.numel() == 1 else self.group.broadcast_(found)

    def exchange(
        self, blocks: Iterable[Tensor], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Exchange blocks of whole rows (n, P) of each process for the own columns of all rows.

        The processes may have different numbers of rows. Cost: five collectives a block.
        """
        if self.group.size == 1:
            yield from blocks
            return
        nothing = torch.zeros(0, self.size, device=device, dtype=dtype)
        own = iter(blocks)
        while True:
            block = next(own, None)
            if not any(self.group.gather_objects(block is not None)):
                return
            yield self.group.exchange_rows(nothing if block is None else block, self.columns)

    def random_rows(
        self, count: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Draw standard normal rows (count, p): the same on every device and for any split."""
        rows = torch.empty(count, self.width, device=device, dtype=dtype)
        for row in rows:
            whole = torch.randn(self.size, generator=generator, dtype=torch.float32)
            row.copy_(whole[self.own])
        return rows


@dataclass(frozen=True)
class Spaces:
    """The space of all parameters, and that of the parameters that the examples reach.

    Attributes:
        whole: ℝᴾ.
        reached: ℝᴾ'; each process holds what lies in its range of ℝᴾ.
        indices: of the reached columns in ℝᴾ, (P',), ascending; None for all.
    """

    whole: Space
    reached: Space
    indices: Tensor | None

    @classmethod
    def of(cls, size: int, indices: Tensor | None, group: Group) -> Spaces:
        """Split both between the processes of a group."""
        columns = Columns.even(size, group)
        count = size if indices is None else len(indices)
        return cls(
            Space(size, group, columns), Space(count, group, columns.among(indices)), indices
        )

    @property
    def own_indices(self) -> Tensor | None:
        """The own reached columns, as indices into the own columns of ℝᴾ."""
        if self.indices is None:
            return None
        return self.indices[self.reached.own] - self.whole.own.start

    def expand(self, rows: Tensor) -> Tensor:
        """Expand rows (b, p') of reached columns to (b, p), with zeros elsewhere."""
        here = self.own_indices
        if here is None:
            return rows
        return rows.new_zeros(len(rows), self.whole.width).index_copy_(1, here, rows)

    def select(self, rows: Tensor) -> Tensor:
        """Select the reached columns (b, p') of rows (b, p)."""
        here = self.own_indices
        return rows if here is None else rows.index_select(1, here)
