"""What is certain of projections on eigenvectors that were rounded to be stored.

Of stored vectors Q̃ the norm η = ‖Q̃ − Q‖₂ is known. So Qᵀf lies in a ball of radius η‖f‖ around
Q̃ᵀf, and a quadratic form Σ wₖaₖ² of a = Qᵀf between bounds, because √w∘a is a norm for w ≥ 0:

    (‖√w∘ã‖ − √max w·r)₊² ≤ Σ wₖaₖ² ≤ (‖√w∘ã‖ + √max w·r)²
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltabars.covariance.tail import Tail


@dataclass(frozen=True)
class Ball:
    """The points a (K,) with ‖a − middle‖ ≤ radius, for each of a batch.

    Attributes:
        middle: ã, (B, C, K), float64.
        radius: r, (B, C).
        squares: ‖f‖² of what a are projections of, (B, C).
    """

    middle: Tensor
    radius: Tensor
    squares: Tensor

    @classmethod
    def of(cls, projections: Tensor, squares: Tensor, tail: Tail) -> Ball:
        """Where the projections of f on the eigenvectors as they were computed lie."""
        return cls(projections, tail.rounding * squares.sqrt(), squares)

    def most(self, weights: Tensor) -> Tensor:
        """At least the maximum of Σ wₖaₖ² in the ball, (B, C); weights may be negative."""
        up, down = self._norm(weights), self._norm(-weights)
        return (up.value + up.reach).square() - (down.value - down.reach).clamp(min=0).square()

    def least(self, weights: Tensor) -> Tensor:
        """At most the minimum of Σ wₖaₖ² in the ball, (B, C); weights may be negative."""
        return -self.most(-weights)

    @property
    def outside_least(self) -> Tensor:
        """At most ‖f‖² − ‖a‖², (B, C)."""
        return (self.squares - self.most(torch.ones_like(self.middle[0, 0]))).clamp(min=0)

    @property
    def outside_most(self) -> Tensor:
        """At least ‖f‖² − ‖a‖², (B, C)."""
        return (self.squares - self.least(torch.ones_like(self.middle[0, 0]))).clamp(min=0)

    def _norm(self, weights: Tensor) -> _Norm:
        """‖√w∘ã‖ over the positive weights, and how much that can differ in the ball."""
        positive = weights.clamp(min=0)
        value = (self.middle.square() @ positive).sqrt()
        return _Norm(value, positive.max().sqrt() * self.radius)


@dataclass(frozen=True)
class _Norm:
    value: Tensor
    reach: Tensor
