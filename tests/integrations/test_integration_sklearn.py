"""Estimators of scikit-learn, with the real one's own checks."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from deltabars.errors import BadValueError
from deltabars.integrations.sklearn import DeltaClassifier, DeltaRegressor


def linear(features, outputs):
    return nn.Linear(features, outputs)


# Their data are small and made to be hard; what is checked is the manners.
@pytest.mark.filterwarnings("ignore::deltabars.errors.DeltaBarsWarning")
@parametrize_with_checks(
    [DeltaClassifier(l2=0.1, steps=40, rank=5), DeltaRegressor(l2=0.1, steps=40, rank=5)]
)
def test_manners(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    """Measurements, standardised, and names of flowers for labels."""
    data = load_iris()
    return StandardScaler().fit_transform(data.data), data.target_names[data.target]


@pytest.fixture(scope="module")
def classifier(iris):
    return DeltaClassifier(linear, l2=0.02, estimator="ggn").fit(*iris)


def test_a_linear_classifier_is_logistic_regression(iris, classifier):
    """Theirs minimises C·(sum of losses) + ½‖w‖²: the same with C = 1/(N·λ)."""
    X, y = iris
    ones = np.hstack([X, np.ones((len(X), 1))])  # the bias as a weight, which is then decayed
    theirs = LogisticRegression(C=1 / (0.02 * len(X)), fit_intercept=False, tol=1e-10)
    theirs.fit(ones, y)
    assert list(classifier.classes_) == ["setosa", "versicolor", "virginica"]
    assert classifier.predict_proba(X) == pytest.approx(theirs.predict_proba(ones), abs=1e-5)
    assert list(classifier.predict(X)) == list(theirs.predict(ones))


def test_error_bars_are_those_of_the_dense_formula(iris, classifier):
    """F H⁻¹ Fᵀ / N in NumPy: of a linear model GGN is the Hessian."""
    X = np.hstack([iris[0], np.ones((150, 1))])
    p = classifier.predict_proba(iris[0])
    S = np.einsum("nc,cd->ncd", p, np.eye(3)) - np.einsum("nc,nd->ncd", p, p)
    H = np.einsum("ncd,ni,nj->cidj", S, X, X).reshape(15, 15) / 150 + 0.02 * np.eye(15)
    F = np.einsum("ncd,ni->ncdi", S, X).reshape(150, 3, 15)
    variance = np.einsum("nci,ij,ncj->nc", F, np.linalg.inv(H), F) / 150
    assert classifier.predict_std(iris[0]) == pytest.approx(np.sqrt(variance), rel=1e-6)
    score = np.sqrt(variance.sum(1))
    assert classifier.predict_uncertainty(iris[0]) == pytest.approx(score, rel=1e-6)


def test_pipelines_cross_validation_and_searches():
    data = load_iris()
    pipe = make_pipeline(StandardScaler(), DeltaClassifier(linear, l2=0.02))
    search = GridSearchCV(clone(pipe), {"deltaclassifier__l2": [10.0, 0.01]}, cv=3)
    search.fit(data.data, data.target)
    assert search.best_params_ == {"deltaclassifier__l2": 0.01}
    assert search.best_score_ > 0.85


def test_a_trained_network_is_used_as_it_is(iris, classifier):
    X, y = iris
    network = deepcopy(classifier.network_).float()
    prefit = DeltaClassifier(network, l2=0.02, estimator="ggn", prefit=True).fit(X, y)
    assert prefit.network_ is network
    assert prefit.predict_std(X) == pytest.approx(classifier.predict_std(X), rel=1e-3)
    with pytest.raises(BadValueError, match="expected a trained"):
        DeltaClassifier(linear, prefit=True).fit(X, y)


def test_the_level_of_the_data_and_the_sampling_spread(iris, classifier):
    """λ by the evidence is for a network that is trained already: a training needs a number."""
    X, y = iris
    prefit = DeltaClassifier(classifier.network_, l2="auto", prefit=True, spread="sampling")
    prefit.fit(X, y)
    assert prefit.fit_.estimator == "ggn"
    assert prefit.fit_.diagnostics["l2"]["how"] == "auto"
    expected = prefit.fit_.predict(torch.from_numpy(X), spread="sampling")
    assert prefit.predict_std(X) == pytest.approx(expected.std.numpy())
    assert prefit.predict_uncertainty(X) == pytest.approx(expected.score.numpy())
    posterior = prefit.predict_error_bars(X, spread="posterior")
    assert bool((posterior.score > expected.score).all())
    with pytest.raises(BadValueError, match="one number for the training, got 'auto'"):
        DeltaClassifier(linear, l2="auto").fit(X, y)


def test_a_module_is_copied_and_images_are_taken():
    X = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(0)).numpy()
    y = X[:, 0, 0, 0] > 0
    start = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    before = start[1].weight.clone()
    model = DeltaClassifier(start, l2=0.05).fit(X, y)
    assert torch.equal(start[1].weight, before)
    assert model.score(X, y) > 0.9


@pytest.fixture(scope="module")
def line():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 2))
    return X, X @ [1.0, -2.0] + 0.5 + 0.3 * generator.normal(size=60)


def test_a_linear_regressor_is_a_gaussian_process(line):
    """With prior variance σ²/(N·λ) of all weights, and noise σ², its mean and std are ours."""
    X, y = line
    model = DeltaRegressor(linear, l2=0.01, rank=3, estimator="ggn").fit(X, y)
    noise = model.fit_.noise
    prior = noise**2 / (60 * 0.01)
    kernel = ConstantKernel(prior, "fixed") * DotProduct(1.0, "fixed")
    theirs = GaussianProcessRegressor(kernel, alpha=noise**2, optimizer=None).fit(X, y)
    new = np.array([[0.0, 0.0], [3.0, -1.0], [10.0, 10.0]])
    mean, std = theirs.predict(new, return_std=True)
    for ours, other in zip(model.predict(new, return_std=True), (mean, std), strict=True):
        assert ours == pytest.approx(other, rel=1e-5)
    low, high = model.predict_interval(new)
    total = np.sqrt(std**2 + noise**2)  # of a target to come
    assert (high - low) / 2 == pytest.approx(1.6448536 * total, rel=1e-4)
