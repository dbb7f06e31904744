"""Numbers that summarise predictions with error bars."""

from __future__ import annotations

from dataclasses import dataclass

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
