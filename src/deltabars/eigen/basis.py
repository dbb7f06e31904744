"""The growing basis V of a Krylov space, and the projection of the matrix on it, T = V A Vᵀ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltabars.eigen.pairs import residual_scale
from deltabars.runtime.vectors import Space, inner

_COLUMNS_AT_ONCE = {"cpu": 1024}  # of a whole basis
_COLUMNS_AT_ONCE_ELSEWHERE = 4096
_COLUMNS_OF_A_BLOCK = 1 << 16
_WORTH_A_TRIP = 256  # rows of T: from there on the device of the matrix is faster than the CPU


class Basis:
    """Hold orthonormal rows, in panels so that growing copies nothing.

    Args:
        space: of the rows; each process holds its own columns of them, (p,).
        first_panel: rows of the first panel; `keep` leaves the result there if it fits.
        locked: orthonormal rows (L, p) that all others are orthogonal to; they do not count.
    """

    def __init__(
        self,
        space: Space,
        first_panel: int,
        device: torch.device,
        dtype: torch.dtype,
        locked: Tensor | None = None,
    ) -> None:
        self._device, self._dtype, self._first_panel = device, dtype, first_panel
        self.space = space
        self._panels: list[Tensor] = []
        self._locked = [] if locked is None else [locked]
        self.rows = 0

    @property
    def panels(self) -> list[Tensor]:
        """The rows as they lie, without a copy."""
        before = sum(len(panel) for panel in self._panels[:-1])
        return [*self._panels[:-1], *(last[: self.rows - before] for last in self._panels[-1:])]

    def append(self, block: Tensor) -> None:
        """Add rows (b, p) that are orthonormal to one another and to all rows so far."""
        while len(block):
            room = sum(len(panel) for panel in self._panels) - self.rows
            if room == 0:
                room = max(16, self._first_panel // (8 if self._panels else 1))
                new = torch.empty(room, self.space.width, device=self._device, dtype=self._dtype)
                self._panels.append(new)
            last, part = self._panels[-1], block[:room]
            start = len(last) - room
            last[start : start + len(part)] = part
            self.rows += len(part)
            block = block[len(part) :]

    def remove_from(self, vectors: Tensor) -> Tensor:
        """Subtract from each row of `vectors` (b, p) its projection on the basis, once, in place.

        Return the products with the locked and the other rows, (b, L + rows), float64.
        """
        panels = [*self._locked, *self.panels]
        if not panels:
            return vectors.new_zeros(len(vectors), 0, dtype=torch.float64)
        parts = self.space.group.all_reduce_(
            torch.cat([inner(vectors, panel) for panel in panels], dim=1)
        )
        sizes = [len(panel) for panel in panels]
        for part, panel in zip(parts.split(sizes, dim=1), panels, strict=True):
            vectors.addmm_(part.to(self._dtype), panel, alpha=-1)
        return parts

    def keep(self, coefficients: Tensor) -> None:
        """Replace the m rows by k ≤ m combinations of them, for coefficients (m, k) in float64.

        In place, some columns at a time: no second copy of the basis is made.
        """
        mixing = coefficients.T.to(self._device, self._dtype)
        squares = torch.zeros(len(mixing), device=self._device, dtype=torch.float64)  # (k,)
        step = _COLUMNS_AT_ONCE.get(self._device.type, _COLUMNS_AT_ONCE_ELSEWHERE)
        for start in range(0, self.space.width, step):
            columns = slice(start, start + step)
            mixed = inner(mixing, torch.cat([panel[:, columns] for panel in self.panels]).T)
            squares += mixed.square().sum(1)
            for panel, part in self._by_panel(mixed):
                panel[: len(part), columns] = part.to(self._dtype)
        self.rows = len(mixing)
        while sum(len(panel) for panel in self._panels[:-1]) >= self.rows:
            self._panels.pop()
        lengths = self.space.group.all_reduce_(squares).sqrt().to(self._dtype).unsqueeze(1)
        for panel, part in self._by_panel(lengths):
            panel /= part  # rounding would shorten the rows a little at each restart

    def _by_panel(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each panel, and those of some rows that stand for its own."""
        start = 0
        for panel in self.panels:
            yield panel, rows[start : start + len(panel)]
            start += len(panel)

    def copy(self, start: int, stop: int) -> Tensor:
        """Copy some of the rows."""
        parts, before = [], 0
        for panel in self.panels:
            parts.append(panel[max(0, start - before) : max(0, stop - before)])
            before += len(panel)
        return torch.cat(parts)

    def take(self) -> Tensor:
        """Return the rows as one tensor; without a copy where they fill the first panel."""
        return self.panels[0] if len(self.panels) == 1 else torch.cat(self.panels)


