"""The outer products of gradients, G = (1/N) Σ gₙ gₙᵀ + λI (the paper's equation for Σ^G)."""

from __future__ import annotations

from torch import Tensor

from deltabars.curvature.base import RowOperator


class OPGOperator(RowOperator):
    """G through the N×P matrix of per-example gradients gₙ of the data loss, uncentred.

    Kept rows cost N·P numbers and two matrix products a pass; else one gradient more.
    """

    @property
    def rows_per_example(self) -> int:
        """One: gₙ."""
        return 1

    def _cotangents(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.problem.likelihood.loss_gradient(outputs, targets).unsqueeze(1)
