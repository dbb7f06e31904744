"""Numbers that summarise predictions with error bars."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltabars.errors import BadValueError


@dataclass(frozen=True)
class Regression:
    """A least-squares line y ≈ intercept + slope·x, and the share of variance it explains."""

    r2: float
    intercept: float
    slope: float


def regression(x: Tensor, y: Tensor) -> Regression:
    """Regress y on x over all their elements (the paper's comparison of estimators)."""
    x, y = x.double().flatten(), y.double().flatten()
    dx, dy = x - x.mean(), y - y.mean()
    if not bool(dx.any()) or not bool(dy.any()):
        raise BadValueError("regression: expected numbers that vary, got all the same.")
    slope = float((dx @ dy) / (dx @ dx))
    r2 = float((dx @ dy) ** 2 / ((dx @ dx) * (dy @ dy)))
    return Regression(r2, float(y.mean()) - slope * float(x.mean()), slope)


def auroc(positives: Tensor, negatives: Tensor) -> float:
    """How well a number tells positives from negatives: the area under its ROC curve.

    It is the chance that a positive's number is above a negative's, ties counting half: 1 where all
    positives are above all negatives, ½ where the number says nothing.
    """
    positives, negatives = positives.double().flatten(), negatives.double().flatten()
    for name, numbers in (("positives", positives), ("negatives", negatives)):
        if not len(numbers) or bool(numbers.isnan().any()):
            raise BadValueError(f"auroc: expected {name} that are numbers, got none or NaN.")
    ordered = negatives.sort().values
    below = torch.searchsorted(ordered, positives)
    below_or_same = torch.searchsorted(ordered, positives, right=True)
    return float((below + below_or_same).double().mean()) / (2 * len(negatives))
