"""The covariance estimators: what each says of predictions, given F's projections on eigenvectors.

Nothing here is of size P: with a = Qᵀf and ‖f‖² every quadratic form follows, because

    fᵀ(Q D Qᵀ + c(I − QQᵀ))f = Σₖ dₖ aₖ² + c‖f⊥‖²        ‖f⊥‖² = ‖f‖² − ‖a‖²
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltabars.covariance.base import (
    EXACT,
    Ball,
    Covariance,
    Defects,
    LowRankPlusIdentity,
    Spread,
    Tail,
)
from deltabars.covariance.sandwich import SandwichCovariance
from deltabars.runtime.vectors import Basis, first

# The matrices whose eigenpairs each estimator needs.
ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "hessian": ("hessian",),
    "opg": ("opg",),
    "sandwich": ("hessian", "opg"),
    "ggn": ("ggn",),
}

DEFAULT_ESTIMATOR = "opg"  # of every way to a fit; see docs/choosing.md for what was measured
BOUNDS = ("rigorous", "paper")
SPREADS = ("posterior", "sampling")


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
    defects: Mapping[str, Defects] | None = None,
    full_rank: bool = True,
) -> Covariance:
    """Build the covariance of an estimator from the first `rank` eigenvalues of its matrices.

    Args:
        estimator: a key of ESTIMATORS.
        values: descending eigenvalues, λ included, by matrix.
        num_examples: N; N/σ² for eigenvalues of σ² times a matrix.
        overlap: Q_Hᵀ Q_G, (K, K), for the sandwich.
        least_hessian: the least eigenvalue of H, where the whole spectrum is known: the sandwich's
            interval then holds for every positive definite H, not only for those whose tail lies
            above λ. (The hessian estimator *defines* what is below λ as λ̃; its interval is about
            that.)
        defects: how far pairs can be from exact ones, by matrix; they are exact by default.
    """
    least = {"hessian": least_hessian} if estimator == "sandwich" else {}
    defects, tails = defects or {}, {}
    for name in ESTIMATORS[estimator]:
        own = (least.get(name), defects.get(name, EXACT))
        tails[name] = Tail.after(values[name], rank, l2, num_parameters, *own)
    used = {name: values[name][: tail.rank].double() for name, tail in tails.items()}
    if estimator != "sandwich":
        own_values, tail = used[estimator], tails[estimator]
        return InverseCovariance(estimator, own_values, tail, num_examples, full_rank)
    assert overlap is not None
    (values_h, values_g), (h, g) = used.values(), tails.values()
    overlap = overlap[: h.rank, : g.rank]
    return SandwichCovariance(values_h, values_g, h, g, overlap, num_examples, full_rank)


@dataclass(frozen=True, eq=False)
class InverseCovariance(Covariance):
    """Σ = A⁻¹/N for A one of H, G, GGN, with the tail of A closed by λ̃ (the paper's eq. for σ̃²)."""

    name: str  # whose eigenvectors the projections are on
    values: Tensor  # the eigenvalues in use, (K,), float64
    tail: Tail  # those that are not
    num_examples: float  # N (N/σ² at noise σ)
    full_rank: bool = True  # whether the tail counts (c = 1/λ̃) or not (c = 0)
    closing: float | None = None  # a measured c, in place of 1/λ̃

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
            beyond=c * outside / self.num_examples,
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
        if not self.full_rank:
            return 0.0
        return 1.0 / self.tail.harmonic_mean if self.closing is None else self.closing
