"""Rows that come from all ranks, of which each has its own columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from deltabars.space import Space


def dealt(blocks: Iterable[Tensor], source: Any, space: Space) -> Iterator[Tensor]:
    """The rows of all ranks, a block of each at a time: of these the columns that are here."""
    if space.ranks.count == 1:
        yield from blocks
        return
    nothing = torch.zeros(0, space.size, device=source.device, dtype=source.dtype)
    own = iter(blocks)
    while True:
        block = next(own, None)
        if not any(space.ranks.gather(block is not None)):
            return
        yield space.ranks.exchanged(nothing if block is None else block, space.columns)


def singular(rows: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """The singular values of rows (m, p), and the columns of their right vectors that are here.

    Where the columns are shared out, by a QR factorisation of each rank's and one of all of theirs.
    """
    if space.ranks.count == 1:
        _, strengths, vectors = torch.linalg.svd(rows, full_matrices=False)
        return strengths, vectors
    own, factor = torch.linalg.qr(rows.T)  # (p, k), (k, m)
    factors = space.ranks.gather(factor.cpu())
    sizes = [1, *map(len, factors)]
    found = factor.new_zeros(sum(sizes), min(sum(sizes) - 1, len(rows)), device="cpu")
    if space.ranks.is_first:  # Wᵀ of the SVD of all columns, by way of their own QR
        columns, inner = torch.linalg.qr(torch.cat(factors))  # (Σk, r), (r, m)
        _, strengths, turn = torch.linalg.svd(inner.T, full_matrices=False)
        found = torch.cat([strengths[None], columns @ turn.T])
    strengths, *turns = space.agree_(found).split(sizes)
    return strengths[0].to(rows), turns[space.ranks.rank].to(rows).T @ own.T
