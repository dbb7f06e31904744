"""Pictures of one set of error bars against another."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from deltabars.report.style import (
    PAGE,
    REFERENCE,
    REGRESSION,
    house_style,
    legends_below,
    new_figure,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

_IN_A_ROW = 3
_CELLS = 50  # across a panel


@dataclass(frozen=True)
class Comparison:
    """n pairs of numbers, and the line y ≈ intercept + slope·x through them; NaN is no line."""

    title: str
    x: Tensor  # (n,)
    y: Tensor  # (n,)
    slope: float
    intercept: float
    r2: float
    x_label: str
    y_label: str


def save_comparisons(
    path: str | os.PathLike[str], panels: Sequence[Comparison], title: str = ""
) -> None:
    """Draw comparisons into an image file, as `draw_comparisons` does."""
    save(draw_comparisons(panels, title), path)


@house_style()
def draw_comparisons(panels: Sequence[Comparison], title: str = "") -> Figure:
    """How many pairs lie where, with the regression line and the identity, a panel each; three in a
    row, but two rows of two.

    Cells are coloured by the logarithm of their counts, on one scale for all panels. Both axes of
    a panel have the same limits.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm

    columns = 2 if len(panels) == 4 else min(len(panels), _IN_A_ROW)
    rows = -(-len(panels) // columns)
    height = 2.35 * rows + (0.55 if title else 0.35)
    figure = new_figure(min(PAGE, 0.9 + 2.4 * columns), height, "compressed")
    if title:
        figure.suptitle(title)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in places[len(panels) :]:
        unused.remove()
    places = places[: len(panels)]
    cells = [_draw_panel(axes, panel) for axes, panel in zip(places, panels, strict=True)]
    # The palest blues could not be told from the paper.
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.25, 1, 256)))
    most = max(float(np.asarray(cell.get_array()).max()) for cell in cells)
    for cell in cells:
        cell.set_norm(LogNorm(1, max(most, 2)))
        cell.set_cmap(shades)
    legends_below(figure, places[(rows - 1) * columns :], 0.28)
    figure.colorbar(cells[-1], ax=places, shrink=0.9 / rows, pad=0.02, label="pairs in a cell")
    return figure


def _draw_panel(axes: Axes, panel: Comparison) -> PolyCollection:
    from matplotlib.ticker import MaxNLocator

    x, y = panel.x.double().numpy(), panel.y.double().numpy()
    low = min(0.0, x.min(), y.min())
    high = max(x.max(), y.max(), low + 1e-12)
    ends = low, high + 0.02 * (high - low)
    cells = axes.hexbin(
        x,
        y,
        gridsize=_CELLS,
        extent=(*ends, *ends),
        mincnt=1,
        linewidths=0,
        rasterized=True,
    )
    axes.axline((0, 0), slope=1, color=REFERENCE, linestyle=":", linewidth=0.9, label="identity")
    if not math.isnan(panel.slope):
        _draw_line(axes, panel)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    return cells


def _draw_line(axes: Axes, panel: Comparison) -> None:
    at_zero = (0, panel.intercept)
    axes.axline(at_zero, slope=panel.slope, color=REGRESSION, linewidth=1.2, label="regression")
    intercept = round(panel.intercept, 4) + 0.0  # not −0.0000
    numbers = f"R² = {panel.r2:.3f}\nslope = {panel.slope:.3f}\nintercept = {intercept:.4f}"
    numbers = numbers.replace("-", "−")
    # The corner that the points stay away from.
    across, up, align = (0.97, 0.04, "right") if panel.slope > 0.5 else (0.05, 0.76, "left")
    axes.text(across, up, numbers, transform=axes.transAxes, ha=align, fontsize=7)
