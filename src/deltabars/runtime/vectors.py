"""Inner products of long rows, summed in float64.

A float32 dot product of 10⁵ numbers on a CPU is off by some 5e-6 of the norms, which is more than
orthogonality and the differences ‖f‖² − ‖Qᵀf‖² can bear. Products over short stretches are not;
their sums are kept in float64, at the speed of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deltabars.errors import StorageError
from deltabars.runtime.distributed import Columns, Group

_STRETCH = 512
# Small products of many stretches are computed together, up to so many numbers.
_AT_ONCE = {"cpu": 1 << 20}
_AT_ONCE_ELSEWHERE = 1 << 22


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The products a bᵀ of rows a (…, n, P) and b (m, P) or (…, m, P): (…, n, m), float64."""
    if a.dtype == torch.float64:
        return a @ b.mT
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*shape, a.shape[-2], b.shape[-2], dtype=torch.float64)
    return add_inner(total, a, b)


def add_inner(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the same products to a total in float64, in place."""
    if a.dtype == torch.float64:
        return total.add_(a @ b.mT)
    whole = a.shape[-1] // _STRETCH
    rest = slice(whole * _STRETCH, None)
    if whole * _STRETCH < a.shape[-1]:
        total += a[..., rest] @ b[..., rest].mT
    pieces_a, pieces_b = _stretches(a, whole), _stretches(b, whole)
    most = _AT_ONCE.get(a.device.type, _AT_ONCE_ELSEWHERE)
    together = max(1, most // max(1, total.numel()))
    for start in range(0, whole, together):
        part = slice(start, start + together)
        products = pieces_a[..., part, :, :] @ pieces_b[..., part, :, :].mT
        if together == 1:
            total += products.squeeze(-3)
        else:
            total += products.sum(-3, dtype=torch.float64)
    return total


def _stretches(rows: Tensor, whole: int) -> Tensor:
    """Rows (…, n, P) as (…, whole, n, stretch), without a copy."""
    return rows[..., : whole * _STRETCH].unflatten(-1, (whole, _STRETCH)).transpose(-3, -2)


@dataclass(frozen=True)
class Space:
    """ℝᴾ, of which each rank has a range of the columns.

    Attributes:
        size: P.
        ranks: who it is shared out between; nobody else by default.
        columns: which columns each of them has.
    """

    size: int
    group: Group = field(default_factory=Group)
    columns: Columns = field(default_factory=lambda: Columns(()))

    @property
    def own(self) -> slice:
        """The columns that are here."""
        return self.columns.own if self.group.size > 1 else slice(0, self.size)

    @property
    def width(self) -> int:
        """How many they are."""
        return self.own.stop - self.own.start

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """The products a bᵀ of rows (n, p) and (m, p), summed over all columns: (n, m), float64.

        Cost: one message.
        """
        return self.group.sum_(inner(a, b))

    def sum_(self, parts: Tensor) -> Tensor:
        """Numbers that each rank has a part of, in place."""
        return self.group.sum_(parts)

    def agree_(self, found: Tensor) -> Tensor:
        """A small result as the first rank has it, in place.

        The last bits of a decomposition may differ from machine to machine, and where eigenvalues
        repeat, its vectors differ with them.
        """
        return found if found.numel() == 1 else self.group.agree_(found)

    def dealt(
        self, blocks: Iterable[Tensor], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Rows (n, P) of all ranks, a block of each at a time: of these the columns that are here.

        The ranks may have different numbers of rows. Cost: five messages a block.
        """
        if self.group.size == 1:
            yield from blocks
            return
        nothing = torch.zeros(0, self.size, device=device, dtype=dtype)
        own = iter(blocks)
        while True:
            block = next(own, None)
            if not any(self.group.gather(block is not None)):
                return
            yield self.group.exchanged(nothing if block is None else block, self.columns)

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
        indices: where in ℝᴾ the columns of the second are, (P',), ascending; None for everywhere.
    """

    whole: Space
    reached: Space
    indices: Tensor | None

    @classmethod
    def of(cls, size: int, indices: Tensor | None, group: Group) -> Spaces:
        """Both, shared out between ranks."""
        columns = Columns.even(size, group)
        count = size if indices is None else len(indices)
        return cls(
            Space(size, group, columns), Space(count, group, columns.among(indices)), indices
        )

    @property
    def indices_here(self) -> Tensor | None:
        """The indices of this rank's columns of the second among its columns of the first."""
        if self.indices is None:
            return None
        return self.indices[self.reached.own] - self.whole.own.start

    def put_back(self, rows: Tensor) -> Tensor:
        """Rows (b, p') in the second among zeros in the first, (b, p)."""
        here = self.indices_here
        if here is None:
            return rows
        return rows.new_zeros(len(rows), self.whole.width).index_copy_(1, here, rows)

    def picked(self, rows: Tensor) -> Tensor:
        """Of rows (b, p) in the first their columns in the second, (b, p')."""
        here = self.indices_here
        return rows if here is None else rows.index_select(1, here)


@dataclass(frozen=True, eq=False)
class ShardedVectors:
    """Rows (K, P) in a space that is shared out between ranks.

    What is asked of them is asked by all ranks at once.

    Attributes:
        part: the columns that are here, (K, p).
        space: ℝᴾ.
    """

    part: Tensor
    space: Space

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
        """Where they are."""
        return self.part.device

    def __len__(self) -> int:
        return len(self.part)

    def __reduce__(self) -> Any:
        raise StorageError(
            f"Eigenvectors: expected whole ones to be copied or pickled, got those that "
            f"{self.space.group.size} ranks share. Save the fit, and load it where it is wanted."
        )

    def first(self, count: int) -> ShardedVectors:
        """The first rows."""
        return replace(self, part=self.part[:count])

    def columns(self, places: slice) -> Tensor:
        """Some of the columns on every rank, (K, n). Cost: one message."""
        start, stop, _ = places.indices(self.space.size)
        bounds = [min(max(bound, start), stop) - start for bound in self.space.columns.bounds]
        wanted = Columns(tuple(bounds), self.space.columns.rank)
        shift = start - self.space.own.start
        own = self.part[:, slice(wanted.own.start + shift, wanted.own.stop + shift)]
        return self.space.group.all_columns(own, wanted)

    def whole(self) -> Tensor:
        """All of them on every rank, (K, P)."""
        return self.columns(slice(None))


def group_of(spectra: Mapping[str, Any]) -> Group:
    """The ranks that the eigenvectors of a fit are shared out between; one alone if they are not.

    Args:
        spectra: eigenpairs by matrix.
    """
    for pairs in spectra.values():
        if isinstance(pairs.vectors, ShardedVectors):
            return pairs.vectors.space.group
    return Group()


def here(vectors: Any, start: int, stop: int) -> tuple[Any, int, int]:
    """What has the columns from `start` to `stop` on this rank, and where it has them."""
    if not isinstance(vectors, ShardedVectors):
        return vectors, start, stop
    shift = vectors.space.own.start
    return vectors.part, start - shift, stop - shift


# Bytes of columns that are on the device at a time, unless one output of a layer has more.
_AT_ONCE_vectors = {"cpu": 1 << 25}
_AT_ONCE_ELSEWHERE_vectors = 1 << 28
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
    most = _AT_ONCE_vectors.get(device.type, _AT_ONCE_ELSEWHERE_vectors)
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
