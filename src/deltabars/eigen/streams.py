"""Rows that come from all ranks, of which each has its own columns."""

from __future__ import annotations

import torch
from torch import Tensor

from deltabars.space import Space


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
