"""Covariance matrices of trained parameters, from eigenpairs and λ, and what they bound."""

from deltabars.covariance.base import Covariance
from deltabars.covariance.estimators import (
    DEFAULT_ESTIMATOR,
    ESTIMATORS,
    InverseCovariance,
    build_covariance,
)
from deltabars.covariance.low_rank import LowRankPlusIdentity
from deltabars.covariance.sandwich import SandwichCovariance
from deltabars.covariance.spread import Spread
from deltabars.covariance.tail import Defects, Tail, warn_about_spectrum

__all__ = [
    "DEFAULT_ESTIMATOR",
    "ESTIMATORS",
    "Covariance",
    "Defects",
    "InverseCovariance",
    "LowRankPlusIdentity",
    "SandwichCovariance",
    "Spread",
    "Tail",
    "build_covariance",
    "warn_about_spectrum",
]
