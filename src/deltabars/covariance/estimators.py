"""The covariance estimators: what each says of predictions, given F's projections on eigenvectors.

Nothing here is of size P: with a = Qᵀf and ‖f‖² every quadratic form follows, because

    fᵀ(Q D Qᵀ + c(I − QQᵀ))f = Σₖ dₖ aₖ² + c‖f⊥‖²        ‖f⊥‖² = ‖f‖² − ‖a‖²
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deltabars.covariance.low_rank import LowRankPlusIdentity
from deltabars.covariance.spread import Spread
from deltabars.covariance.tail import Tail

# The matrices whose eigenpairs each estimator needs.
ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "hessian": ("hessian",),
    "opg": ("opg",),
    "sandwich": ("hessian", "opg"),
    "ggn": ("ggn",),
}


def build_covariance(
    estimator: str,
    values: Mapping[str, Tensor],
    *,
    rank: int,
    l2: float,
    num_parameters: int,
    num_examples: float,
    overlap: Tensor | None = None,
    least_hessian: float | None = None,
    slacks: Mapping[str, float] | None = None,
    full_rank: bool = True,
) -> Covariance:
    """The covariance of an estimator from the first `rank` eigenvalues of its matrices.

    Args:
        estimator: a key of ESTIMATORS.
        values: descending eigenvalues, λ included, by matrix.
        num_examples: N; N/σ² for eigenvalues of σ² times a matrix.
        overlap: Q_Hᵀ Q_G, (K, K), for the sandwich.
        least_hessian: the least eigenvalue of H, where the whole spectrum is known: the sandwich's
            interval then holds for every positive definite H, not only for those whose tail lies
            above λ. (The hessian estimator *defines* what is below λ as λ̃; its interval is about
            that.)
        slacks: how much too low the eigenvalues of a matrix can be, by matrix; zero by default.
    """
    least = {"hessian": least_hessian} if estimator == "sandwich" else {}
    tails = {
        name: Tail.after(
            values[name], rank, l2, num_parameters, least.get(name), (slacks or {}).get(name, 0.0)
        )
        for name in ESTIMATORS[estimator]
    }
    used = {name: values[name][: tail.rank].double() for name, tail in tails.items()}
    if estimator != "sandwich":
        return InverseCovariance(
            estimator, used[estimator], tails[estimator], num_examples, full_rank
        )
    assert overlap is not None
    return SandwichCovariance(
        used["hessian"],
        used["opg"],
        tails["hessian"],
        tails["opg"],
        overlap[: tails["hessian"].rank, : tails["opg"].rank],
        num_examples,
        full_rank,
    )


class Covariance(ABC):
    """A covariance Σ of the trained parameters."""

    @abstractmethod
    def spread(
        self, squares: Tensor, projections: Mapping[str, Tensor], gram: Tensor | None = None
    ) -> Spread:
        """Standard deviations, bounds and (on demand) covariances of a batch of predictions.

        Args:
            squares: ‖f‖² of each row f of F, (B, C).
            projections: F Qᵀ (B, C, K) by the name of the matrix whose eigenvectors Q are.
            gram: F Fᵀ (B, C, C), where F Σ Fᵀ is wanted whole.
        """

    @abstractmethod
    def root(self, vectors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Rows z (n, P) times a square root of Σ: standard normal z give draws of covariance Σ."""


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
        slack = self.tail.slack
        # Three sums over the same squares: ‖Qᵀf‖², and those of the head and of its lower bound.
        weights = torch.stack(
            [torch.ones_like(self.values), 1 / self.values, 1 / (self.values + slack)], dim=1
        )
        length, head, low = (inside.square() @ weights).unbind(-1)
        outside = self.tail.left_over(squares, length)  # ‖f⊥‖²
        c = self._c
        low = low + outside / (self.tail.ceiling + slack)
        high = head + outside / self.tail.floor
        covariance = None
        if gram is not None:
            rest = 0.0 if self.tail.is_empty else gram - inside @ inside.mT
            covariance = ((inside / self.values) @ inside.mT + c * rest) / self.num_examples
        return Spread(
            variance=(head + c * outside) / self.num_examples,
            lowest=low / self.num_examples,
            highest=high / self.num_examples,
            reach=torch.zeros_like(low),
            paper_delta=self.tail.inverse_error * outside / self.num_examples,
            covariance=covariance,
        )

    def root(self, vectors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        basis = vectors[self.name][: self.tail.rank]
        form = LowRankPlusIdentity(basis, self.values.rsqrt(), self._c**0.5)
        return form.apply(rows) / self.num_examples**0.5

    @property
    def _c(self) -> float:
        return 1.0 / self.tail.harmonic_mean if self.full_rank else 0.0


@dataclass(frozen=True, eq=False)
class SandwichCovariance(Covariance):
    """Σ = H⁻¹ G H⁻¹/N, with the tails of H and of G closed by their λ̃.

    Attributes:
        hessian_values, opg_values: the eigenvalues in use, (K_H,) and (K_G,), float64.
        hessian_tail, opg_tail: the eigenvalues that are not.
        overlap: M = Q_Hᵀ Q_G, (K_H, K_G), float64.
        num_examples: N (N/σ² at noise σ).
        full_rank: whether the tails count or not.
    """

    hessian_values: Tensor
    opg_values: Tensor
    hessian_tail: Tail
    opg_tail: Tail
    overlap: Tensor
    num_examples: float
    full_rank: bool = True

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

        full_c = 1.0 / self.hessian_tail.harmonic_mean
        c_h, c_g = (full_c, self.opg_tail.harmonic_mean) if self.full_rank else (0.0, 0.0)
        covariance = None
        if gram is not None:
            rest = 0.0 if self.hessian_tail.is_empty else gram - a @ a.mT
            in_g = head_g + c_h * outside_g
            whole = head @ head.mT + c_h**2 * rest  # U Uᵀ
            left = 0.0 if self.opg_tail.is_empty else whole - in_g @ in_g.mT
            covariance = ((in_g * self.opg_values) @ in_g.mT + c_g * left) / self.num_examples

        # √N·std is the G-norm of u. H̃⁻¹f differs from H⁻¹f by at most reach·‖f⊥‖, in a direction
        # orthogonal to Q_H, where G has no more curvature than γ; the rest is the triangle
        # inequality of that norm (for the score: of the norm over all classes together).
        lowest = self._g_square(parts, full_c, self.opg_tail.floor)
        highest = self._g_square(parts, full_c, self.opg_tail.ceiling)
        highest = highest + self.opg_tail.slack * parts.u_square(full_c)
        reach = self.largest_outside * self.hessian_tail.inverse_reach**2 * outside
        return Spread(
            variance=self._g_square(parts, c_h, c_g) / self.num_examples,
            lowest=lowest / self.num_examples,
            highest=highest / self.num_examples,
            reach=reach / self.num_examples,
            paper_delta=self._paper_delta(parts) / self.num_examples,
            covariance=covariance,
        )

    def root(self, vectors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        q_h = vectors["hessian"][: self.hessian_tail.rank]
        q_g = vectors["opg"][: self.opg_tail.rank]
        c_h, c_g = 0.0, 0.0
        if self.full_rank:
            c_h, c_g = 1.0 / self.hessian_tail.harmonic_mean, self.opg_tail.harmonic_mean
        middle = LowRankPlusIdentity(q_g, self.opg_values.sqrt(), c_g**0.5)
        outer = LowRankPlusIdentity(q_h, self.hessian_values.reciprocal(), c_h)
        return outer.apply(middle.apply(rows)) / self.num_examples**0.5

    def _g_square(self, parts: _Parts, c_h: float, c_g: float) -> Tensor:
        """uᵀGu for u = Q_H Λ_H⁻¹a + c_H f⊥, with the tail of G set to c_G, (B, C)."""
        in_g = parts.head_g + c_h * parts.outside_g  # Q_Gᵀu
        left = self.opg_tail.left_over(parts.u_square(c_h), in_g.square().sum(-1))
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

    def u_square(self, c_h: float) -> Tensor:
        """‖u‖² for u = Q_H head + c_H f⊥, (B, C)."""
        return self.head.square().sum(-1) + c_h**2 * self.outside
