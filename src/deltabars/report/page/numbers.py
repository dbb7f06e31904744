"""Numbers as they stand in a page: short, and never NaN, which JSON does not have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

DIGITS = 5  # significant ones: a page shows three or four


def short(values: Any) -> Any:
    """Numbers (an array, a tensor, or one number) rounded to five digits, as lists of floats.

    What is not finite becomes None.
    """
    return _rounded(np.asarray(values, dtype=np.float64).tolist())


def say(value: float, digits: int = 3) -> str:
    """A number for people: `1,297`, `0.0285`, `3.1e-06`."""
    if value == round(value) and abs(value) < 1e9:
        return f"{round(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-4:
        return np.format_float_positional(float(f"{value:.{digits}g}"), trim="-", unique=True)
    return f"{value:.{digits - 1}e}"


def percent(share: float) -> str:
    """A share as a percentage, `95.6 %`; halves go up, as they do in the page's program."""
    return f"{math.floor(1000 * share + 0.5) / 10:.1f} %"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded
