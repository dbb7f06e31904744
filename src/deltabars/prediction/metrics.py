"""Numbers that summarise predictions with error bars."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError


@dataclass(frozen=True)
class Regression:
    """A least-squares line y ≈ intercept + slope·x; NaN where all x, or all y, are the same."""

    r2: float
    intercept: float
    slope: float


def regression(x: Tensor, y: Tensor) -> Regression:
    """Regress y on x over all their elements (the paper's comparison of estimators)."""
    x, y = x.double().flatten(), y.double().flatten()
    dx, dy = x - x.mean(), y - y.mean()
    if not bool(dx.any()) or not bool(dy.any()):
        return Regression(math.nan, math.nan, math.nan)
    slope = float((dx @ dy) / (dx @ dx))
    r2 = float((dx @ dy) ** 2 / ((dx @ dx) * (dy @ dy)))
    return Regression(r2, float(y.mean()) - slope * float(x.mean()), slope)


def auroc(positives: Tensor, negatives: Tensor) -> float:
    """Compute how well a number tells positives from negatives: the area under its ROC curve.

    It is the chance that a positive's number is above a negative's, ties counting half.

    Example:
        >>> import torch
        >>> auroc(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0, 0.0]))
        0.9166666666666666
    """
    positives, negatives = positives.double().flatten(), negatives.double().flatten()
    if not min(len(positives), len(negatives)) or torch.cat([positives, negatives]).isnan().any():
        raise BadValueError("auroc: expected positives and negatives, got none, or NaN.")
    ordered = negatives.sort().values
    below = torch.searchsorted(ordered, positives)
    below_or_same = torch.searchsorted(ordered, positives, right=True)
    return float((below + below_or_same).double().mean()) / (2 * len(negatives))


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """How many answers are wrong when only the most certain ones are given."""

    coverage: Tensor  # (n,), the shares k/n of the inputs that are answered, k = 1 … n
    risk: Tensor  # (n,), the share of wrong answers among the k most certain ones
    area: float  # the mean of the risks: the area under the curve


def risk_coverage(score: Tensor, wrong: Tensor) -> RiskCoverage:
    """Compute the risk at every coverage, answering in the order of the score, the lowest first.

    The score (n,) is high where an input is uncertain; `wrong` (n,) says whether its prediction is.
    Inputs of the same score are answered in any order; the risk is the mean over these orders.

    Example:
        >>> import torch
        >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.9]), torch.tensor([0, 0, 0, 1]))
        >>> curve.risk.tolist(), curve.area  # three right answers, then a wrong one
        ([0.0, 0.0, 0.0, 0.25], 0.0625)
    """
    if score.ndim != 1 or score.shape != wrong.shape or not len(score):
        raise BadValueError(
            "risk_coverage: expected a score and a truth value for each of n ≥ 1 inputs, got "
            f"shapes {tuple(score.shape)} and {tuple(wrong.shape)}."
        )
    if bool(score.isnan().any()):
        raise BadValueError("risk_coverage: expected scores that are numbers, got NaN.")
    _, group, sizes = score.unique(return_inverse=True, return_counts=True)  # sorted
    share = sizes.new_zeros(len(sizes), dtype=torch.float64)
    share = share.index_add(0, group, wrong.bool().double()) / sizes
    answered = torch.arange(1, len(score) + 1, dtype=torch.float64, device=score.device)
    # On average each answer of a group is wrong by the group's share.
    risk = share.repeat_interleave(sizes).cumsum(0) / answered
    return RiskCoverage(answered / len(score), risk, float(risk.mean()))


def expected_calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Compute how far the highest probability is from the share of right predictions, on average.

    Probabilities (n, C) are `mean` or `moderated` of a Prediction, targets (n,) the true classes.
    Predictions are put into `bins` intervals of equal width by their highest probability (a lower
    end belongs to its interval, and 1 to the last). The result is the mean over all predictions of
    |mean highest probability − share of right ones| in their interval.
    """
    if probabilities.ndim != 2 or targets.shape != probabilities.shape[:1] or not len(targets):
        raise BadValueError(
            "expected_calibration_error: expected probabilities (n, C) and targets (n,), got "
            f"shapes {tuple(probabilities.shape)} and {tuple(targets.shape)}."
        )
    if not is_whole(bins) or bins < 1:
        raise BadValueError(f"bins: expected a whole number from 1 on, got {bins!r}.")
    highest, label = probabilities.double().max(1)
    if not bool(((highest >= 0) & (highest <= 1)).all()):
        raise BadValueError("probabilities: expected numbers in [0, 1], got some outside.")
    ends = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=highest.device)
    interval = torch.bucketize(highest, ends[1:-1], right=True)
    surplus = highest - (label == targets).double()
    return float(highest.new_zeros(bins).index_add(0, interval, surplus).abs().sum()) / len(targets)
