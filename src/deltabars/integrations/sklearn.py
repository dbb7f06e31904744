"""Estimators of scikit-learn: a network, trained here or before, whose predictions have error bars.

They go where scikit-learn's own go: pipelines, cross-validation, searches over parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deltabars.covariance.estimators import SPREADS
from deltabars.errors import BadValueError, MissingDependencyError
from deltabars.fitting.fit import fit as fit_error_bars
from deltabars.fitting.fitted import DeltaFit
from deltabars.integrations.convergence import train_to_convergence
from deltabars.likelihoods.base import Likelihood
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.prediction.prediction import Prediction
from deltabars.problem.parameters import AUTO, L2Rates

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    needed = "These estimators need scikit-learn 1.6 or later: pip install 'deltabars[sklearn]'."
    raise MissingDependencyError(needed) from error

Builder = Callable[[int, int], nn.Module]
_HIDDEN = 16


class _DeltaEstimator(BaseEstimator):  # type: ignore[misc]
    """What a classifier and a regressor have in common."""

    network_: nn.Module
    fit_: DeltaFit
    n_features_in_: int
    _flat = False  # whether the targets are a column without a dimension of its own

    def __init__(
        self,
        network: nn.Module | Builder | None = None,
        *,
        l2: L2Rates | str = 0.01,
        estimator: str = AUTO,
        rank: int | str | None = None,
        params: Any = None,
        prefit: bool = False,
        steps: int = 1000,
        random_state: Any = 0,
        spread: str = SPREADS[0],
    ) -> None:
        self.network, self.prefit, self.steps = network, prefit, steps
        self.l2, self.estimator, self.rank, self.params = l2, estimator, rank, params
        self.random_state, self.spread = random_state, spread

    def predict_error_bars(self, X: Any, **options: Any) -> Prediction:
        """Return all that deltabars knows of the predictions, by `DeltaFit.predict`."""
        return self.fit_.predict(self._inputs(X), **{"spread": self.spread, **options})

    def predict_std(self, X: Any) -> np.ndarray:
        """Return the error bars of the predictions: of `predict_proba`, or of a regression."""
        return self._like_y(self.predict_error_bars(X, moderation=None).std)

    def _fit(self, X: Any, targets: Tensor, outputs: int, likelihood: Likelihood | str) -> None:
        inputs = torch.tensor(X)  # a copy: the array may be read-only
        if self.prefit:
            if not isinstance(self.network, nn.Module):
                raise BadValueError(f"network: expected a trained Module, got {self.network!r}.")
            self.network_ = self.network
        else:
            if not isinstance(self.l2, int | float):
                got = f"got {self.l2!r:.60}. Train it yourself and give prefit=True."
                raise BadValueError(f"l2: expected one number for the training, {got}")
            self.network_ = self._built(X.shape[1], outputs).double()
            is_real = isinstance(likelihood, Gaussian)
            loss = _half_squares if is_real else nn.functional.cross_entropy
            train_to_convergence(self.network_, inputs, targets, self.l2, self.steps, loss)
        kind = next(self.network_.parameters()).dtype
        data = inputs.to(kind), targets.to(kind) if targets.is_floating_point() else targets
        options: dict[str, Any] = {"estimator": self.estimator, "rank": self.rank}
        options |= {"params": self.params, "l2": self.l2, "likelihood": likelihood}
        self.fit_ = fit_error_bars(self.network_, data, **options, progress=False)

    def _built(self, features: int, outputs: int) -> nn.Module:
        """Return a network to train: a copy of the given one, what its function gives, or ours."""
        if isinstance(self.network, nn.Module):
            return deepcopy(self.network)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(check_random_state(self.random_state).randint(2**31 - 1))
            if self.network is not None:
                return self.network(features, outputs)
            hidden = nn.Linear(features, _HIDDEN)
            return nn.Sequential(hidden, nn.Tanh(), nn.Linear(_HIDDEN, outputs))

    def _checked(self, *data: Any, **options: Any) -> Any:
        """Return data as scikit-learn checks them; those of our own network are tables."""
        allow_nd = self.network is not None
        return validate_data(self, *data, dtype=np.float64, allow_nd=allow_nd, **options)

    def _like_y(self, values: Tensor) -> np.ndarray:
        return values.cpu().numpy()[:, 0] if self._flat else values.cpu().numpy()

    def _inputs(self, X: Any) -> Tensor:
        check_is_fitted(self, "fit_")
        return torch.tensor(self._checked(X, reset=False), dtype=self.fit_.network.dtype)

    def _means(self, X: Any) -> Tensor:
        """Return the predictions without error bars: one pass through the network."""
        inputs, network = self._inputs(X), self.fit_.network
        with torch.no_grad(), network.evaluation():
            outputs = network.outputs(network.trained, inputs.to(network.device))
        return self.fit_.likelihood.mean(outputs).cpu()


class DeltaClassifier(ClassifierMixin, _DeltaEstimator):  # type: ignore[misc]
    """A classifier whose probabilities have error bars.

    Its arguments and attributes are those of `DeltaRegressor`, with l2 of mean cross-entropy +
    (λ/2)·‖ω‖²; the network gives logits of the classes of `y`, in order.
    """

    classes_: np.ndarray  # the labels, in the order of the columns

    def fit(self, X: Any, y: Any) -> DeltaClassifier:
        """Train the network, unless it is trained already, and compute its error bars."""
        X, y = self._checked(X, y)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise BadValueError("y: expected two classes or more, got one class.")
        self._fit(X, torch.from_numpy(numbers).long(), len(self.classes_), "categorical")
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable labels (n,)."""
        chosen = self._means(X).argmax(1)  # first: this checks that it is fitted
        return self.classes_[chosen.numpy()]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return class probabilities (n, C), in the order of `classes_`."""
        return self._means(X).numpy()

    def predict_uncertainty(self, X: Any) -> np.ndarray:
        """Return the scores (n,), to rank or to threshold."""
        return self.predict_error_bars(X, moderation=None).score.cpu().numpy()


class DeltaRegressor(RegressorMixin, _DeltaEstimator):  # type: ignore[misc]
    """A regressor whose predictions have error bars.

    Fitted, it has the DeltaFit `fit_`, whose `noise` is estimated from the residuals, and the
    trained `network_`.

    Args:
        network: the number of features and of outputs to a `torch.nn.Module`; or a module, of
            which a copy is trained; or, with `prefit=True`, a trained one, which is used as it is.
            By default one hidden layer of 16 tanh units.
        l2: λ of mean ½‖r‖² + (λ/2)·‖ω‖²; with `prefit=True` all that `deltabars.fit` takes, such
            as `"auto"`.
        estimator, rank, params: as for `deltabars.fit`; with `"ggn"` a linear network is Bayesian
            linear regression.
        prefit: whether the network is trained already; `fit` then computes the error bars alone.
        steps: of L-BFGS at most, on all data at once.
        random_state: of the initial weights.
        spread: of the error bars: `"posterior"` or `"sampling"`, as for `DeltaFit.predict`.
    """

    def fit(self, X: Any, y: Any) -> DeltaRegressor:
        """Train the network, unless it is trained already, and compute its error bars."""
        X, y = self._checked(X, y, y_numeric=True, multi_output=True, ensure_min_samples=2)
        self._flat = y.ndim == 1
        targets = torch.tensor(y, dtype=torch.float64).reshape(len(y), -1)
        self._fit(X, targets, targets.shape[1], Gaussian(None))  # the noise is estimated
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictions (n,) or (n, C), as `y` was; or (mean, std of the prediction)."""
        if not return_std:
            return self._like_y(self._means(X))
        out = self.predict_error_bars(X)
        return self._like_y(out.mean), self._like_y(out.std)

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of intervals that hold targets to come, in a share `level` of cases."""
        low, high = self.predict_error_bars(X).interval(level)
        return self._like_y(low), self._like_y(high)


def _half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1).mean()
