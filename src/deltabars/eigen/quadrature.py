"""Quadratic forms fᵀA⁻¹f between rigorous bounds, whatever the solver did.

For any x, with r = f − Ax,

    fᵀA⁻¹f = fᵀx + xᵀr + rᵀA⁻¹r

because A⁻¹f = x + A⁻¹r and f = Ax + r. Conjugate gradients make r small; the last term is enclosed
by Gauss (low) and Gauss-Radau (high) quadrature of one Lanczos step from r itself. Both hold for
every A whose eigenvalues are not below `floor` (Golub and Meurant, Matrices, Moments and
Quadrature), so neither the preconditioner nor the recurrences have to be exact: r is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_RESERVE = 0.5  # of the tolerance: the recurrence's residual is not quite the true one
_ROUNDS = 4  # of iterating and computing the residual anew
_OF_ROWS, _OF_PRODUCTS = 64, 4  # units in the last place
_ROUNDING = 512  # units in the last place that a value may be off by its sums alone


@dataclass(frozen=True)
class Enclosure:
    """fᵀA⁻¹f of each row f lies in [low, high], (m,), float64.

    Attributes:
        products: how many products with A (of all rows at once) were made.
        is_close: whether each interval is as narrow as it was asked to be, (m,).
    """

    low: Tensor
    high: Tensor
    products: int
    is_close: Tensor


def least_tolerance(dtype: torch.dtype) -> float:
    """Return the narrowest relative half-width of √(fᵀA⁻¹f) that rounding allows."""
    return float(_ROUNDING * torch.finfo(dtype).eps)


def enclose_inverse_forms(
    matmat: Callable[[Tensor], Tensor],
    rows: Tensor,
    floor: float,
    precondition: Callable[[Tensor], Tensor],
    tolerance: float,
    max_products: int,
    norm: float = 0.0,
) -> Enclosure:
    """Enclose fᵀA⁻¹f for each row f of (m, P), by preconditioned conjugate gradients.

    Args:
        matmat: products (b, P) -> (b, P) with a symmetric A whose eigenvalues are `floor` or more.
        precondition: products with a symmetric positive definite approximation of A⁻¹.
        tolerance: for half of the width of the interval for √(fᵀA⁻¹f), relative to its middle.
        max_products: with A; the intervals hold whether they are narrow enough by then or not.
        norm: ‖A‖, to which products are rounded; A is a sum of outer products of rounded rows.

    Cost: a product each step, all rows at once; with the K largest eigenvalues in the
    preconditioner about √(λ_K/λ)·log(1/tolerance) steps. Memory: five times that of the rows.
    """
    run = _Run(matmat, rows, floor, precondition, norm)
    for _ in range(_ROUNDS):
        run.iterate(_RESERVE * tolerance, max_products - 1)
        low, high = run.enclose()
        close = _half_width(low, high) <= tolerance
        if bool(close.all()) or run.products >= max_products:
            break
    return Enclosure(low, high, run.products, close)


def _half_width(low: Tensor, high: Tensor) -> Tensor:
    """Of [√low, √high], relative to the middle; zero for a row of zeros."""
    lower, upper = low.clamp(min=0).sqrt(), high.clamp(min=0).sqrt()
    total = lower + upper
    return torch.where(total > 0, (upper - lower) / total, torch.zeros_like(total))


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(-1, dtype=torch.float64)


@dataclass
class _Run:
    matmat: Callable[[Tensor], Tensor]
    rows: Tensor  # f
    floor: float
    precondition: Callable[[Tensor], Tensor]
    norm: float = 0.0
    products: int = 0

    def __post_init__(self) -> None:
        self.solution = self.precondition(self.rows).clone()  # x
        self.residual = self.rows - self._product(self.solution)  # r

    def _product(self, vectors: Tensor) -> Tensor:
        self.products += 1
        return self.matmat(vectors)

    def iterate(self, tolerance: float, max_products: int) -> None:
        """Conjugate gradients on the rows whose interval is too wide, by their recurrences."""
        places = torch.arange(len(self.rows), device=self.rows.device)
        state: dict[str, Any] = {"x": self.solution, "r": self.residual, "f": self.rows}
        state["p"] = self.precondition(self.residual)
        state["rz"] = _dot(self.residual, state["p"])
        while self.products < max_products:
            value = _dot(state["x"], state["f"] + state["r"])
            rest = _dot(state["r"], state["r"]) / self.floor
            wide = (_half_width(value, value + rest) > tolerance) & (state["rz"] > 0)
            if not bool(wide.all()):
                self.solution[places[~wide]] = state["x"][~wide]
                places = places[wide]
                state = {name: part[wide] for name, part in state.items()}
            if not len(places):
                return
            self._step(state)
        self.solution[places] = state["x"].clone()

    def _step(self, state: dict[str, Tensor]) -> None:
        image = self._product(state["p"])
        length = (state["rz"] / _dot(state["p"], image)).to(image.dtype)[:, None]
        state["x"] = state["x"] + length * state["p"]
        state["r"] = state["r"] - length * image
        z = self.precondition(state["r"])
        before, state["rz"] = state["rz"], _dot(state["r"], z)
        state["p"] = z + (state["rz"] / before).to(image.dtype)[:, None] * state["p"]

    def enclose(self) -> tuple[Tensor, Tensor]:
        """Return the interval from the present solution, with its true residual."""
        self.residual = self.rows - self._product(self.solution)
        image = self._product(self.residual)
        square = _dot(self.residual, self.residual)  # ‖r‖²
        value = _dot(self.solution, self.rows + self.residual)
        some = square > 0
        safe = torch.where(some, square, torch.ones_like(square))
        alpha = (_dot(self.residual, image) / safe).clamp(min=self.floor)
        beta = ((_dot(image, image) / safe) - alpha.square()).clamp(min=0)  # β²
        # Gauss: 1/α. Gauss-Radau with a node at the floor: T is [[α, β], [β, η]] with
        # η = floor + β²/(α − floor), and (T⁻¹)₁₁ = 1/(α − β²/η).
        gap = alpha - self.floor
        node = self.floor + torch.where(gap > 0, beta / gap.clamp(min=1e-300), torch.inf)
        above = alpha - torch.where(gap > 0, beta / node, gap)
        upper = torch.where(some, square / above.clamp(min=self.floor), 0.0)
        lower = torch.where(some, square / alpha, 0.0)
        eps = torch.finfo(self.rows.dtype).eps
        # A product with x is off by eps·‖A‖·‖x‖; rows, and f, change √(fᵀA⁻¹f) by eps·√(‖A‖/floor).
        margin = _OF_ROWS * eps * (self.norm / self.floor) ** 0.5 * (value + upper).abs()
        margin += _OF_PRODUCTS * eps * self.norm * _dot(self.solution, self.solution)
        margin += least_tolerance(self.rows.dtype) * (value + upper).abs()
        return (value + lower - margin).clamp(min=0), value + upper + margin
