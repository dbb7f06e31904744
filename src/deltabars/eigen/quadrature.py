"""Quadratic forms fᵀA⁻¹f between rigorous bounds, whatever the solver did.

For any x, with r = f − Ax,

    fᵀA⁻¹f = fᵀx + xᵀr + rᵀA⁻¹r

because A⁻¹f = x + A⁻¹r and f = Ax + r. Conjugate gradients make r small; the last term is enclosed
by Gauss (low) and Gauss-Radau (high) quadrature of one Lanczos step from r itself. Both hold for
every A whose eigenvalues are not below `floor` (Golub and Meurant, Matrices, Moments and
Quadrature), so neither the preconditioner nor the recurrences have to be exact: r is computed anew.

For a meat G₀ between two such inverses, with u = A⁻¹f = x + A⁻¹r, √(uᵀG₀u) is a norm of u, so that
it lies within κ‖r‖ of √(xᵀG₀x), for any κ with ‖A⁻¹r‖ ≤ κ‖r‖ in that norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_RESERVE = 0.5  # of the tolerance: the recurrence's residual is not quite the true one
_ROUNDS = 4  # of iterating and computing the residual anew
_OF_ROWS, _OF_PRODUCTS = 64, 4  # units in the last place
_ROUNDING = 512  # units in the last place that a value may be off by its sums alone


@dataclass(frozen=True)
class Enclosure:
    """fᵀA⁻¹f of each row f lies in [low, high], (m,), float64."""

    low: Tensor
    high: Tensor
    products: int  # with A, of all rows at once
    is_close: Tensor  # whether each interval is as narrow as it was asked to be, (m,)


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

    Cost: a product a step, all rows at once; with the K largest eigenvalues in the preconditioner
    about √(λ_K/λ)·log(1/tolerance) steps. Memory: five times that of the rows.
    """
    run = _Run(matmat, rows, floor, precondition, norm)
    for _ in range(_ROUNDS):
        run.iterate(_RESERVE * tolerance, max_products - 1)
        low, high = run.enclose()
        close = _half_width(low, high) <= tolerance
        if bool(close.all()) or run.products >= max_products:
            break
    return Enclosure(low, high, run.products, close)


def enclose_sandwich_forms(
    matmat: Callable[[Tensor], Tensor],
    meat_matmat: Callable[[Tensor], Tensor],
    rows: Tensor,
    floor: float,
    reach: float,
    precondition: Callable[[Tensor], Tensor],
    tolerance: float,
    max_products: int,
    norm: float = 0.0,
) -> Enclosure:
    """Enclose fᵀA⁻¹G₀A⁻¹f for each row f of (m, P), by preconditioned conjugate gradients.

    The other arguments are those of `enclose_inverse_forms`.

    Args:
        meat_matmat: products (b, P) -> (b, P) with G₀, whose norm is no more than `norm`.
        reach: κ, at least ‖A⁻¹r‖ in the norm of G₀ for ‖r‖ = 1.

    Cost: as of `enclose_inverse_forms`, and a product with G₀ a round (four at most).
    """
    run = _Run(matmat, rows, floor, precondition, norm)
    eps = torch.finfo(rows.dtype).eps
    least = _OF_ROWS * eps * _dot(rows, rows).sqrt()  # a residual that is rounding
    for _ in range(_ROUNDS):
        x = run.solution
        value = _dot(x, meat_matmat(x)).clamp(min=0)
        run.enough = (_RESERVE * tolerance * value.sqrt() / reach).maximum(least)
        run.iterate(_RESERVE * tolerance, max_products - 1)
        x, r = run.solution, run.residual_anew()
        value, square = _dot(x, meat_matmat(x)).clamp(min=0), _dot(x, x)
        margin = _OF_ROWS * eps * (norm / floor) ** 0.5 * value + _OF_PRODUCTS * eps * norm * square
        margin += least_tolerance(x.dtype) * value
        off = reach * (_dot(r, r).sqrt() + _OF_PRODUCTS * eps * norm * square.sqrt())
        low = ((value - margin).clamp(min=0).sqrt() - off).clamp(min=0).square()
        high = ((value + margin).sqrt() + off).square()
        is_zero = (value <= margin) & (off <= margin.sqrt())  # but for rounding
        close = (_half_width(low, high) <= tolerance) | is_zero
        if bool(close.all()) or run.products >= max_products:
            break
    return Enclosure(low, high, run.products, close)


