"""The generalised Gauss-Newton matrix, GGN = (1/N) Σ Jₙᵀ Sₙ Jₙ + λI."""

from __future__ import annotations

from deltabars.curvature.base import RowOperator


class GGNOperator(RowOperator):
    """GGN through the N·C×P matrix of rows Bₙᵀ Jₙ, with Bₙ Bₙᵀ = Sₙ = ∂²loss/∂z².

    Kept rows cost N·C·P numbers and two matrix products a pass; else C gradients more.
    """

    factor = "curvature_root"

    @property
    def rows_per_example(self) -> int:
        """C."""
        return self.problem.num_outputs
