"""The generalised Gauss-Newton matrix, GGN = (1/N) Σ Jₙᵀ Sₙ Jₙ + λI."""

from __future__ import annotations

from deltabars.curvature.base import RowOperator
from deltabars.problem.problem import Problem


class GGNOperator(RowOperator):
    """GGN through the N·C×P matrix of rows Bₙᵀ Jₙ, with Bₙ Bₙᵀ = Sₙ = ∂²loss/∂z².

    Kept rows cost N·C·P numbers and two matrix products a pass; else C gradients more.
    """

    factor = "curvature_root"

    def __init__(self, problem: Problem) -> None:
        self.rows_per_example = problem.num_outputs
        super().__init__(problem)
