"""The sandwich H⁻¹GH⁻¹/N, given F's projections on the eigenvectors of both matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deltabars.covariance.base import Ball, Covariance, LowRankPlusIdentity, Spread, Tail
from deltabars.runtime.vectors import Basis, first


@dataclass(frozen=True, eq=False)
class SandwichCovariance(Covariance):
    """Σ = H⁻¹ G H⁻¹/N, with the tails of H and of G closed by their λ̃."""

    hessian_values: Tensor  # the eigenvalues in use, (K_H,) and (K_G,), float64
    opg_values: Tensor
    hessian_tail: Tail  # those that are not
    opg_tail: Tail
    overlap: Tensor  # M = Q_Hᵀ Q_G, (K_H, K_G), float64; of the vectors before any rounding
    num_examples: float  # N (N/σ² at noise σ)
    full_rank: bool = True  # whether the tails count or not

    @cached_property
    def largest_outside(self) -> float:
        """γ = λ_K^G + λ_max(W(I − MᵀM)W), W = diag(λᴳ − λ_K^G)^½.

        No direction orthogonal to Q_H has more G-curvature: with Π = I − Q_H Q_Hᵀ,
        ΠGΠ ≤ λ_K^G·I + ΠQ_G W² Q_GᵀΠ, and the last term has the eigenvalues of
        W Q_GᵀΠQ_G W = W(I − MᵀM)W.
        """
        weights = (self.opg_values - self.opg_tail.last).clamp(min=0).sqrt()
        eye = torch.eye(weights.shape[0], dtype=weights.dtype, device=weights.device)
        inner = weights[:, None] * (eye - self.overlap.T @ self.overlap) * weights
        most = max(0.0, float(torch.linalg.eigvalsh(inner)[-1]))
        return self.opg_tail.last + most + self.opg_tail.slack

    @property
    def interval_reach(self) -> float:
        """How far the interval reaches from the std of a prediction that lies outside Q_H and Q_G.

        For f orthogonal to both, N·variance is c_G·c_H²‖f‖², and √γ·ρ what the interval adds to the
        root, with ρ = reach·‖f‖: √(γ/c_G)·reach/c_H of the std. Well below 1 it is worth reading.
        """
        spread = (self.largest_outside / self.opg_tail.harmonic_mean) ** 0.5
        empty = self.hessian_tail.is_empty
        reach = self.hessian_tail.inverse_reach * self.hessian_tail.harmonic_mean
        return 0.0 if empty else spread * reach

    @cached_property
    def largest_within(self) -> float:
        """The most that xᵀΘ^{-½}Q_HᵀG Q_H Θ^{-½}x is for ‖x‖ = 1, of the pairs of H."""
        level = self.opg_tail.ceiling + self.opg_tail.slack
        values = (self.opg_values + self.opg_tail.slack - level).clamp(min=0).sqrt()
        scaled = (self.overlap * values) / self.hessian_values.sqrt()[:, None]
        whole = scaled @ scaled.T + torch.diag(level / self.hessian_values)
        return float(torch.linalg.eigvalsh(whole)[-1])

    def spread(
        self, squares: Tensor, projections: Mapping[str, Tensor], gram: Tensor | None = None
    ) -> Spread:
        a = projections["hessian"][..., : self.hessian_tail.rank]  # Q_Hᵀf
        b = projections["opg"][..., : self.opg_tail.rank]  # Q_Gᵀf
        head = a / self.hessian_values  # Λ_H⁻¹ a: u = H̃⁻¹f = Q_H head + c_H f⊥
        outside = self.hessian_tail.left_over(squares, a.square().sum(-1))  # ‖f⊥‖²
        head_g = head @ self.overlap  # Q_Gᵀ Q_H head
        outside_g = (b - a @ self.overlap) * (not self.hessian_tail.is_empty)  # Q_Gᵀ f⊥
        parts = _Parts(head, head_g, outside, outside_g)

        full_c, (c_h, c_g) = 1.0 / self.hessian_tail.harmonic_mean, self._closing
        covariance = None
        if gram is not None:
            rest = 0.0 if self.hessian_tail.is_empty else gram - a @ a.mT
            in_g = head_g + c_h * outside_g
            whole = head @ head.mT + c_h**2 * rest  # U Uᵀ
            left = 0.0 if self.opg_tail.is_empty else whole - in_g @ in_g.mT
            covariance = ((in_g * self.opg_values) @ in_g.mT + c_g * left) / self.num_examples

        low, high = self._interval(parts, Ball.of(a, squares, self.hessian_tail), full_c)
        low, high = self._loosened(low, high, parts, (a * head).sum(-1), squares)
        return Spread(
            variance=self._g_square(parts, c_h, c_g) / self.num_examples,
            low=low / self.num_examples,
            high=high / self.num_examples,
            paper_delta=self._paper_delta(parts) / self.num_examples,
            covariance=covariance,
        )

    def root(self, vectors: Mapping[str, Basis], rows: Tensor) -> Tensor:
        q_h = first(vectors["hessian"], self.hessian_tail.rank)
        q_g = first(vectors["opg"], self.opg_tail.rank)
        c_h, c_g = self._closing
        middle = LowRankPlusIdentity(q_g, self.opg_values.sqrt(), c_g**0.5)
        outer = LowRankPlusIdentity(q_h, self.hessian_values.reciprocal(), c_h)
        return outer.apply(middle.apply(rows)) / self.num_examples**0.5

    @property
    def _closing(self) -> tuple[float, float]:
        """What stands in for the tails: c_H = 1/λ̃_H and c_G = λ̃_G."""
        whole = 1.0 / self.hessian_tail.harmonic_mean, self.opg_tail.harmonic_mean
        return whole if self.full_rank else (0.0, 0.0)

    def _interval(self, parts: _Parts, ball: Ball, c_h: float) -> tuple[Tensor, Tensor]:
        """Return what N·variance lies between, (B, C).

        N·variance is ‖u + e‖² in the norm of G, where u = H̃⁻¹f, and e, what H̃⁻¹f lacks of H⁻¹f,
        is orthogonal to Q_H and no longer than ρ = reach·‖f⊥‖. With Π = I − Q_H Q_Hᵀ,

            ‖u + e‖² = ‖u‖² + 2eᵀΠGu + eᵀGe        λ‖e‖² ≤ eᵀGe ≤ γ‖e‖²

        so that it is at most ‖u‖² + 2ρ‖ΠGu‖ + γρ², with the tail of G as high as it can be, and at
        least the minimum of ‖u‖² − 2t‖ΠGu‖ + λt² over t ≤ ρ, with that tail as low as it can be.
        (‖ΠGu‖ ≤ √γ‖u‖: the first is never above what the triangle inequality gives. The second can
        be below (‖u‖ − √γρ)², which holds as well.)

        That is for any Q_Hᵀf and Q_Gᵀf as far from the given ones as the rounding of stored vectors
        can be: s = Q_Gᵀu = Mᵀ(Λ_H⁻¹ − c_H)a + c_H b is within max|1/λᴴ − c_H|·r_H + c_H·r_G, and
        all that the interval is made of is quadratic in a and in s. Gu = Q_G(λᴳ − c_G)∘s + c_G u,
        Q_Hᵀu = Λ_H⁻¹a.
        """
        tail, inverse = self.opg_tail, 1 / self.hessian_values
        c_h = 0.0 if self.hessian_tail.is_empty else c_h
        reach = (inverse - c_h).abs().max() * ball.radius
        reach = reach + c_h * tail.rounding * ball.squares.sqrt()
        s = Ball(parts.head_g + c_h * parts.outside_g, reach, ball.squares)
        bent = inverse.square() - c_h**2
        lengths = [  # the least and the most that ‖u‖² can be
            (c_h**2 * ball.squares + part).clamp(min=0)
            for part in (ball.least(bent), ball.most(bent))
        ]
        outside = 0.0 if self.hessian_tail.is_empty else ball.outside_most.sqrt()
        radius = self.hessian_tail.inverse_reach * outside
        off = inverse.max() * ball.radius  # of Λ_H⁻¹a

        def pull(c_g: float) -> Tensor:
            values = self.opg_values
            whole = s.most(values.square() - c_g**2) + c_g**2 * lengths[1]
            inside = ((values - c_g) * s.middle) @ self.overlap.T + c_g * parts.head
            known = inside.norm(dim=-1) - (values - c_g).abs().max() * reach - c_g * off
            return (whole - known.clamp(min=0).square()).clamp(min=0).sqrt()

        most = self.largest_outside
        upper = s.most(self.opg_values - tail.ceiling) + tail.ceiling * lengths[1]
        upper = upper.clamp(min=0) + tail.slack * lengths[1]
        pulled = pull(tail.ceiling) + tail.slack * lengths[1].sqrt()
        high = upper + 2 * radius * pulled + most * radius**2
        high = torch.minimum(high, (upper.sqrt() + most**0.5 * radius).square())
        lower = s.least(self.opg_values - tail.floor) + tail.floor * lengths[0]
        lower, pulled = lower.clamp(min=0), pull(tail.floor)
        step = (pulled / tail.floor).minimum(torch.as_tensor(radius).to(pulled))
        low = lower - 2 * step * pulled + tail.floor * step.square()
        triangle = (lower.sqrt() - most**0.5 * radius).clamp(min=0).square()
        return torch.maximum(low.clamp(min=0), triangle), high

    def _loosened(
        self, low: Tensor, high: Tensor, parts: _Parts, head: Tensor, squares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Widen the interval: the pairs are not quite those of H and G, nor f quite exact.

        The notation is that of `InverseCovariance`. What u = H⁻¹f lacks of what the pairs of H say
        is, within Q_H, Q_H Θ^{-½}x with ‖x‖ ≤ (‖Θ^{-½}(T − Θ)Θ⁻¹a‖ + ν√floor·‖u⊥‖)/(1 − bend),
        and, outside, no longer than ν·√(aᵀT⁻¹a/floor). The pairs of G are off by (bend + ν) of
        uᵀGu. Bends are those of the tails with the rounding of products over the least value.
        """
        tail, defects = self.hessian_tail, self.hessian_tail.defects
        floor, lowest = tail.floor, float(self.hessian_values.min())
        bend = tail.bend + defects.products / lowest
        own = self.opg_tail.coupling * (not self.opg_tail.is_empty) + self.opg_tail.bend
        own = own + self.opg_tail.defects.products / float(self.opg_values.min())
        if not (bend < 1 and own < 1):
            return torch.zeros_like(low), torch.full_like(high, torch.inf)
        moved = 0.0 if tail.is_empty else tail.coupling
        steep = parts.head.norm(dim=-1)  # ‖Θ⁻¹a‖
        length = parts.outside.sqrt() + tail.rounding * squares.sqrt()
        length = length * (not tail.is_empty)
        longer = (head / (1 - bend)).sqrt()
        beyond = (length + moved * floor**0.5 * longer) / floor  # ‖u⊥‖ at most
        within, most = self.largest_within, self.largest_outside
        turned = tail.bend * head.sqrt() + defects.products * steep / lowest**0.5
        turned = (turned + moved * floor**0.5 * beyond) / (1 - bend)
        off = within**0.5 * turned + (most / floor) ** 0.5 * moved * longer
        off = off + defects.shift * ((within + most / floor) * squares / floor).sqrt()
        low = ((1 - own) * low).sqrt() * (1 - defects.result) - off
        high = ((1 + own) * high).sqrt() * (1 + defects.result) + off
        return low.clamp(min=0).square(), high.square()

    def _g_square(self, parts: _Parts, c_h: float, c_g: float) -> Tensor:
        """uᵀGu for u = Q_H Λ_H⁻¹a + c_H f⊥, with the tail of G set to c_G, (B, C)."""
        in_g = parts.head_g + c_h * parts.outside_g  # Q_Gᵀu
        whole = parts.head.square().sum(-1) + c_h**2 * parts.outside  # ‖u‖²
        left = self.opg_tail.left_over(whole, in_g.square().sum(-1))
        return (in_g.square() * self.opg_values).sum(-1) + c_g * left

    def _paper_delta(self, parts: _Parts) -> Tensor:
        """N·δ of the paper's sandwich bound: its terms 𝒜, 𝒩, 𝒟, 𝒞, ℋ in coordinates."""
        in_g, out_g = parts.head_g, parts.outside_g
        a_term = self.opg_tail.left_over(parts.head.square().sum(-1), in_g.square().sum(-1))
        n_term = (self.opg_values * in_g * out_g).sum(-1)
        d_term = -(in_g * out_g).sum(-1) * (not self.opg_tail.is_empty)
        c_term = (self.opg_values * out_g.square()).sum(-1)
        h_term = self.opg_tail.left_over(parts.outside, out_g.square().sum(-1))
        last_g, last_h, l2 = self.opg_tail.last, self.hessian_tail.last, self.opg_tail.l2
        return 0.5 * (
            (last_g - l2) * a_term
            + 2 * (1 / l2 - 1 / last_h) * n_term
            + 2 * (last_g / l2 - l2 / last_h) * d_term
            + (1 / l2**2 - 1 / last_h**2) * c_term
            + (last_g / l2**2 - l2 / last_h**2) * h_term
        )


@dataclass(frozen=True)
class _Parts:
    """One row f of F in the coordinates of the sandwich."""

    head: Tensor  # Λ_H⁻¹ Q_Hᵀf, (B, C, K_H)
    head_g: Tensor  # Q_Gᵀ Q_H head, (B, C, K_G)
    outside: Tensor  # ‖f⊥‖², (B, C)
    outside_g: Tensor  # Q_Gᵀ f⊥, (B, C, K_G)
