"""What all covariances share: a matrix form, intervals, and what is not known of a matrix.

Not known are the eigenvalues that were not computed, and what was rounded. Of stored vectors Q̃ the
norm η = ‖Q̃ − Q‖₂ is known. So Qᵀf lies in a ball of radius η‖f‖ around Q̃ᵀf, and a quadratic form
Σ wₖaₖ² of a = Qᵀf between bounds, because √w∘a is a norm for w ≥ 0:

    (‖√w∘ã‖ − √max w·r)₊² ≤ Σ wₖaₖ² ≤ (‖√w∘ã‖ + √max w·r)²
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deltabars.errors import BadValueError, option
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
        value, upper = variance.sqrt(), (variance + delta).clamp(min=0).sqrt()
        error = 0.5 * (upper - (variance - delta).clamp(min=0).sqrt())
        return cls(value, value - error, value + error, error)


@dataclass(frozen=True)
class Spread:
    """What a covariance says of a batch of predictions, all in float64."""

    variance: Tensor  # diag(F Σ Fᵀ), (B, C)
    low: Tensor  # what the exact variance lies between, (B, C)
    high: Tensor
    paper_delta: Tensor  # the paper's bound on the error of the variance, (B, C)
    covariance: Tensor | None  # F Σ Fᵀ, (B, C, C), where it was asked for
    beyond: Tensor | None = None  # the part of the variance outside the eigenvectors, (B, C)

    def __post_init__(self) -> None:
        if self.covariance is not None:  # symmetric to the last bit, which products are not
            whole = (self.covariance + self.covariance.mT) / 2
            object.__setattr__(self, "covariance", whole)

    def scaled(self, factors: Tensor) -> Spread:
        """Return the spread of diag(factors)·F, for factors (B, C): all of it is quadratic in F."""
        squares, whole = factors.square(), self.covariance
        if whole is not None:
            whole = factors.unsqueeze(-1) * whole * factors.unsqueeze(-2)
        low, high, delta = squares * self.low, squares * self.high, squares * self.paper_delta
        beyond = None if self.beyond is None else squares * self.beyond
        return Spread(squares * self.variance, low, high, delta, whole, beyond)

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


@dataclass(frozen=True, eq=False)
class Ball:
    """The points a (K,) with ‖a − middle‖ ≤ radius, for each of a batch."""

    middle: Tensor  # ã, (B, C, K), float64
    radius: Tensor  # r, (B, C)
    squares: Tensor  # ‖f‖² of what a are projections of, (B, C)

    @classmethod
    def of(cls, projections: Tensor, squares: Tensor, tail: Tail) -> Ball:
        """Return where the projections of f on the eigenvectors as they were computed lie."""
        return cls(projections, tail.rounding * squares.sqrt(), squares)

    @cached_property
    def _squared(self) -> Tensor:
        return self.middle.square()

    def form(self, weights: Tensor) -> Tensor:
        """Return Σ wₖaₖ² in the middle, (B, C)."""
        return self._squared @ weights

    def most(self, weights: Tensor) -> Tensor:
        """Return at least the maximum of Σ wₖaₖ² in the ball, (B, C); weights may be negative."""
        (up, reach), (down, other) = self._norm(weights), self._norm(-weights)
        return (up + reach).square() - (down - other).clamp(min=0).square()

    def least(self, weights: Tensor) -> Tensor:
        """Return at most the minimum of Σ wₖaₖ² in the ball, (B, C); weights may be negative."""
        return -self.most(-weights)

    @property
    def outside_most(self) -> Tensor:
        """At least ‖f‖² − ‖a‖², (B, C)."""
        return (self.squares - self.least(torch.ones_like(self.middle[0, 0]))).clamp(min=0)

    def _norm(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return ‖√w∘ã‖ over the positive weights, and how much that can differ in the ball."""
        positive = weights.clamp(min=0)
        return self.form(positive).sqrt(), positive.max().sqrt() * self.radius


@dataclass(frozen=True, eq=False)
class Defects:
    """How far computed eigenpairs (θₖ, q̂ₖ) can be from exact ones, and F from its exact rows.

    The incremental SVD drops a positive semidefinite part of norm up to `slack`: A lies between the
    matrix of the pairs and that plus slack·I, and so do the inverses, the other way round.
    """

    slack: float = 0.0  # how much too low the eigenvalues, those in use too, can be
    rounding: float = 0.0  # of stored vectors and of projections: Qᵀf is known to rounding·‖f‖
    skew: float = 0.0  # ‖Q̂Q̂ᵀ − I‖₂ of the vectors as they were computed
    residuals: Tensor | None = None  # ‖Aqₖ − θₖqₖ‖ as the solver knows them, (K,)
    products: float = 0.0  # e, that rounding in products with A may add to each of these
    rows: float = 0.0  # η: how far rows that A is made of are off, relative to √λ₁
    result: float = 0.0  # a relative error of every standard deviation
    shift: float = 0.0  # how far each row f is off, relative to ‖f‖
    missed: float = 0.0  # how far above the last pair an eigenvalue can be that was not found


