"""Rows between the ranks, which have columns of them, and the first one, which reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from deltabars.columns import Columns
from deltabars.eigen.states import Rows
from deltabars.ranks import Ranks

_AT_ONCE = 64 << 20  # bytes of whole rows


def brought_together(rows: Rows, known: int, ranks: Ranks) -> Rows:
    """Rows with all of their columns, but for the first `known`; all ranks go through them at once.

    They can be gone through once, some at a time.
    """
    if ranks.count == 1 or rows.columns is None:
        return rows
    return Rows(rows.epoch, _gathered(rows, known, rows.columns, ranks), known)


def dealt_out(blocks: Iterable[Tensor], columns: Columns, ranks: Ranks) -> Iterable[Tensor]:
    """Blocks of whole rows that the first rank has, of which each rank gets its own columns."""
    if ranks.count == 1:
        return blocks
    return _dealt(blocks, columns.own, ranks)


def _gathered(rows: Rows, known: int, columns: Columns, ranks: Ranks) -> Iterator[Tensor]:
    skip = known - rows.start
    for block in rows.blocks:
        new, skip = block[skip:], max(0, skip - len(block))
        together = max(1, _AT_ONCE // max(1, columns.bounds[-1] * block.element_size()))
        for part in new.split(together) if len(new) else ():
            yield ranks.all_columns(part, columns)


def _dealt(blocks: Iterable[Tensor], own: slice, ranks: Ranks) -> Iterator[Tensor]:
    source = iter(blocks)
    while True:
        block = next(source, None) if ranks.is_first else None
        kind = ranks.agreed(None if block is None else (tuple(block.shape), block.dtype))
        if kind is None:
            return
        whole = torch.empty(kind[0], dtype=kind[1]) if block is None else block
        yield ranks.agree_(whole)[:, own].clone()
