"""Eigenvectors in a shorter type: what is stored, and what is lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.sharded import ShardedVectors
from deltabars.summation import add_inner
from deltabars.vectors import Basis, PartedVectors, columns, ranges

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ROUNDING_UP = 1 + 1e-3  # of norms that are computed in float32 and float64


def stored_dtype(asked: Any, vectors: Basis) -> torch.dtype:
    """The type to store eigenvectors in: the one asked for, or as they are.

    Raises:
        BadValueError: it is none of float64, float32, bfloat16 and float16.
    """
    if asked is None:
        return vectors.stored if isinstance(vectors, PartedVectors) else vectors.dtype
    found = DTYPES.get(asked) if isinstance(asked, str) else asked
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise BadValueError(
            f"dtype: expected None or one of {', '.join(DTYPES)}, got {asked!r}. None stores the "
            "eigenvectors as they are."
        )
    return found


def rounded(vectors: Basis, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """The columns `start` to `stop` in a type, (K, p), on the CPU; block by block."""
    count, _ = vectors.shape
    result = torch.empty(count, stop - start, dtype=dtype)
    for places in _blocks(vectors, start, stop):
        result[:, places.start - start : places.stop - start] = columns(vectors, places).to(dtype)
    return result


def measured_loss(vectors: Basis, dtype: torch.dtype) -> dict[str, float]:
    """What eigenvectors Q lose when they are stored as Q̃, rounded to the nearest number of a type.

    Returns:
        `norm`: ‖Q̃ − Q‖₂, which no projection of a vector f is further off than, times ‖f‖;
        `orthogonality`: the largest entry of |Q̃Q̃ᵀ − I|. Empty where nothing is lost.

    Cost: 4·K²·P operations; memory: a block of columns three times.
    """
    part = vectors.part if isinstance(vectors, ShardedVectors) else vectors
    sums = loss_sums(part, dtype)
    if sums is None:
        return {}
    return loss_of(vectors.space.sum_(sums) if isinstance(vectors, ShardedVectors) else sums)


def loss_sums(vectors: Basis, dtype: torch.dtype) -> Tensor | None:
    """The sums over columns that a loss follows from: (Q̃ − Q)(Q̃ − Q)ᵀ and Q̃Q̃ᵀ, (2, K, K), float64.

    Those of several ranges of columns add up. None for a type that loses nothing.
    """
    if torch.promote_types(dtype, vectors.dtype) == dtype:
        return None
    count, size = vectors.shape
    sums = torch.zeros(2, count, count, dtype=torch.float64, device=vectors.device)
    for places in _blocks(vectors, 0, size):
        exact = columns(vectors, places)
        there = exact.to(dtype).to(exact.dtype)
        gap = there - exact
        add_inner(sums[0], gap, gap)
        add_inner(sums[1], there, there)
    return sums


def loss_of(sums: Tensor) -> dict[str, float]:
    """What `measured_loss` returns, from the sums over all columns."""
    norm = float(torch.linalg.eigvalsh(sums[0])[-1].clamp(min=0).sqrt())
    if norm == 0:
        return {}
    beside = sums[1] - torch.eye(sums.shape[1], dtype=sums.dtype, device=sums.device)
    return {"norm": norm * _ROUNDING_UP, "orthogonality": float(beside.abs().max())}


def _blocks(vectors: Basis, start: int, stop: int) -> Iterator[slice]:
    width = max(1, vectors.shape[0] * vectors.dtype.itemsize)
    return ranges(start, stop, width, vectors.device)
