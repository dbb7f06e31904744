"""Pictures of a search over λ."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deltabars.report.style import (
    EIGENVALUE,
    REFERENCE,
    ZERO_CROSSING,
    house_style,
    legends_below,
    new_figure,
    save,
)
from deltabars.tuning import Tuning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 4.6, 3.2  # inches
_SHOWN = 50.0  # nats below the best that are drawn, and the width of its interval


def save_tuning(path: str | os.PathLike[str], tuning: Tuning) -> None:
    """Draw a search over λ into an image file, as `draw_tuning` does."""
    save(draw_tuning(tuning), path)


@house_style()
def draw_tuning(tuning: Tuning) -> Figure:
    """The log marginal likelihood with its interval, or the validation loss, against λ.

    The best λ and the fitted one are marked. What lies far below the best is cut off.
    """
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.subplots()
    levels, values = tuning.levels.numpy(), tuning.values.numpy()
    has_interval = tuning.low is not None and tuning.high is not None
    name = "log marginal likelihood" if has_interval else "mean validation loss"
    axes.plot(levels, values, color=EIGENVALUE, label=name, zorder=3)
    if tuning.low is not None and tuning.high is not None:
        band: dict[str, Any] = {"color": EIGENVALUE, "alpha": 0.2, "linewidth": 0}
        low, high = tuning.low.numpy(), tuning.high.numpy()
        axes.fill_between(levels, low, high, label="its interval", **band)
        best = int(values.argmax())
        reach = _SHOWN + float(high[best] - low[best])
        axes.set_ylim(values[best] - reach, float(high.max()) + reach / 9)
        shown = levels[values > values[best] - reach]
        ends = min(shown[0], tuning.fitted_level), max(shown[-1], tuning.fitted_level)
        axes.set_xlim(max(ends[0] / 10, levels[0]), min(ends[1] * 10, levels[-1]))
    else:
        axes.set_xlim(levels[0], levels[-1])
    mark: dict[str, Any] = {"linestyle": ":", "linewidth": 1.3}
    axes.axvline(tuning.fit.level, color=ZERO_CROSSING, label="the best λ", **mark)
    fitted = tuning.fitted_level
    axes.axvline(fitted, color=REFERENCE, linestyle="--", linewidth=0.9, label="the fitted λ")
    axes.set_xscale("log")
    axes.set_xlabel("λ")
    axes.set_ylabel(name)
    legends_below(figure, [axes], 0.2)
    return figure
