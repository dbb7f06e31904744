"""The outer products of gradients, G = (1/N) Σ gₙ gₙᵀ + λI (the paper's equation for Σ^G)."""

from __future__ import annotations

from deltabars.curvature.base import RowOperator


class OPGOperator(RowOperator):
    """G through the N×P matrix of per-example gradients gₙ of the data loss, uncentred.

    Kept rows cost N·P numbers and two matrix products a pass; else one gradient more.
    """

    factor = "loss_gradient"
    rows_per_example = 1
