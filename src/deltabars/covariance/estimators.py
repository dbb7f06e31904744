"""The covariance estimators: what each says of predictions, given F's projections on eigenvectors.

Nothing here is of size P: with a = Qᵀf and ‖f‖² every quadratic form follows, because

    fᵀ(Q D Qᵀ + c(I − QQᵀ))f = Σₖ dₖ aₖ² + c‖f⊥‖²        ‖f⊥‖² = ‖f‖² − ‖a‖²
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltabars.covariance.tail import Ball, Tail
from deltabars.runtime.vectors import Basis, combined, first, projected

# The matrices whose eigenpairs each estimator needs.
ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "hessian": ("hessian",),
    "opg": ("opg",),
    "sandwich": ("hessian", "opg"),
    "ggn": ("ggn",),
}

DEFAULT_ESTIMATOR = "opg"  # of every way to a fit; see docs/choosing.md for what was measured
BOUNDS = ("rigorous", "paper")


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


@dataclass(frozen=True, eq=False)
class InverseCovariance(Covariance):
    """Σ = A⁻¹/N for A one of H, G, GGN, with the tail of A closed by λ̃ (the paper's eq. for σ̃²).

    Attributes:
        name: whose eigenvectors the projections are on.
        values: the eigenvalues in use, (K,), float64.
        tail: the eigenvalues that are not.
        num_examples: N (N/σ² at noise σ).
        full_rank: whether the tail counts (c = 1/λ̃) or not (c = 0).
    """

    name: str
    values: Tensor
    tail: Tail
    num_examples: float
    full_rank: bool = True

    def spread(
        self, squares: Tensor, projections: Mapping[str, Tensor], gram: Tensor | None = None
    ) -> Spread:
        inside = projections[self.name][..., : self.tail.rank]  # (B, C, K)
        tail, values = self.tail, self.values
        floor, ceiling = tail.floor, tail.ceiling + tail.slack
        lower = 1 / (values + tail.slack + tail.defects.products)
        higher = 1 / (values - tail.defects.products).clamp(min=1e-300)
        ball = Ball.of(inside, squares, tail)
        head = ball.form(1 / values)
        outside = tail.left_over(squares, ball.form(torch.ones_like(values)))  # ‖f⊥‖²
        c = self._c
        low = ball.form(lower) + outside / ceiling
        high = ball.form(higher) + outside / floor
        surely, most_head = ball.least(lower), ball.most(higher)
        most = most_head
        if not tail.is_empty:
            surely = torch.maximum(surely, squares / ceiling + ball.least(lower - 1 / ceiling))
            most = squares / floor + ball.most(higher - 1 / floor)
        low, high = torch.minimum(low, surely), torch.maximum(high, most)
        low, high = self._loosened(low, high, most_head, outside, squares)
        covariance = None
        if gram is not None:
            rest = 0.0 if self.tail.is_empty else gram - inside @ inside.mT
            covariance = ((inside / self.values) @ inside.mT + c * rest) / self.num_examples
        return Spread(
            variance=(head + c * outside) / self.num_examples,
            low=low / self.num_examples,
            high=high / self.num_examples,
            paper_delta=self.tail.inverse_error * outside / self.num_examples,
            covariance=covariance,
        )

    def _loosened(
        self, low: Tensor, high: Tensor, head: Tensor, outside: Tensor, squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Widen the interval of fᵀA⁻¹f: the pairs are not quite those of A, nor f quite exact.

        With T = QᵀAQ, B = Q⊥ᵀAQ and the Schur complement S, whose eigenvalues are in those of A,

            fᵀA⁻¹f = aᵀT⁻¹a + gᵀS⁻¹g        g = f⊥ − BT⁻¹a        ‖BT⁻¹a‖ ≤ ν√floor·√(aᵀT⁻¹a)

        with Σ aₖ²/(θₖ + e) ≤ aᵀT⁻¹a ≤ Σ aₖ²/(θₖ − e) but for the bend, and e the rounding of
        products; and with f off by no more than s, √(fᵀA⁻¹f) is off by no more than s/√floor.
        """
        tail, defects = self.tail, self.tail.defects
        bend, floor = tail.bend, tail.floor
        moved = 0.0 if tail.is_empty else tail.coupling
        length = (outside.sqrt() + tail.rounding * squares.sqrt()) * (not tail.is_empty)
        cross = 2 * moved * length
        low = low - bend * head - cross * (head * floor).sqrt() / (tail.ceiling + tail.slack)
        if bend < 1 and defects.products < float(self.values.min()):
            longer = head / (1 - bend)  # aᵀT⁻¹a at most
            high = high + bend * longer + cross * (longer / floor).sqrt() + moved**2 * longer
        else:
            high = squares / floor
        norm = float(self.values[0]) * (1 + bend) + tail.slack + defects.products
        high = torch.minimum(high, squares / floor)
        low = torch.maximum(low.clamp(min=0), squares / (norm * (1 + moved) ** 2))
        shift = defects.shift * (squares / floor).sqrt()
        low = (1 - defects.result) * (low.sqrt() - shift).clamp(min=0)
        high = (1 + defects.result) * (high.sqrt() + shift)
        return low.square(), high.square()

    def root(self, vectors: Mapping[str, Basis], rows: Tensor) -> Tensor:
        basis = first(vectors[self.name], self.tail.rank)
        form = LowRankPlusIdentity(basis, self.values.rsqrt(), self._c**0.5)
        return form.apply(rows) / self.num_examples**0.5

    @property
    def _c(self) -> float:
        return 1.0 / self.tail.harmonic_mean if self.full_rank else 0.0
