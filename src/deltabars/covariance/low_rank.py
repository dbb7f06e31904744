"""The one matrix form behind everything: low rank plus a multiple of the identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltabars.runtime.vectors import Basis, combined, projected


@dataclass(frozen=True, eq=False)
class LowRankPlusIdentity:
    """M = Q D Qᵀ + c (I − QQᵀ), with Q's orthonormal columns given as rows (K, P).

    Functions of M are of the same form: a square root takes √D and √c, an inverse 1/D and 1/c.
    """

    vectors: Basis  # (K, P)
    values: Tensor  # D (K,)
    tail: float  # c

    def apply(self, rows: Tensor) -> Tensor:
        """Compute M f for each row f of (b, P): Q((d − c)∘Qᵀf) + c f. Cost: 4·b·K·P operations."""
        weights = (self.values - self.tail).to(rows.dtype)
        inside = projected(rows, self.vectors) * weights
        return combined(inside, self.vectors) + self.tail * rows


BOUNDS = ("rigorous", "paper")


@dataclass(frozen=True)
class Interval:
    """A value, an interval for the exact one, and how far from the value it reaches."""

    value: Tensor
    low: Tensor
    high: Tensor
    error: Tensor

    @classmethod
    def rigorous(cls, value: Tensor, low: Tensor, high: Tensor) -> Interval:
        """Set the error to the larger distance, so that value ± error contains [low, high]."""
        return cls(value, low, high, torch.maximum(high - value, value - low))

    @classmethod
    def published(cls, variance: Tensor, delta: Tensor) -> Interval:
        """Compute the paper's error of a standard deviation: ½(√(variance + δ) − √(variance − δ)).

        Its sandwich δ is not a bound and can exceed the variance; the square root of what would
        be negative is then taken as zero.
        """
        value = variance.sqrt()
        upper, lower = (
            (variance + delta).clamp(min=0).sqrt(),
            (variance - delta).clamp(min=0).sqrt(),
        )
        error = 0.5 * (upper - lower)
        return cls(value, value - error, value + error, error)


@dataclass(frozen=True)
class Spread:
    """What a covariance says of a batch of predictions, all in float64.

    Attributes:
        variance: diag(F Σ Fᵀ), (B, C).
        low, high: what the exact variance lies between, (B, C).
        paper_delta: the paper's bound on the error of the variance, (B, C).
        covariance: F Σ Fᵀ, (B, C, C), where it was asked for.
    """

    variance: Tensor
    low: Tensor
    high: Tensor
    paper_delta: Tensor
    covariance: Tensor | None

    def __post_init__(self) -> None:
        if self.covariance is not None:  # symmetric to the last bit, which products are not
            whole = (self.covariance + self.covariance.mT) / 2
            object.__setattr__(self, "covariance", whole)

    def scaled(self, factors: Tensor) -> Spread:
        """Return the spread of diag(factors)·F, for factors (B, C): all of it is quadratic in F."""
        squares, whole = factors.square(), self.covariance
        if whole is not None:
            whole = factors.unsqueeze(-1) * whole * factors.unsqueeze(-2)
        return replace(
            self,
            variance=squares * self.variance,
            low=squares * self.low,
            high=squares * self.high,
            paper_delta=squares * self.paper_delta,
            covariance=whole,
        )

    def std(self, bound: str) -> Interval:
        """Return the standard deviation of each class, with the named bound."""
        if bound == "paper":
            return Interval.published(self.variance, self.paper_delta)
        return Interval.rigorous(self.variance.sqrt(), self.low.sqrt(), self.high.sqrt())

    def score(self, bound: str) -> Interval:
        """Return √(Σ variances), one number an input, with the named bound."""
        total = self.variance.sum(-1)
        if bound == "paper":
            return Interval.published(total, self.paper_delta.sum(-1))
        low, high = self.low.sum(-1), self.high.sum(-1)
        return Interval.rigorous(total.sqrt(), low.sqrt(), high.sqrt())


class Covariance(ABC):
    """A covariance Σ of the trained parameters."""

    @abstractmethod
    def spread(
        self, squares: Tensor, projections: Mapping[str, Tensor], gram: Tensor | None = None
    ) -> Spread:
        """Compute variances, bounds and (on demand) covariances of a batch of predictions.

        Args:
            squares: ‖f‖² of each row f of F, (B, C).
            projections: F Qᵀ (B, C, K) by the name of the matrix whose eigenvectors Q are.
            gram: F Fᵀ (B, C, C), where F Σ Fᵀ is wanted whole.
        """

    @abstractmethod
    def root(self, vectors: Mapping[str, Basis], rows: Tensor) -> Tensor:
        """Apply a root of Σ to rows z (n, P): standard normal z give draws of covariance Σ."""
