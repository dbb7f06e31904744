"""The sampling spread B⁻¹G₀B⁻¹/N: how far retraining on N other examples would move a prediction.

B is the bread, H, G or GGN with its λ, whose eigenpairs are known; G₀ = (1/N) Σ gₙgₙᵀ, without λ,
is the meat. With u = B⁻¹f, N·variance = uᵀG₀u = (1/N) Σₙ (gₙᵀu)², the sum of the squared influences
of the examples on the prediction (the infinitesimal jackknife).

In the coordinates of the bread's eigenvectors u = Q h + u⊥ with h = Λ⁻¹Qᵀf, and QᵀG₀Q is known, so
that hᵀ(QᵀG₀Q)h is exact. Beyond Q, G₀⊥ is bounded by the bread's own data part A and a multiple of
the identity, G₀⊥ ≤ t·A⊥ + s(t)·I, for several t: gₙgₙᵀ ≤ χₙ·JₙᵀSₙJₙ for every example,
so that t takes all examples with χₙ ≤ t, and s(t) the squared length of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.base import Ball, Covariance, LowRankPlusIdentity, Spread, Tail
from deltabars.runtime.vectors import Basis, combined, first, projected

# Names of what a fit measures of a matrix, in its diagnostics: the trace of A; those of A and A²
# outside the eigenvectors; ωᵀAω and ‖Aω‖² of the weights there.
TRACE, TAIL_TRACE, TAIL_SQUARE = "data_trace", "tail_trace", "tail_square"
TAIL_PULL, TAIL_PULL_SQUARE = "tail_pull", "tail_pull_square"


@dataclass(frozen=True, eq=False)
class Meat:
    """G₀ beside the K eigenvectors Q of a bread, whose data part is A; all in float64.

    Attributes:
        within: QᵀG₀Q, (K, K).
        slopes: the numbers t, (m,).
        beyond: s(t) of G₀ outside Q, (m,).
        whole: s(t) of all of G₀, (m,).
        curvature: the mean eigenvalue of A outside Q, as the rows of Jacobians weigh it.
        level: the mean of G₀ there, likewise.
        is_own: whether G₀ is A itself, so that nothing of G₀ couples Q to what is outside.
    """

    within: Tensor
    slopes: Tensor
    beyond: Tensor
    whole: Tensor
    curvature: float
    level: float
    is_own: bool = False

    @classmethod
    def of_itself(cls, data_values: Tensor, curvature: float) -> Meat:
        """Return G₀ beside its own eigenvectors: diagonal, with no more than A outside."""
        one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        own = data_values.double().clamp(min=0).diag()
        return cls(own, one, none, none, curvature, curvature, is_own=True)

    @property
    def norm(self) -> float:
        """At least ‖G₀‖: its trace."""
        return float(self.within.diagonal().sum() + self.beyond.max())

    def first(self, count: int, data_values: Tensor, trace: float) -> Meat:
        """Return the meat beside the first eigenvectors; those left out join what is outside.

        Args:
            count: how many to keep.
            data_values: all K eigenvalues of A.
            trace: of A outside all K.
        """
        if count >= len(self.within):
            return self
        left, own = data_values[count:].double().clamp(min=0), self.within.diagonal()[count:]
        total = max(trace, 0.0) + float(left.sum())
        share = 1.0 / max(total, 1e-300)
        return replace(
            self,
            within=self.within[:count, :count],
            beyond=self.beyond if self.is_own else self.beyond + float(own.sum()),
            curvature=share * (max(trace, 0.0) * self.curvature + float((left * left).sum())),
            level=share * (max(trace, 0.0) * self.level + float((left * own).sum())),
        )

    def scaled(self, factor: float) -> Meat:
        """Return factor·G₀ beside the same bread."""
        names = ("within", "slopes", "beyond", "whole", "level")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def to(self, device: torch.device) -> Meat:
        """Move the numbers to a device."""
        names = ("within", "slopes", "beyond", "whole")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True, eq=False)
class SamplingCovariance(Covariance):
    """Σ = B⁻¹G₀B⁻¹/N."""

    name: str  # whose eigenvectors the projections are on
    values: Tensor  # the eigenvalues of B in use, (K,), float64
    tail: Tail  # those that are not
    meat: Meat
    num_examples: float
    full_rank: bool = True  # whether the tail counts or not

    def spread(
        self, squares: Tensor, projections: Mapping[str, Tensor], gram: Tensor | None = None
    ) -> Spread:
        inside = projections[self.name][..., : self.tail.rank]  # (B, C, K)
        ball = Ball.of(inside, squares, self.tail)
        head = inside / self.values  # Λ⁻¹Qᵀf
        within = ((head @ self.meat.within) * head).sum(-1).clamp(min=0)
        outside = self.tail.left_over(squares, inside.square().sum(-1))  # ‖f⊥‖²
        low, high = self._interval(ball, head, within, outside)
        covariance = None
        if gram is not None:
            rest = 0.0 if self.tail.is_empty else gram - inside @ inside.mT
            covariance = head @ self.meat.within @ head.mT + self._closing * rest
            covariance = covariance / self.num_examples
        value = (within + self._closing * outside) / self.num_examples
        return Spread(
            variance=value,
            low=torch.minimum(low / self.num_examples, value),
            high=torch.maximum(high / self.num_examples, value),
            paper_delta=torch.zeros_like(value),
            covariance=covariance,
            beyond=self._closing * outside / self.num_examples,
        )

    def root(self, vectors: Mapping[str, Basis], rows: Tensor) -> Tensor:
        basis = first(vectors[self.name], self.tail.rank)
        values, turned = torch.linalg.eigh(self.meat.within)
        middle = (turned * values.clamp(min=0).sqrt()) @ turned.T / self.values[:, None]
        # Λ⁻¹(QᵀG₀Q)^½ within Q, which is no diagonal; a multiple of the identity outside.
        inner = projected(rows, basis) @ middle.T.to(rows.dtype)
        outer = LowRankPlusIdentity(basis, torch.zeros_like(self.values), self._closing**0.5)
        return (combined(inner, basis) + outer.apply(rows)) / self.num_examples**0.5

    @property
    def _closing(self) -> float:
        """What stands in for B⁻¹G₀B⁻¹ outside Q: the meat there, at the mean curvature there."""
        if not self.full_rank or self.tail.is_empty:
            return 0.0
        curved = min(max(self.meat.curvature, 0.0), self.tail.ceiling - self.tail.l2)
        return min(max(self.meat.level, 0.0) / (self.tail.l2 + curved) ** 2, self._most_outside)

    @cached_property
    def _most_outside(self) -> float:
        """The most that uᵀG₀u is for u = B⊥⁻¹f⊥ and ‖f⊥‖ = 1."""
        tail, meat = self.tail, self.meat
        l2, last = tail.l2, max(tail.ceiling + tail.slack - tail.l2, 0.0)
        steepest = 0.25 / l2 if last >= l2 else last / (last + l2) ** 2  # of μ/(μ + λ)²
        return float((meat.slopes * steepest + meat.beyond / tail.floor**2).min())

    @property
    def reach(self) -> float:
        """At least ‖B⁻¹r‖ in the norm of G₀ for ‖r‖ = 1."""
        if self.meat.is_own:
            return 0.5 / self.tail.floor**0.5  # the most of √μ/(μ + λ)
        return (self._norm / self.tail.floor) ** 0.5

    @cached_property
    def _norm(self) -> float:
        """κ with G₀ ≤ κ·B."""
        return float((self.meat.slopes + self.meat.whole / self.tail.floor).min())

    @cached_property
    def _steepest_inside(self) -> float:
        """The most that √(hᵀ(QᵀG₀Q)h) is for h = Λ⁻¹Qᵀf and ‖Qᵀf‖ = 1."""
        scaled = self.meat.within / self.values / self.values[:, None]
        return max(float(torch.linalg.eigvalsh(scaled)[-1]), 0.0) ** 0.5

    def _interval(
        self, ball: Ball, head: Tensor, within: Tensor, outside: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what N·variance lies between, (B, C).

        ‖u‖ in the norm of G₀ is between ‖Q h‖ − ρ and ‖Q h‖ + ρ with ρ² = `_most_outside`·‖f⊥‖²; of
        G's own eigenvectors the squares add up. That is for exact pairs and projections. Rounding
        moves h by no more than the radius of the ball over λ; pairs that are off by a relative η
        (`Tail.bend`, `Tail.coupling`) move u by no more than η/√(1 − η)·√(fᵀB⁻¹f) in the norm of B,
        and G₀ ≤ κB.
        """
        tail, meat, values = self.tail, self.meat, self.values
        floor, defects = tail.floor, tail.defects
        exact = 0.0 if tail.is_empty else 1.0
        middle = within.sqrt()
        moved = self._steepest_inside * ball.radius  # by the rounding of projections
        beyond = exact * self._most_outside * ball.outside_most
        if meat.is_own:
            low = (middle - moved).clamp(min=0).square()
            high = (middle + moved).square() + beyond
        else:
            reach = beyond.sqrt()
            low = (middle - moved - reach).clamp(min=0).square()
            high = (middle + moved + reach).square()
        off = exact * tail.coupling + tail.bend + tail.slack / floor
        off += defects.products / float(values.min())
        bread = (ball.middle * head).sum(-1).clamp(min=0) + outside / floor  # fᵀB⁻¹f at most
        limit = self._norm * ball.squares / floor
        if off >= 1:
            return torch.zeros_like(low), torch.maximum(limit, high)
        bread = (bread.sqrt() + ball.radius / floor**0.5).square() / (1 - off)
        if meat.is_own:
            low, high = (low - off * bread).clamp(min=0), high + off * bread
        # Rows of F and of G₀ are off by as many units in the last place.
        length = head.norm(dim=-1) + outside.sqrt() / floor
        longest = meat.norm**0.5
        shift = off / (1 - off) ** 0.5 * (self._norm * bread).sqrt()
        shift = shift + defects.shift * (longest * length + limit.sqrt())
        low = (1 - defects.result) * (low.sqrt() - shift).clamp(min=0)
        high = (1 + defects.result) * (high.sqrt() + shift)
        return low.square(), high.square()


def mean_curvature(values: Tensor, level: float, known: Mapping[str, Any]) -> tuple[float, float]:
    """Return the trace of the data part outside the eigenvectors, and its mean eigenvalue there.

    The mean is weighted by the eigenvalues themselves, Σμ²/Σμ, as rows of Jacobians are.
    """
    data = (values - level).clamp(min=0)
    last, rest = float(data[-1]), known.get(TAIL_TRACE)
    if rest is None:
        rest = known[TRACE] - float(data.sum()) if known.get(TRACE) is not None else 0.0
    rest = max(float(rest), 0.0)
    mean = float(known.get(TAIL_SQUARE, 0.0)) / rest if rest > 0 else 0.0
    return rest, min(max(mean, 0.0), last)
