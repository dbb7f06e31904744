"""The projection of a matrix on a Krylov space: T = V A Vᵀ, which grows with the basis V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltabars.eigen.pairs import lower_scale, residual_scale
from deltabars.runtime.vectors import Space

_WORTH_A_TRIP = 256  # rows: from there on the device of the matrix is faster than the CPU


@dataclass(frozen=True)
class Ritz:
    """The eigenpairs of T: Ritz values (ascending), coordinates, residual norms."""

    values: Tensor  # (m,)
    coordinates: Tensor  # (m, m), a column a pair
    norms: Tensor  # (m,)

    def converged(self, rank: int, smallest: int, tolerance: float) -> tuple[int, bool]:
        """Count the converged ones of the largest `rank` pairs; return whether all wanted are."""
        top = self.values.flip(0)[:rank]
        upper = self.norms.flip(0)[:rank] <= tolerance * residual_scale(top)
        ends = self.values[-1:].expand(smallest)
        low = self.norms[:smallest] <= tolerance * lower_scale(self.values[:smallest], ends)
        enough = self.values.shape[0] >= rank + smallest
        return int(upper.sum()), enough and bool(upper.all()) and bool(low.all())

    def distance(self, rank: int, smallest: int, tolerance: float) -> float:
        """Return how far the pairs are from that: Σ log(residual/tolerance) over the others."""
        top, ends = self.values.flip(0)[:rank], self.values[-1:].expand(smallest)
        upper = self.norms.flip(0)[:rank] / residual_scale(top)
        low = self.norms[:smallest] / lower_scale(self.values[:smallest], ends)
        return float((torch.cat([upper, low]) / tolerance).clamp(min=1.0).log().sum())

    def leading(self, tolerance: float) -> int:
        """Count the largest pairs that have converged, up to the first that has not."""
        top = self.values.flip(0)
        good = self.norms.flip(0) <= tolerance * residual_scale(top)
        return int(good.long().cumprod(0).sum())


class Projected:
    """T in float64, and the coupling R of its last rows to the block that comes next.

    A V_j = (terms in V_1 … V_j) + R V_{j+1}: T is block tridiagonal, but for the first rows after
    a restart, which are Ritz vectors and are all coupled to the block that follows them.

    Attributes:
        size: the number of rows of T.
    """

    def __init__(self, device: torch.device, space: Space) -> None:
        self._group = space.group
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._space = torch.zeros(0, 0, dtype=torch.float64)  # T is its upper left part
        self._coupling = torch.zeros(0, 0, dtype=torch.float64)
        self.size = 0

    def append(self, middle: Tensor, following: Tensor) -> None:
        """Add a block with V_j A V_jᵀ = middle (b, b), coupled to the one that follows by R."""
        before, after = self.size, self.size + middle.shape[0]
        if after > self._space.shape[0]:
            grown = torch.zeros(2 * after, 2 * after, dtype=torch.float64)
            grown[:before, :before] = self._matrix
            self._space = grown
        self._space[before:after, before:after] = (middle + middle.T) / 2
        if before:
            first = before - self._coupling.shape[0]
            self._space[first:before, before:after] = self._coupling
            self._space[before:after, first:before] = self._coupling.T
        self.size, self._coupling = after, following

    @property
    def _matrix(self) -> Tensor:
        return self._space[: self.size, : self.size]

    def ritz(self) -> Ritz:
        """Compute the Ritz pairs, and their residual norms through the coupling. Cost: m³."""
        here = self._device if self.size >= _WORTH_A_TRIP else torch.device("cpu")
        values, coordinates = torch.linalg.eigh(self._matrix.to(here))
        if self._group.size > 1:
            found = self._group.broadcast_(torch.cat([coordinates, values[None]]))
            values, coordinates = found[-1], found[:-1]
        last = coordinates[self.size - self._coupling.shape[0] :].cpu()
        norms = self._group.broadcast_((self._coupling.T @ last).norm(dim=0))
        return Ritz(values.cpu(), coordinates, norms)

    def restart(self, ritz: Ritz, kept: Tensor) -> Tensor:
        """Restart from the Ritz pairs `kept` (k,); return their coordinates (m, k)."""
        coordinates = ritz.coordinates[:, kept.to(ritz.coordinates.device)]
        last = coordinates[self.size - self._coupling.shape[0] :].cpu()
        self._coupling = last.T @ self._coupling
        self._space.zero_()
        self.size = kept.shape[0]
        self._matrix.diagonal().copy_(ritz.values[kept])
        return coordinates

    def tensors(self) -> dict[str, Tensor]:
        """Return T and the coupling, for a checkpoint."""
        return {"projected": self._matrix.clone(), "coupling": self._coupling}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore T and the coupling.

        Raises:
            ValueError, KeyError: they are not such tensors.
        """
        matrix, coupling = tensors["projected"], tensors["coupling"]
        size = matrix.shape[-1]
        if matrix.shape != (size, size) or {matrix.dtype, coupling.dtype} != {torch.float64}:
            raise ValueError("a projected matrix of another shape or type")
        if coupling.ndim != 2 or not 0 < coupling.shape[0] <= size:
            raise ValueError("a coupling of another shape")
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
