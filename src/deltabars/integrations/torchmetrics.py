"""Metrics of torchmetrics: how well a score tells wrong predictions and foreign inputs.

They take a Prediction, or plain tensors, batch by batch, also on several processes. `number` says
which number of a Prediction they judge: `"score"`, `"mutual_information"` or `"entropy"`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, MissingDependencyError
from deltabars.prediction.metrics import auroc, risk_coverage
from deltabars.prediction.prediction import Prediction

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ImportError as error:
    needed = "These metrics need torchmetrics: pip install 'deltabars[torchmetrics]'."
    raise MissingDependencyError(needed) from error

NUMBERS = ("score", "mutual_information", "entropy")


class _ScoreMetric(Metric):
    """Collects one number an input, and whether the input is one of those to be found."""

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    number_: list[Tensor]
    positive_: list[Tensor]

    def __init__(self, number: str = "score", **options: Any) -> None:
        super().__init__(**options)
        if number not in NUMBERS:
            raise BadValueError(f"number: expected one of {NUMBERS}, got {number!r}.")
        self.number = number
        self.add_state("number_", default=[], dist_reduce_fx="cat")
        self.add_state("positive_", default=[], dist_reduce_fx="cat")

    def compute(self) -> Any:
        """Return the area under the ROC curve, from all batches of all processes."""
        number, positive = self._collected()
        if bool(positive.all()) or not bool(positive.any()):
            return torch.tensor(torch.nan, device=self.device)
        return torch.tensor(auroc(number[positive], number[~positive]), device=self.device).float()

    def _collect(self, given: Prediction | Tensor, positive: Any) -> None:
        number = getattr(given, self.number) if isinstance(given, Prediction) else given
        if number is None:
            raise BadValueError(f"update: expected a prediction with {self.number}, got none.")
        kind, shape = getattr(positive, "dtype", None), getattr(positive, "shape", None)
        if kind != torch.bool or number.ndim != 1 or shape != number.shape:
            raise BadValueError(
                "update: expected a number and a truth value (torch.bool) for each of B inputs, "
                f"got shapes {tuple(number.shape)} and {shape}, and {kind}."
            )
        self.number_.append(number.detach().to(self.device))
        self.positive_.append(positive.detach().to(self.device))

    def _collected(self) -> tuple[Tensor, Tensor]:
        """Return all numbers (n,) and truth values (n,) so far, of all processes."""
        if not len(self.number_):
            return torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        return dim_zero_cat(self.number_), dim_zero_cat(self.positive_)


class _ErrorMetric(_ScoreMetric):
    """A metric of right and wrong predictions."""

    def update(self, prediction: Prediction | Tensor, targets: Tensor) -> None:
        """Add a batch: a Prediction and true classes (B,), or scores and wrong or not (bool)."""
        if isinstance(prediction, Prediction):
            label, is_truth = prediction.label, targets.dtype == torch.bool
            shape = None if label is None else tuple(label.shape)
            if label is None or label.ndim != 1 or targets.shape != label.shape or is_truth:
                got = f"got labels of shape {shape} and targets of shape {tuple(targets.shape)}"
                raise BadValueError(
                    "update: expected a prediction of one class an input and true classes, "
                    f"{got} and {targets.dtype}."
                )
            targets = label.to(targets.device) != targets
        self._collect(prediction, targets)


class ErrorAUROC(_ErrorMetric):
    """The chance that a wrong prediction has a higher score than a right one; NaN if undefined."""


class AreaUnderRiskCoverage(_ErrorMetric):
    """The share of wrong predictions among the k most certain, averaged over k = 1 … n."""

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the area, from all batches of all processes."""
        number, wrong = self._collected()
        area = risk_coverage(number, wrong).area if len(number) else torch.nan
        return torch.tensor(area, device=self.device).float()


class ScoreSummary(_ErrorMetric):
    """The mean score of all predictions, of right and of wrong ones, and the AUROC for errors."""

    def compute(self) -> dict[str, Tensor]:
        """Return the four numbers by name; NaN where there are no such predictions."""
        number, wrong = self._collected()
        return {
            "score": number.mean(),
            "score_right": number[~wrong].mean(),
            "score_wrong": number[wrong].mean(),
            "error_auroc": super().compute(),
        }


class ForeignAUROC(_ScoreMetric):
    """The chance that a foreign input has a higher score than a familiar one; NaN if undefined."""

    def update(self, prediction: Prediction | Tensor, foreign: Tensor | bool) -> None:
        """Add a batch: a Prediction or scores (B,), and whether inputs are foreign, (B,) or one."""
        if isinstance(foreign, bool):
            foreign = torch.full((len(prediction),), foreign)
        self._collect(prediction, foreign)
