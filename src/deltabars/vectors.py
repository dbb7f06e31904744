"""Eigenvectors (K, P) that need not be one tensor in memory, and what is computed with them.

`Basis` is a tensor or an object of `Vectors`, which gives columns of itself: eigenvectors in files,
in the memory of the CPU, or sharded over processes. What is computed with one goes block by block
of columns, and never holds all K·P numbers; with a tensor it is one product, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from deltabars.sharded import ShardedVectors
from deltabars.summation import add_inner, inner

# Bytes of columns that are on the device at a time, unless one output of a layer has more.
_AT_ONCE = {"cpu": 1 << 25}
_AT_ONCE_ELSEWHERE = 1 << 28
_STEP = 512  # columns that a block has a multiple of, as sums are taken over stretches of these


class Vectors(Protocol):
    """Rows (K, P) that are not one tensor."""

    @property
    def shape(self) -> tuple[int, int]:
        """K and P."""

    @property
    def dtype(self) -> torch.dtype:
        """What columns come out as: the type that is computed with."""

    @property
    def device(self) -> torch.device:
        """Where columns come out."""

    def first(self, count: int) -> Vectors:
        """The first rows."""

    def columns(self, places: slice) -> Tensor:
        """Some columns of all rows, (K, p)."""

    def whole(self) -> Tensor:
        """All of it, (K, P). Memory: K·P numbers on the device."""


Basis = Tensor | Vectors


def columns(vectors: Basis, places: slice) -> Tensor:
    """Some columns of all rows, (K, p)."""
    return vectors[:, places] if isinstance(vectors, Tensor) else vectors.columns(places)


def first(vectors: Basis, count: int) -> Basis:
    """The first rows."""
    return vectors[:count] if isinstance(vectors, Tensor) else vectors.first(count)


def whole(vectors: Basis) -> Tensor:
    """All of it as one tensor. Memory: K·P numbers, unless it is one already."""
    return vectors if isinstance(vectors, Tensor) else vectors.whole()


def chosen(vectors: Basis, places: Tensor | None) -> Basis:
    """The columns at some places, ascending; all of them for None."""
    if places is None:
        return vectors
    if isinstance(vectors, Tensor):
        return vectors.index_select(1, places)
    return ChosenColumns(vectors, places)


def ranges(start: int, stop: int, width: int, device: torch.device) -> Iterator[slice]:
    """Blocks of columns from `start` to `stop`, for `width` bytes a column, in their order."""
    most = _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE)
    step = max(1, most // (width * _STEP)) * _STEP
    for begin in range(start, stop, step):
        yield slice(begin, min(begin + step, stop))


def blocks(vectors: Basis) -> Iterator[slice]:
    """Blocks of all columns; one block of all for a tensor."""
    count, size = vectors.shape
    if isinstance(vectors, Tensor):
        yield slice(0, size)
    else:
        yield from ranges(0, size, max(1, count * vectors.dtype.itemsize), vectors.device)


def products(a: Basis, b: Basis) -> Tensor:
    """The inner products a bᵀ of rows (n, P) and (m, P): (n, m), float64."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return inner(a, b)
    if isinstance(a, ShardedVectors) and isinstance(b, ShardedVectors):
        return a.space.inner(a.part, b.part)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    for places in blocks(b if isinstance(a, Tensor) else a):
        add_inner(total, columns(a, places), columns(b, places))
    return total


def projected(rows: Tensor, vectors: Basis) -> Tensor:
    """Rows (b, P) times Qᵀ: (b, K), in their own type."""
    if isinstance(vectors, Tensor):
        return rows @ vectors.T
    return products(rows, vectors).to(rows.dtype)


def combined(weights: Tensor, vectors: Basis) -> Tensor:
    """Weights (b, K) times Q: (b, P)."""
    if isinstance(vectors, Tensor):
        return weights @ vectors
    result = weights.new_empty(weights.shape[0], vectors.shape[1])
    for places in blocks(vectors):
        torch.mm(weights, vectors.columns(places), out=result[:, places])
    return result


@dataclass(frozen=True, eq=False)
class Part:
    """Some columns of rows (K, P), from `start` to `stop`, as they are stored: (K, p)."""

    start: int
    stop: int
    rows: Tensor


@dataclass(frozen=True, eq=False)
class PartedVectors:
    """Rows (K, P) that stay where they are, and whose columns come to a device when asked for.

    Attributes:
        parts: all columns, in their order; in memory or mapped from files, in any floating type.
        count: K.
        dtype, device: of the columns that are asked for.
    """

    parts: tuple[Part, ...]
    count: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, rows: Tensor, device: torch.device) -> PartedVectors:
        """Of one tensor, which may be elsewhere: columns come to `device`."""
        return cls((Part(0, rows.shape[1], rows),), rows.shape[0], rows.dtype, device)

    def __repr__(self) -> str:
        count, size = self.shape
        return f"{type(self).__name__}(K={count}, P={size}, {self.stored}, on {self.device})"

    @property
    def shape(self) -> tuple[int, int]:
        """K and P."""
        return self.count, self.parts[-1].stop

    @property
    def stored(self) -> torch.dtype:
        """The type that the numbers are stored in."""
        return self.parts[0].rows.dtype

    def first(self, count: int) -> PartedVectors:
        """The first rows."""
        return replace(self, count=len(range(self.count)[:count]))

    def to(self, device: torch.device | str) -> PartedVectors:
        """The same rows, whose columns come to another device."""
        return replace(self, device=torch.device(device))

    def columns(self, places: slice) -> Tensor:
        """Some columns of all rows, (K, p), as a new tensor on the device."""
        start, stop, _ = places.indices(self.shape[1])
        result = torch.empty(self.count, max(0, stop - start), dtype=self.dtype, device=self.device)
        for part in self.parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                piece = part.rows[: self.count, low - part.start : high - part.start]
                if piece.device != self.device:
                    piece = _sent(piece, self.device)
                result[:, low - start : high - start].copy_(piece)
        return result

    def whole(self) -> Tensor:
        """All of it, (K, P). Memory: K·P numbers on the device."""
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for places in blocks(self):
            result[:, places] = self.columns(places)
        return result


def _sent(piece: Tensor, device: torch.device) -> Tensor:
    """Columns on another device, in the type that they are stored in, which may be the shorter."""
    if device.type != "cuda" or piece.device.type != "cpu":
        return piece.contiguous().to(device)
    # Pinned memory goes several times as fast, while the GPU works; torch keeps it for the next.
    staged = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
    return staged.copy_(piece).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class ChosenColumns:
    """The columns of other rows at some places, ascending."""

    vectors: Vectors
    places: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """K, and how many places there are."""
        return self.vectors.shape[0], len(self.places)

    @property
    def dtype(self) -> torch.dtype:
        """Of the columns."""
        return self.vectors.dtype

    @property
    def device(self) -> torch.device:
        """Of the columns."""
        return self.vectors.device

    def first(self, count: int) -> ChosenColumns:
        """The first rows."""
        return replace(self, vectors=self.vectors.first(count))

    def columns(self, places: slice) -> Tensor:
        """Some of the columns, from all that lie between the first and the last of them."""
        there = self.places[places]
        if not len(there):
            return self.vectors.columns(slice(0, 0))
        low, high = int(there[0]), int(there[-1]) + 1
        return self.vectors.columns(slice(low, high)).index_select(1, there - low)

    def whole(self) -> Tensor:
        """All of the columns. Memory: K numbers a place on the device."""
        return torch.cat([self.columns(places) for places in blocks(self)], dim=1)
