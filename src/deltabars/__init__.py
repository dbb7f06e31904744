"""Error bars for the predictions of any trained PyTorch network, by the Delta method."""

from deltabars import curvature, eigen, errors, likelihoods
from deltabars.eigen import EigenPairs
from deltabars.fitted import DeltaFit
from deltabars.fitting import fit
from deltabars.loading import load
from deltabars.parameters import last_layer
from deltabars.prediction import Prediction
from deltabars.problem import Problem

__version__ = "0.3.0"

__all__ = [
    "DeltaFit",
    "EigenPairs",
    "Prediction",
    "Problem",
    "curvature",
    "eigen",
    "errors",
    "fit",
    "last_layer",
    "likelihoods",
    "load",
]
