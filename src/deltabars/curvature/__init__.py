"""Curvature matrices of a training cost as operators, and the derivatives that predictions need.

`hessian.py`, `opg.py` and `ggn.py` hold a matrix each; `base.py` what they share. `pullback.py`
turns cotangents of the outputs into rows of derivatives, by way of the layers (`layers.py`) where
it can. `sensitivity.py` reduces the derivatives of predictions to projections on eigenvectors.
"""

from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.curvature.sensitivity import Sensitivity, sensitivities

__all__ = [
    "CurvatureOperator",
    "GGNOperator",
    "HessianOperator",
    "OPGOperator",
    "Sensitivity",
    "sensitivities",
]
