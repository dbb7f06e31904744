"""Curvature matrices of a training cost as operators, and the derivatives that predictions need.

`hessian.py`, `opg.py` and `ggn.py` hold a matrix each; `base.py` what they share. `pullback.py`
turns cotangents of the outputs into rows of derivatives, through the layers where it can
(`layers.py`) and example by example where it cannot. `sensitivity.py` reduces the derivatives of
predictions to their projections on eigenvectors.

Eigensolvers are in `eigen`, the cost itself is in `problem`.
"""

from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.curvature.sensitivity import Sensitivity, sensitivities

__all__ = [
    "CurvatureOperator", "GGNOperator", "HessianOperator", "OPGOperator", "Sensitivity",
    "sensitivities",
]  # fmt: skip
