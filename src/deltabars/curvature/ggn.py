"""The generalised Gauss-Newton matrix, GGN = (1/N) Σ Jₙᵀ Sₙ Jₙ + λI."""

from __future__ import annotations

from torch import Tensor

from deltabars.curvature.base import RowOperator


class GGNOperator(RowOperator):
    """GGN through the N·C×P matrix of rows Rₙᵀ Jₙ, with Rₙ Rₙᵀ = Sₙ = ∂²loss/∂z².

    Kept rows cost N·C·P numbers and two matrix products a pass; else C gradients more.
    """

    @property
    def rows_per_example(self) -> int:
        """C: those of Rₙᵀ Jₙ."""
        return self.problem.num_outputs

    def _cotangents(self, outputs: Tensor, targets: Tensor) -> Tensor:
        root = self.problem.likelihood.curvature_root(outputs.double(), targets)
        return root.to(outputs.dtype)
