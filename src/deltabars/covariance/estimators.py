"""The covariance estimators: what each says of predictions, given F's projections on eigenvectors.

Nothing here is of size P: with a = Qᵀf and ‖f‖² every quadratic form follows, because

    fᵀ(Q D Qᵀ + c(I − QQᵀ))f = Σₖ dₖ aₖ² + c‖f⊥‖²        ‖f⊥‖² = ‖f‖² − ‖a‖²
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltabars.covariance.base import Covariance
from deltabars.covariance.low_rank import LowRankPlusIdentity
from deltabars.covariance.rounding import Ball
from deltabars.covariance.sandwich import SandwichCovariance
from deltabars.covariance.spread import Spread
from deltabars.covariance.tail import Tail
from deltabars.vectors import Basis, first

# The matrices whose eigenpairs each estimator needs.
ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "hessian": ("hessian",),
    "opg": ("opg",),
    "sandwich": ("hessian", "opg"),
    "ggn": ("ggn",),
}

DEFAULT_ESTIMATOR = "opg"  # of every way to a fit; see docs/choosing.md for what was measured


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
    roundings: Mapping[str, float] | None = None,
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
        roundings: ‖Q̃ − Q‖₂ of eigenvectors that were rounded, by matrix; zero by default.
    """
    least = {"hessian": least_hessian} if estimator == "sandwich" else {}
    tails = {
        name: Tail.after(
            values[name],
            rank,
            l2,
            num_parameters,
            least.get(name),
            (slacks or {}).get(name, 0.0),
            (roundings or {}).get(name, 0.0),
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
        if self.tail.rounding:
            low, high = self._around(Ball.of(inside, squares, self.tail), low, high)
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

    def _around(self, ball: Ball, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the most that the interval's ends are for any Qᵀf in the ball.

        With w = 1/floor − 1/λₖ the upper end is ‖f‖²/floor − Σ wₖaₖ²; the lower one likewise.
        """
        tail = self.tail
        values, floor, ceiling = self.values + tail.slack, tail.floor, tail.ceiling + tail.slack
        if tail.is_empty:
            return ball.least(1 / values), ball.most(1 / self.values)
        lowest = torch.maximum(
            ball.squares / ceiling + ball.least(1 / values - 1 / ceiling),
            ball.least(1 / values) + ball.outside_least / ceiling,
        )
        highest = torch.minimum(
            ball.squares / floor + ball.most(1 / self.values - 1 / floor),
            ball.most(1 / self.values) + ball.outside_most / floor,
        )
        return torch.minimum(low, lowest), torch.maximum(high, highest)

    def root(self, vectors: Mapping[str, Basis], rows: Tensor) -> Tensor:
        basis = first(vectors[self.name], self.tail.rank)
        form = LowRankPlusIdentity(basis, self.values.rsqrt(), self._c**0.5)
        return form.apply(rows) / self.num_examples**0.5

    @property
    def _c(self) -> float:
        return 1.0 / self.tail.harmonic_mean if self.full_rank else 0.0