EXACT = Defects()


@dataclass(frozen=True)
class Tail:
    """The P − K eigenvalues outside Q, which lie between λ (`l2`) and the last one, λ_K.

    That is a theorem for G and GGN. For a Hessian it is an assumption: eigenvalues below λ,
    negative ones too, are replaced on purpose. Where the least eigenvalue is known to be below λ
    and still positive, `floor` tells it, for bounds on what the exact matrix gives.

    Attributes:
        coupling: ν, at least ‖BΘ^{-½}‖₂/√floor with B = Q⊥ᵀAQ, which is zero for exact pairs.
        bend: at least ‖Θ^{-½}(QᵀAQ − Θ − E)Θ^{-½}‖₂ for an E of no more than the rounding of
            products, likewise.
        drift: how far above the last one an eigenvalue of the tail can be, likewise.
    """

    rank: int  # K: how many computed pairs are used
    l2: float  # λ
    last: float  # λ_K
    is_empty: bool  # whether K = P, so that nothing is left out
    floor: float  # the least that the eigenvalues of the tail are taken to be
    defects: Defects = EXACT
    coupling: float = 0.0
    bend: float = 0.0
    drift: float = 0.0

    @classmethod
    def after(
        cls,
        values: Tensor,
        rank: int,
        l2: float,
        size: int,
        least: float | None = None,
        defects: Defects = EXACT,
    ) -> Tail:
        """Describe the tail behind the first `rank` of the descending `values`.

        Values that are not positive have no place in a covariance; they are left to the tail. The
        least eigenvalue of the matrix, where it is known, lowers the floor if it is from 0 to λ.
        """
        rank = min(rank, int((values > 0).sum()))
        if rank == 0:
            raise BadValueError(
                "Spectrum: expected at least one positive eigenvalue, got none. The weights are "
                "not near a minimum of the cost; train longer or use "
                f"{option('estimator', 'opg')} or 'ggn'."
            )
        last = float(values[rank - 1])
        floor = min(l2, last)
        if least is not None and 0 < least < floor:
            floor = least
        used, steps = values[:rank].double(), defects.residuals
        known = torch.zeros_like(used) if steps is None else steps[:rank].double()
        lowest = float(used.min())
        rows = 2 * defects.rows * (float(used[0]) / floor) ** 0.5
        coupling = float((known.square() / used).sum() / floor) ** 0.5 + rows
        coupling += defects.products / (lowest * floor) ** 0.5
        bend = (2 * defects.rows + defects.skew) * (float(used[0]) / lowest) ** 0.5
        drift = max(defects.products + float(known[-1]), defects.missed)
        return cls(rank, l2, last, rank == size, floor, defects, coupling, bend, drift)

    @property
    def slack(self) -> float:
        """How much too low the eigenvalues can be (see `Defects`)."""
        return self.defects.slack

    @property
    def rounding(self) -> float:
        """How far projections are off, relative to ‖f‖ (see `Defects`)."""
        return self.defects.rounding

    @property
    def ceiling(self) -> float:
        """The most that an eigenvalue of the tail can be."""
        return max(self.l2, self.last) + self.drift

    @property
    def harmonic_mean(self) -> float:
        """λ̃ = 2/(1/λ + 1/λ_K): what stands in for the tail."""
        return 2.0 / (1.0 / self.l2 + 1.0 / self.last)

    @property
    def inverse_error(self) -> float:
        """ε = ½·|1/λ − 1/λ_K|: how far 1/λ̃ is from either of 1/λ and 1/λ_K."""
        return 0.5 * abs(1.0 / self.l2 - 1.0 / self.last)

    @property
    def inverse_reach(self) -> float:
        """How far 1/λ̃ can be from the reciprocal of anything between the floor and the ceiling."""
        middle = 1.0 / self.harmonic_mean
        return max(1.0 / self.floor - middle, middle - 1.0 / self.ceiling)

    def left_over(self, squares: Tensor, inside: Tensor) -> Tensor:
        """‖f⊥‖² from ‖f‖² and ‖Qᵀf‖²; zero where the tail is empty."""
        if self.is_empty:
            return torch.zeros_like(squares)
        return (squares - inside).clamp(min=0.0)  # below zero it is rounding
