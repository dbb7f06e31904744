"""Rows of ℝᴾ, which processes may share: inner products, the spaces, and the eigenvectors (K, P).

A float32 inner product of 10⁵ numbers on a CPU is off by 5e-6 of the norms: too much for
orthogonality and for differences such as ‖f‖² − ‖Qᵀf‖². Products over short stretches are exact
enough; their sums are kept in float64, at the speed of float32.

Eigenvectors are a tensor, sharded over processes, in files, or in the memory of the CPU; the
functions here take any of them. They ask for some columns at a time, so that rows which are
not on the device never have to be there whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import StorageError
from deltabars.runtime.distributed import Columns, Group

# Bytes of columns that are on the device at a time, unless one output of a layer has more.
_BLOCK = {"cpu": 1 << 25}
_BLOCK_ELSEWHERE = 1 << 28

_STRETCH = 512  # columns of a product that is taken in float32
# Small products of many stretches are computed together, up to so many numbers.
_AT_ONCE = {"cpu": 1 << 20}
_AT_ONCE_ELSEWHERE = 1 << 22


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Compute a bᵀ for rows a (…, n, P) and b (m, P) or (…, m, P): (…, n, m), float64."""
    if a.dtype == torch.float64:
        return a @ b.mT
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*shape, a.shape[-2], b.shape[-2], dtype=torch.float64)
    return add_inner(total, a, b)


