"""The outer products of gradients, G = (1/N) Σ gₙ gₙᵀ + λI (the paper's equation for Σ^G)."""

from __future__ import annotations

import torch
from torch import Tensor

from deltabars.batches import Batch
from deltabars.curvature.base import RowOperator


class OPGOperator(RowOperator):
    """G through the N×P matrix of per-example gradients gₙ of the data loss, uncentred.

    Kept rows cost N·P numbers and two matrix products a pass; else one gradient more.
    """

    @property
    def _rows_per_example(self) -> int:
        return 1

    def _rows(self, batch: Batch) -> Tensor:
        assert batch.targets is not None
        gradient = torch.func.vmap(torch.func.grad(self.problem.one_loss), in_dims=(None, 0, 0))
        rows = gradient(dict(self.problem.network.trained), batch.inputs, batch.targets)
        return self.problem.parameters.flatten(rows, batch_dims=1)