def _half_width(low: Tensor, high: Tensor) -> Tensor:
    """Of [√low, √high], relative to the middle; zero for a row of zeros."""
    lower, upper = low.clamp(min=0).sqrt(), high.clamp(min=0).sqrt()
    total = lower + upper
    return torch.where(total > 0, (upper - lower) / total, 0.0)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(-1, dtype=torch.float64)


@dataclass
class _Run:
    """Solutions x of Ax = f, and their residuals r."""

    matmat: Callable[[Tensor], Tensor]
    rows: Tensor
    floor: float
    precondition: Callable[[Tensor], Tensor]
    norm: float
    products: int = 0
    enough: Tensor | None = None  # the norm of a residual to stop at, (m,); or by the interval

    def __post_init__(self) -> None:
        self.solution = self.precondition(self.rows).clone()
        self._residual = self.rows - self._product(self.solution)

    def residual_anew(self) -> Tensor:
        """Compute the true residual of the present solution. Cost: a product."""
        self._residual = self.rows - self._product(self.solution)
        return self._residual

    def _product(self, vectors: Tensor) -> Tensor:
        self.products += 1
        return self.matmat(vectors)

    def iterate(self, tolerance: float, max_products: int) -> None:
        """Conjugate gradients on the rows whose interval is too wide, by their recurrences."""
        indices = torch.arange(len(self.rows), device=self.rows.device)
        x, r, f = self.solution, self._residual, self.rows
        enough = self.enough
        p = self.precondition(r)
        rz = _dot(r, p)
        while self.products < max_products:
            value, square = _dot(x, f + r), _dot(r, r)
            if enough is None:
                wide = _half_width(value, value + square / self.floor) > tolerance
            else:
                wide = square.sqrt() > enough[indices]
            wide &= rz > 0
            if not bool(wide.all()):
                self.solution[indices[~wide]] = x[~wide]
                indices, x, r, f, p, rz = (part[wide] for part in (indices, x, r, f, p, rz))
            if not len(indices):
                return
            image = self._product(p)
            length = (rz / _dot(p, image)).to(image.dtype)[:, None]
            x, r = x + length * p, r - length * image
            z = self.precondition(r)
            before, rz = rz, _dot(r, z)
            p = z + (rz / before).to(image.dtype)[:, None] * p
        self.solution[indices] = x.clone()

    def enclose(self) -> tuple[Tensor, Tensor]:
        """Return the interval from the present solution, with its true residual."""
        x, floor, norm = self.solution, self.floor, self.norm
        r = self.residual_anew()
        image = self._product(r)
        square, value = _dot(r, r), _dot(x, self.rows + r)
        some = square > 0
        safe = torch.where(some, square, 1.0)
        alpha = (_dot(r, image) / safe).clamp(min=floor)
        beta = ((_dot(image, image) / safe) - alpha.square()).clamp(min=0)  # β²
        # Gauss: 1/α. Gauss-Radau with a node at the floor: T is [[α, β], [β, η]] with
        # η = floor + β²/(α − floor), and (T⁻¹)₁₁ = 1/(α − β²/η).
        gap = alpha - floor
        node = floor + torch.where(gap > 0, beta / gap.clamp(min=1e-300), torch.inf)
        above = alpha - torch.where(gap > 0, beta / node, gap)
        upper = torch.where(some, square / above.clamp(min=floor), 0.0)
        lower = torch.where(some, square / alpha, 0.0)
        eps = torch.finfo(x.dtype).eps
        # A product with x is off by eps·‖A‖·‖x‖; rows, and f, change √(fᵀA⁻¹f) by eps·√(‖A‖/floor).
        margin = _OF_ROWS * eps * (norm / floor) ** 0.5 * (value + upper).abs()
        margin += _OF_PRODUCTS * eps * norm * _dot(x, x)
        margin += least_tolerance(x.dtype) * (value + upper).abs()
        return (value + lower - margin).clamp(min=0), value + upper + margin