def add_inner(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the same products to a total in float64, in place."""
    if a.dtype == torch.float64:
        return total.add_(a @ b.mT)
    count = a.shape[-1] // _STRETCH
    rest = slice(count * _STRETCH, None)
    if count * _STRETCH < a.shape[-1]:
        total += a[..., rest] @ b[..., rest].mT
    pieces_a, pieces_b = _stretches(a, count), _stretches(b, count)
    most = _AT_ONCE.get(a.device.type, _AT_ONCE_ELSEWHERE)
    together = max(1, most // max(1, total.numel()))
    for start in range(0, count, together):
        part = slice(start, start + together)
        products = pieces_a[..., part, :, :] @ pieces_b[..., part, :, :].mT
        if together == 1:
            total += products.squeeze(-3)
        else:
            total += products.sum(-3, dtype=torch.float64)
    return total


def _stretches(rows: Tensor, count: int) -> Tensor:
    """View rows (…, n, P) as (…, count, n, stretch)."""
    return rows[..., : count * _STRETCH].unflatten(-1, (count, _STRETCH)).transpose(-3, -2)


@dataclass(frozen=True)
class Space:
    """The split of ℝᴾ between processes."""

    size: int  # P
    group: Group = field(default_factory=Group)  # this process alone by default
    columns: Columns = field(default_factory=lambda: Columns(()))  # which each of them holds

    @property
    def own(self) -> slice:
        """The columns of this process."""
        return self.columns.own if self.group.size > 1 else slice(0, self.size)

    @property
    def width(self) -> int:
        """How many these are."""
        return self.own.stop - self.own.start

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a bᵀ for rows (n, p) and (m, p), over all columns: (n, m), float64."""
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
    """The space of all parameters, and that of the parameters that the examples reach."""

    whole: Space  # ℝᴾ
    reached: Space  # ℝᴾ'; each process holds what lies in its range of ℝᴾ
    indices: Tensor | None  # of the reached columns in ℝᴾ, (P',), ascending; None for all

    @classmethod
    def of(cls, size: int, indices: Tensor | None, group: Group) -> Spaces:
        """Split both between the processes of a group."""
        columns = Columns.even(size, group)
        count = size if indices is None else len(indices)
        reached = Space(count, group, columns.among(indices))
        return cls(Space(size, group, columns), reached, indices)

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


def columns(vectors: Basis, indices: slice) -> Tensor:
    """Return some columns of all rows, (K, p)."""
    return vectors[:, indices] if isinstance(vectors, Tensor) else vectors.columns(indices)


def first(vectors: Basis, count: int) -> Basis:
    """Return the first rows."""
    return vectors[:count] if isinstance(vectors, Tensor) else vectors.first(count)


def whole(vectors: Basis) -> Tensor:
    """Return one tensor (K, P). Memory: K·P numbers, unless it is one already."""
    return vectors if isinstance(vectors, Tensor) else vectors.whole()


def ranges(start: int, stop: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield blocks of columns from `start` to `stop`, for `width` bytes a column."""
    most = _BLOCK.get(device.type, _BLOCK_ELSEWHERE)
    step = max(1, most // (width * _STRETCH)) * _STRETCH
    for begin in range(start, stop, step):
        yield slice(begin, min(begin + step, stop))


def blocks(vectors: Basis) -> Iterator[slice]:
    """Yield blocks of all columns; one block for a tensor."""
    count, size = vectors.shape
    if isinstance(vectors, Tensor):
        yield slice(0, size)
    else:
        yield from ranges(0, size, max(1, count * vectors.dtype.itemsize), vectors.device)


def products(a: Basis, b: Basis) -> Tensor:
    """Compute the inner products a bᵀ of rows (n, P) and (m, P): (n, m), float64."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return inner(a, b)
    if isinstance(a, ShardedVectors) and isinstance(b, ShardedVectors):
        return a.space.inner(a.part, b.part)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    for indices in blocks(b if isinstance(a, Tensor) else a):
        add_inner(total, columns(a, indices), columns(b, indices))
    return total


def projected(rows: Tensor, vectors: Basis) -> Tensor:
    """Project rows (b, P): their products with Qᵀ, (b, K), in their own type."""
    if isinstance(vectors, Tensor):
        return rows @ vectors.T
    return products(rows, vectors).to(rows.dtype)


def combined(weights: Tensor, vectors: Basis) -> Tensor:
    """Combine the rows of Q with weights (b, K): (b, P)."""
    if isinstance(vectors, Tensor):
        return weights @ vectors
    result = weights.new_empty(weights.shape[0], vectors.shape[1])
    for indices in blocks(vectors):
        torch.mm(weights, vectors.columns(indices), out=result[:, indices])
    return result


@dataclass(frozen=True, eq=False)
class ShardedVectors:
    """Rows (K, P) of which each process holds its own columns. All processes call together."""

    part: Tensor  # the own columns, (K, p)
    space: Space  # ℝᴾ

    @property
    def shape(self) -> tuple[int, int]:
        """(K, P)."""
        return (len(self.part), self.space.size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        """Of the own columns."""
        return self.part.device

    def __reduce__(self) -> Any:
        raise StorageError(
            f"Eigenvectors: expected whole ones to be copied or pickled, got vectors that "
            f"{self.space.group.size} processes share. Save the fit, and load it where you need it."
        )

    def first(self, count: int) -> ShardedVectors:
        """Return the first rows."""
        return replace(self, part=self.part[:count])

    def columns(self, indices: slice) -> Tensor:
        """Return some of the columns in every process, (K, n). Cost: one collective."""
        start, stop, _ = indices.indices(self.space.size)
        bounds = [min(max(bound, start), stop) - start for bound in self.space.columns.bounds]
        wanted = Columns(tuple(bounds), self.space.columns.rank)
        shift = start - self.space.own.start
        own = self.part[:, slice(wanted.own.start + shift, wanted.own.stop + shift)]
        return self.space.group.gather_columns(own, wanted)

    def whole(self) -> Tensor:
        """Return all of it in every process, (K, P)."""
        return self.columns(slice(None))


def group_of(spectra: Mapping[str, Any]) -> Group:
    """Return the processes that share the eigenvectors of some spectra."""
    vectors = (pairs.vectors for pairs in spectra.values())
    return next((v.space.group for v in vectors if isinstance(v, ShardedVectors)), Group())


@dataclass(frozen=True, eq=False)
class Part:
    """Some columns of rows (K, P), from `start` to `stop`, as they are stored: (K, p)."""

    start: int
    stop: int
    rows: Tensor


@dataclass(frozen=True, eq=False)
class PartedVectors:
    """Rows (K, P) that stay where they are; columns come to a device when they are needed."""

    parts: tuple[Part, ...]  # all columns, in order; in memory or mapped, in any floating type
    count: int  # K
    dtype: torch.dtype  # of the columns that are computed with, as is the device
    device: torch.device

    @classmethod
    def of(cls, rows: Tensor, device: torch.device) -> PartedVectors:
        """Keep one tensor where it is; its columns come to `device`."""
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
        """Return the first rows."""
        return replace(self, count=len(range(self.count)[:count]))

    def to(self, device: torch.device | str) -> PartedVectors:
        """Return the same rows, whose columns come to another device."""
        return replace(self, device=torch.device(device))

    def columns(self, indices: slice) -> Tensor:
        """Return some columns of all rows, (K, p), as a new tensor on the device."""
        start, stop, _ = indices.indices(self.shape[1])
        result = torch.empty(self.count, max(0, stop - start), dtype=self.dtype, device=self.device)
        for part in self.parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                piece = part.rows[: self.count, low - part.start : high - part.start]
                if self.device.type == "cuda" and piece.device.type == "cpu":
                    # Pinned memory is several times as fast, and does not wait for the GPU.
                    staged = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
                    piece = staged.copy_(piece).to(self.device, non_blocking=True)
                result[:, low - start : high - start].copy_(piece)
        return result

    def whole(self) -> Tensor:
        """Return all of it, (K, P). Memory: K·P numbers on the device."""
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for indices in blocks(self):
            result[:, indices] = self.columns(indices)
        return result


Basis = Tensor | ShardedVectors | PartedVectors
