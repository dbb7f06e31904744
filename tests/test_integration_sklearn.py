"""Estimators of scikit-learn, with the real one's own checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import deltabars
from deltabars.errors import BadValueError
from deltabars.integrations.sklearn import DeltaClassifier, DeltaRegressor


def linear(features, outputs):
    return nn.Linear(features, outputs)


# Their data are small and made to be hard; what is checked is the manners.
@pytest.mark.filterwarnings("ignore::deltabars.errors.DeltaBarsWarning")
@parametrize_with_checks([DeltaClassifier(l2=0.1), DeltaRegressor(l2=0.1)])
def test_manners(estimator, check):
    check(estimator)
