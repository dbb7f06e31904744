"""Metrics of torchmetrics: how well a score tells wrong predictions and foreign inputs.

They take a Prediction, or plain tensors, batch by batch, also on several processes. For the
expected calibration error torchmetrics' own serves:
`MulticlassCalibrationError(num_classes).update(prediction.mean, targets)`.
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
    raise MissingDependencyError(
        "These metrics need torchmetrics: pip install 'deltabars[torchmetrics]'."
    ) from error

NUMBERS = ("score", "mutual_information", "entropy")


class _ScoreMetric(Metric):
    """Collects one number an input, and whether the input is one of those to be told."""

    is_differentiable = False
    full_state_update = False
    number_: list[Tensor]
    positive_: list[Tensor]

    def __init__(self, number: str = "score", **options: Any) -> None:
        super().__init__(**options)
        if number not in NUMBERS:
            raise BadValueError(f"number: expected one of {NUMBERS}, got {number!r}.")
        self.number = number
        self.add_state("number_", default=[], dist_reduce_fx="cat")
        self.add_state("positive_", default=[], dist_reduce_fx="cat")

    def _collect(self, number: Tensor, positive: Tensor, what: str) -> None:
        if number.ndim != 1 or positive.shape != number.shape:
            raise BadValueError(
                f"update: expected a number and {what} for each of B inputs, got shapes "
                f"{tuple(number.shape)} and {tuple(positive.shape)}."
            )
        self.number_.append(number.detach().to(self.device))
        self.positive_.append(positive.detach().to(self.device))

    def _number_of(self, prediction: Prediction) -> Tensor:
        number = getattr(prediction, self.number)
        if number is None:
            raise BadValueError(
                f"update: expected a prediction with {self.number}, got one without. Predict with "
                "moderation='sampling' for it."
            )
        return number

    def _collected(self) -> tuple[Tensor, Tensor]:
        """All numbers (n,) and truth values (n,) so far, of all processes."""
        if not len(self.number_):
            return torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        return dim_zero_cat(self.number_), dim_zero_cat(self.positive_)

    def _auroc(self) -> Tensor:
        number, positive = self._collected()
        if bool(positive.all()) or not bool(positive.any()):
            return torch.tensor(torch.nan, device=self.device)
        area = auroc(number[positive], number[~positive])
        return torch.tensor(area, dtype=torch.float64, device=self.device).float()


class _ErrorMetric(_ScoreMetric):
    """A metric of right and wrong predictions."""

    def update(self, prediction: Prediction | Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            prediction: a Prediction, or the inputs' scores (B,).
            targets: the true classes (B,); with scores, whether the predictions are wrong (B,),
                of type bool.
        """
        if isinstance(prediction, Prediction):
            label = prediction.label
            if label is None or label.ndim != 1:
                raise BadValueError(
                    "update: expected a prediction of one class an input, got one of real numbers "
                    "or of yes and no. Give scores, and whether each prediction is wrong."
                )
            if targets.shape != label.shape or targets.dtype == torch.bool:
                raise BadValueError(
                    f"targets: expected the true classes of {len(label)} inputs, got "
                    f"{targets.dtype} of shape {tuple(targets.shape)}."
                )
            wrong = label.to(targets.device) != targets
            self._collect(self._number_of(prediction), wrong, "a class")
        else:
            self._collect(prediction, _truth(targets), "whether it is wrong")


class ErrorAUROC(_ErrorMetric):
    """How well a score tells wrong predictions from right ones: the area under its ROC curve.

    The chance that a wrong prediction has a higher score than a right one, ties counting half; NaN
    where there are none of one kind.

    Args:
        number: which number of a Prediction: `"score"`, `"mutual_information"` or `"entropy"`.
        options: of `torchmetrics.Metric`.
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """The area, from all batches of all processes."""
        return self._auroc()


class AreaUnderRiskCoverage(_ErrorMetric):
    """The share of wrong predictions among the k most certain ones, averaged over k = 1 … n.

    See `deltabars.metrics.risk_coverage`; NaN before the first input.

    Args:
        number: which number of a Prediction: `"score"`, `"mutual_information"` or `"entropy"`.
        options: of `torchmetrics.Metric`.
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """The area, from all batches of all processes."""
        number, wrong = self._collected()
        area = risk_coverage(number, wrong).area if len(number) else torch.nan
        return torch.tensor(area, dtype=torch.float64, device=self.device).float()


class ScoreSummary(_ErrorMetric):
    """The mean score of all predictions, of right and of wrong ones, and the AUROC for errors.

    `compute()` gives a dict: `score`, `score_right`, `score_wrong`, `error_auroc`; NaN where there
    are no such predictions.

    Args:
        number: which number of a Prediction: `"score"`, `"mutual_information"` or `"entropy"`.
        options: of `torchmetrics.Metric`.
    """

    def compute(self) -> dict[str, Tensor]:
        """The four numbers, from all batches of all processes."""
        number, wrong = self._collected()
        return {
            "score": number.mean(),
            "score_right": number[~wrong].mean(),
            "score_wrong": number[wrong].mean(),
            "error_auroc": self._auroc(),
        }


class ForeignAUROC(_ScoreMetric):
    """How well a score tells foreign (out-of-distribution) inputs: the area under its ROC curve.

    The chance that a foreign input has a higher score than a familiar one, ties counting half; NaN
    where there are none of one kind.

    Args:
        number: which number of a Prediction: `"score"`, `"mutual_information"` or `"entropy"`.
        options: of `torchmetrics.Metric`.
    """

    higher_is_better = True

    def update(self, prediction: Prediction | Tensor, foreign: Tensor | bool) -> None:
        """Add a batch.

        Args:
            prediction: a Prediction, or the inputs' scores (B,).
            foreign: whether the inputs are foreign (B,), of type bool; or one truth value for all.
        """
        number = self._number_of(prediction) if isinstance(prediction, Prediction) else prediction
        if isinstance(foreign, bool):
            foreign = torch.full(number.shape, foreign, device=number.device)
        self._collect(number, _truth(foreign), "whether it is foreign")

    def compute(self) -> Tensor:
        """The area, from all batches of all processes."""
        return self._auroc()


def _truth(values: Any) -> Tensor:
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise BadValueError(f"update: expected truth values (torch.bool), got {kind}.")
    return values
