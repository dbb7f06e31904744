"""The outer products of gradients, G = (1/N) Σ gₙ gₙᵀ + λI (the paper's equation for Σ^G)."""

from __future__ import annotations

from torch import Tensor

from deltabars.curvature.base import RowOperator
from deltabars.problem.data import Batch


class OPGOperator(RowOperator):
    """G through the N×P matrix of per-example gradients gₙ of the data loss, uncentred.

    Kept rows cost N·P numbers and two matrix products a pass; else one gradient more.
    """

    @property
    def _rows_per_example(self) -> int:
        return 1

    def _rows(self, batch: Batch, out: Tensor | None, again: bool) -> Tensor:
        targets = batch.targets
        assert targets is not None

        def gradients(outputs: Tensor) -> Tensor:
            return self.problem.likelihood.loss_gradient(outputs, targets).unsqueeze(1)

        return self.pullback.rows(batch.inputs, gradients, out, self._parts, again=again)