def orthonormalise(rows: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """Replace rows W (b, p) by orthonormal V with W = R·V: R (b, b), and the strengths (b,).

    The strengths are the singular values of W, descending; directions weaker than the rounding
    errors of the strongest come out with strengths of about zero, and are not orthonormal.

    From inner products, which are a few matrix products where a QR factorisation of long rows is
    slow: the first round makes W well conditioned, the second one orthonormal. In place.
    Cost: one collective for one row; else two, and one to three small ones.
    """
    floor = torch.finfo(rows.dtype).eps ** 0.5
    turn, strengths = _principal(space.inner(rows, rows).cpu(), space)
    least = floor * float(strengths[0]) or 1.0
    scale = strengths.clamp(min=least)
    _mix(turn / scale, rows)  # W = (turn·scale)·rows
    factor = turn * scale
    if len(rows) == 1:  # of length 1, but for the rounding of its numbers
        return factor * (strengths > 0), strengths
    gram = space.inner(rows, rows).cpu()
    if float(strengths[-1]) > least:
        lower = torch.linalg.cholesky(gram)  # rows = lower·(orthonormal)
        eye = torch.eye(len(lower), dtype=lower.dtype)
        _mix(torch.linalg.solve_triangular(lower, eye, upper=False).T, rows)
        return factor @ lower, strengths
    turn, lengths = _principal(gram, space)
    left, strengths, right = torch.linalg.svd(factor @ (turn * lengths))
    found = space.broadcast_(torch.cat([left, strengths[None], right]))
    left, strengths, right = found[: len(left)], found[len(left)], found[len(left) + 1 :]
    _mix((turn / lengths.clamp(min=floor)) @ right.T, rows)
    return left * strengths, strengths


def extend(
    basis: Basis, vectors: Tensor, count: int, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return `count` orthonormal rows V that continue the basis along `vectors` (b, P).

    Their coupling R (b, count), float64 on the CPU, comes with them: vectors = R·V + (the basis).
    The basis has been removed from the vectors once. V overwrites them where it can.

    Directions with a strength of less than `noise` are rounding errors: an invariant subspace was
    found, and they are replaced by random ones, with zeros in the coupling.
    """
    # "Twice is enough", the second time on unit vectors, so that weak directions count as much.
    coupling, strengths = orthonormalise(vectors, basis.space)
    rows = vectors[: min(count, int((strengths > noise).sum()))]
    coupling = coupling[:, : len(rows)]
    if len(rows):
        basis.remove_from(rows)
        turn, left = orthonormalise(rows, basis.space)
        real = int((left > 0.5).sum())  # a unit vector that shrinks was in the basis already
        rows, coupling = rows[:real], (coupling @ turn)[:, :real]
    missing = count - len(rows)
    if missing:
        rows = torch.cat([rows, _fresh_rows(basis, rows, missing, generator)])
    return rows, torch.cat([coupling, coupling.new_zeros(len(coupling), missing)], dim=1)


def _principal(gram: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """Eigenvectors (columns) of a Gram matrix and the roots of its eigenvalues, descending."""
    values, columns = torch.linalg.eigh(gram)
    if len(gram) > 1:
        found = space.broadcast_(torch.cat([columns, values[None]]))
        columns, values = found[:-1], found[-1]
    return columns.flip(1), values.flip(0).clamp(min=0).sqrt()


def _mix(columns: Tensor, rows: Tensor) -> None:
    """Replace rows (b, P) by columnsᵀ·rows, for a small matrix (b, b) in float64 on the CPU."""
    mixing = columns.T.to(rows.device, rows.dtype)
    for part in rows.split(_COLUMNS_OF_A_BLOCK, dim=1):
        part.copy_(mixing @ part)


def completed(rows: Tensor, count: int, space: Space) -> Tensor:
    """Complete orthonormal rows (k, p) to `count` rows, in any direction."""
    if len(rows) == count:
        return rows.contiguous()
    basis = Basis(space, 1, rows.device, rows.dtype, rows)
    fresh = _fresh_rows(basis, rows, count - len(rows), torch.Generator().manual_seed(0))
    return torch.cat([rows, fresh])


def _fresh_rows(basis: Basis, rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw random orthonormal rows (count, p), orthogonal to the basis and to `rows`."""
    space = basis.space
    fresh = space.random_rows(count, generator, rows.device, rows.dtype)
    for _ in range(3):  # each pass on unit rows: what little room is left is found by the second
        basis.remove_from(fresh)
        fresh -= space.inner(fresh, rows).to(rows.dtype) @ rows
        orthonormalise(fresh, space)
    return fresh


def default_block_size(rank: int) -> int:
    """Return the vectors a block: a tenth of the rank, between 2 and 100."""
    return max(2, min(100, rank // 10))


@dataclass(frozen=True)
class Ritz:
    """The eigenpairs of T."""

    values: Tensor  # Ritz values, ascending, (m,)
    coordinates: Tensor  # of the Ritz vectors on the basis, (m, m), a column a pair
    residuals: Tensor  # norms over the scale of `residual_scale`, (m,)

    def distance(self, rank: int, smallest: int, tolerance: float) -> float:
        """Return how far the wanted pairs are from convergence: Σ log(residual/tolerance), or 0."""
        if len(self.values) < rank + smallest:
            return math.inf
        wanted = torch.cat([self.residuals.flip(0)[:rank], self.residuals[:smallest]])
        return float((wanted / tolerance).clamp(min=1.0).log().sum())

    def leading(self, tolerance: float) -> int:
        """Count the largest pairs that have converged, up to the first that has not."""
        return int((self.residuals.flip(0) <= tolerance).long().cumprod(0).sum())


class Projected:
    """T in float64, and the coupling R of its last rows to the block that comes next.

    A V_j = (terms in V_1 … V_j) + R V_{j+1}: T is block tridiagonal, but for the first rows after
    a restart, which are Ritz vectors and are all coupled to the block that follows them.
    """

    def __init__(self, device: torch.device, space: Space) -> None:
        self._group = space.group
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._space = torch.zeros(0, 0, dtype=torch.float64)  # T is its upper left part
        self._coupling = torch.zeros(0, 0, dtype=torch.float64)
        self.size = 0  # the number of rows of T

    @property
    def _matrix(self) -> Tensor:
        return self._space[: self.size, : self.size]

    def append(self, middle: Tensor, following: Tensor) -> None:
        """Add a block with V_j A V_jᵀ = middle (b, b), coupled to the one that follows by R."""
        before, after = self.size, self.size + len(middle)
        if after > len(self._space):
            grown = torch.zeros(2 * after, 2 * after, dtype=torch.float64)
            grown[:before, :before] = self._matrix
            self._space = grown
        self._space[before:after, before:after] = (middle + middle.T) / 2
        if before:
            first = before - len(self._coupling)
            self._space[first:before, before:after] = self._coupling
            self._space[before:after, first:before] = self._coupling.T
        self.size, self._coupling = after, following

    def ritz(self) -> Ritz:
        """Compute the Ritz pairs, and their residuals through the coupling. Cost: m³."""
        here = self._device if self.size >= _WORTH_A_TRIP else torch.device("cpu")
        values, coordinates = torch.linalg.eigh(self._matrix.to(here))
        if self._group.size > 1:
            found = self._group.broadcast_(torch.cat([coordinates, values[None]]))
            values, coordinates = found[-1], found[:-1]
        values = values.cpu()
        norms = self._group.broadcast_((self._coupling.T @ self._last(coordinates)).norm(dim=0))
        return Ritz(values, coordinates, norms / residual_scale(values, values[-1:]))

    def restart(self, ritz: Ritz, kept: Tensor) -> Tensor:
        """Restart from the Ritz pairs `kept` (k,); return their coordinates (m, k)."""
        coordinates = ritz.coordinates[:, kept.to(ritz.coordinates.device)]
        self._coupling = self._last(coordinates).T @ self._coupling
        self._space.zero_()
        self.size = len(kept)
        self._matrix.diagonal().copy_(ritz.values[kept])
        return coordinates

    def _last(self, coordinates: Tensor) -> Tensor:
        """Return the coordinates on the rows that are coupled to the next block."""
        return coordinates[self.size - len(self._coupling) :].cpu()

    def tensors(self) -> dict[str, Tensor]:
        """Return T and the coupling, for a checkpoint."""
        return {"projected": self._matrix.clone(), "coupling": self._coupling}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore T and the coupling; raise ValueError where they are not such tensors."""
        matrix, coupling = tensors["projected"], tensors["coupling"]
        kinds, size = {matrix.dtype, coupling.dtype}, matrix.shape[-1]
        is_square = matrix.shape == (size, size) and coupling.ndim == 2
        if kinds != {torch.float64} or not is_square or not 0 < len(coupling) <= size:
            raise ValueError("a projected matrix or a coupling of another shape or type")
        self._space, self._coupling, self.size = matrix, coupling, size


class Growth(Protocol):
    """A criterion for enough pairs, from their values and their projections of some rows."""

    @property
    def rows(self) -> Tensor:
        """The rows (m, p) whose projections are followed."""

    def is_enough(self, values: Tensor, projections: Tensor) -> bool:
        """Return whether eigenvalues (k,), descending, and `rows`·Qᵀ (m, k) suffice; float64."""

    def looked(self) -> Tensor:
        """Return what the last check has to remember, for a checkpoint."""

    def look_back(self, looked: Tensor) -> None:
        """Restore what the last check had to remember."""


class Followed:
    """Update the projections of rows on a growing basis. Cost: m·P operations a vector."""

    def __init__(self, growth: Growth, space: Space) -> None:
        self._growth, self._space = growth, space
        self._parts: list[Tensor] = []

    def append(self, block: Tensor) -> None:
        """Add new rows (b, p) of the basis."""
        self._parts.append(self._space.inner(self._growth.rows, block))

    def fewest(self, ritz: Ritz, count: int) -> int | None:
        """Return how many of the `count` largest Ritz pairs suffice; None where they do not."""
        if count == 0:
            return None
        on_basis = torch.cat(self._parts, dim=1)  # (m, rows of the basis)
        largest = ritz.coordinates.flip(1)[:, :count].to(on_basis.device)
        values = ritz.values.flip(0)[:count].to(on_basis.device)
        return fewest(self._growth, values, on_basis @ largest)


def fewest(growth: Growth, values: Tensor, projections: Tensor) -> int | None:
    """Return how many of the pairs are enough; None where all of them are not.

    By bisection: with more pairs the error only falls.
    """
    if not growth.is_enough(values, projections):
        return None
    low, high = 1, len(values)
    while low < high:
        middle = (low + high) // 2
        if growth.is_enough(values[:middle], projections[:, :middle]):
            high = middle
        else:
            low = middle + 1
    growth.is_enough(values[:low], projections[:, :low])  # it remembers its last check
    return low
