"""The outer products of gradients, G = (1/N) Σ gₙ gₙᵀ + λI (the paper's equation for Σ^G)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from deltabars.curvature.base import RowOperator


class OPGOperator(RowOperator):
    """G through the N×P matrix of per-example gradients gₙ of the data loss, uncentred.

    Kept rows cost N·P numbers and two matrix products a pass; else one gradient more.
    """

    factor = "loss_gradient"
    rows_per_example = 1

    def rows_with_surprise(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of the examples of this process, (n, P'), with the χ (n,) of each.

        gₙgₙᵀ ≤ χₙ·JₙᵀSₙJₙ (see `Likelihood.surprise`). Cost: a gradient an example.
        """
        likelihood, noted = self.problem.likelihood, [Tensor()]

        def note(outputs: Tensor, targets: Tensor) -> None:
            noted[0] = likelihood.surprise(outputs, targets)

        for block in self._computed_blocks(on_outputs=note):
            yield block, noted[0]
