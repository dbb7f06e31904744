"""Curvature matrices of a training cost, as operators; and sensitivities of predictions."""

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
