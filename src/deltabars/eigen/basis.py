"""An orthonormal basis that grows, and the orthogonalisation that keeps it one."""

from __future__ import annotations

import torch
from torch import Tensor

from deltabars.summation import inner


class Basis:
    """Orthonormal rows, kept in panels so that growing copies nothing."""

    def __init__(self, width: int, panel_rows: int, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._width = width
        self._panel_rows = panel_rows
        self._panels: list[Tensor] = []
        self.rows = 0

    def append(self, block: Tensor) -> None:
        """Add rows (b, P) that are orthonormal to one another and to all rows so far."""
        while block.shape[0]:
            place = self.rows % self._panel_rows
            if place == 0:
                self._panels.append(self._zeros(self._panel_rows))
            part = block[: self._panel_rows - place]
            self._panels[-1][place : place + part.shape[0]] = part
            self.rows += part.shape[0]
            block = block[part.shape[0] :]

    def remove(self, vectors: Tensor) -> Tensor:
        """Subtract from each row of `vectors` its projection on the basis, once."""
        vectors = vectors.clone()
        for panel in self._filled():
            vectors.addmm_(inner(vectors, panel).to(self._dtype), panel, alpha=-1)
        return vectors

    def combine(self, coefficients: Tensor) -> Tensor:
        """Linear combinations (k, P) of the rows, for coefficients (rows, k) in float64."""
        total = self._zeros(coefficients.shape[1])
        start = 0
        for panel in self._filled():
            part = coefficients[start : start + panel.shape[0]].to(self._device, self._dtype)
            total.addmm_(part.T, panel)
            start += panel.shape[0]
        return total

    def _zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, self._width, device=self._device, dtype=self._dtype)

    def _filled(self) -> list[Tensor]:
        if not self._panels:
            return []
        last = self.rows - self._panel_rows * (len(self._panels) - 1)
        return [*self._panels[:-1], self._panels[-1][:last]]


def orthonormal_rows(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows W (b, P) as R·V with V (b, P) orthonormal: V, R (b, b), and R's singular values (b,).

    V comes from a QR factorisation, so it is orthonormal whatever the rank of W, but in float32
    for no more than five digits: a Cholesky factor of its own inner products mends that. The rows
    of V are rotated to the singular directions, so that what is dependent is in the last ones.
    """
    columns, triangle = torch.linalg.qr(vectors.T)  # W = triangleᵀ columnsᵀ
    near = columns.T.contiguous()
    factor = torch.linalg.cholesky(inner(near, near))  # near = factor·(orthonormal)
    left, strengths, right = torch.linalg.svd(triangle.T.double() @ factor)
    turn = torch.linalg.solve_triangular(factor, right, upper=False, left=False)
    return turn.to(vectors.dtype) @ near, left * strengths, strengths


def extend(
    basis: Basis, vectors: Tensor, count: int, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`count` orthonormal rows V that continue the basis along `vectors` (b, P).

    Directions with a strength of less than `noise` are rounding errors: an invariant subspace was
    found, and they are replaced by random ones, with zeros in the coupling.

    Returns:
        V (count, P), and the coupling R (b, count) in float64: vectors = R·V + (the basis).
    """
    # "Twice is enough", the second time on unit vectors, so that weak directions count as much.
    rows, coupling, strengths = orthonormal_rows(basis.remove(vectors))
    rows = rows[: min(count, int((strengths > noise).sum()))]
    coupling = coupling[:, : rows.shape[0]]
    if rows.shape[0]:
        rows, turn, left = orthonormal_rows(basis.remove(rows))
        real = int((left > 0.5).sum())  # a unit vector that shrinks was in the basis already
        rows, coupling = rows[:real], (coupling @ turn)[:, :real]
    missing = count - rows.shape[0]
    if missing:
        rows = torch.cat([rows, _fresh_rows(basis, rows, missing, generator)])
    return rows, torch.cat([coupling, coupling.new_zeros(coupling.shape[0], missing)], dim=1)


def _fresh_rows(basis: Basis, rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal rows (count, P), orthogonal to the basis and to `rows`."""
    fresh = random_rows(count, rows.shape[1], generator, rows.device, rows.dtype)
    for _ in range(3):  # each pass on unit rows: what little room is left is found by the second
        fresh = basis.remove(fresh)
        fresh = fresh - inner(fresh, rows).to(rows.dtype) @ rows
        fresh = orthonormal_rows(fresh)[0]
    return fresh


def random_rows(
    count: int, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Standard normal rows (count, width), the same ones on every device."""
    return torch.randn(count, width, generator=generator, dtype=torch.float64).to(device, dtype)
