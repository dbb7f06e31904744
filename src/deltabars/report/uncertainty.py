"""Pictures of error bars against probability, for right and wrong predictions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltabars.report.smoothing import smooth_curve
from deltabars.report.style import (
    FAINT,
    FALSE_POSITIVE,
    PAGE,
    TRUE_POSITIVE,
    house_style,
    legends_below,
    new_figure,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_DOTS = 100_000  # more would hide one another and swell the file
_BANDWIDTH = 0.05


@dataclass(frozen=True)
class Panel:
    """The predictions of n inputs by one estimator."""

    title: str
    probability: Tensor  # (n, C)
    std: Tensor  # (n, C)
    label: Tensor  # (n,), the predicted class
    right: Tensor  # (n,), whether it is the true one


def save_uncertainty(
    path: str | os.PathLike[str], panels: Sequence[Panel], title: str = ""
) -> None:
    """Draw error bars against probability into an image file, as `draw_uncertainty` does."""
    save(draw_uncertainty(panels, title), path)


@house_style()
def draw_uncertainty(panels: Sequence[Panel], title: str = "") -> Figure:
    """Std against probability, a panel an estimator on the same axes (the paper's Figure 5).

    Grey dots are all n·C pairs of a probability and its std; of more than 100,000 a sample of
    that size is drawn, the same one each time and in each panel. The curves are local-linear
    regressions over the predicted class's pairs, of right predictions (true positives) and of
    wrong ones (false positives), between the lowest and the highest probability of each and where
    there are enough predictions nearby.
    """
    figure = new_figure(PAGE, 2.7 if title else 2.5)
    if title:
        figure.suptitle(title)
    places = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, panel in zip(places, panels, strict=True):
        _draw_panel(axes, panel)
    highest = max(float(panel.std.max()) for panel in panels)
    places[0].set_xlim(-0.02, 1.02)
    places[0].set_ylim(-0.02 * highest, 1.05 * highest)
    places[0].set_ylabel("std of the probability")
    legends_below(figure, places, 0.3)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    x, y = panel.probability.flatten(), panel.std.flatten()
    drawn = slice(None) if len(x) <= _MOST_DOTS else _sample(len(x))
    dots: dict[str, Any] = {
        "s": 1.2,
        "color": FAINT,
        "linewidths": 0,
        "alpha": 0.5,
        "rasterized": True,
    }
    axes.scatter(x[drawn].numpy(), y[drawn].numpy(), label=f"all classes ({len(x):,})", **dots)
    chosen = panel.label[:, None]
    p, std = panel.probability.gather(1, chosen)[:, 0], panel.std.gather(1, chosen)[:, 0]
    for name, color, these in (
        ("true positives", TRUE_POSITIVE, panel.right),
        ("false positives", FALSE_POSITIVE, ~panel.right),
    ):
        grid, curve = smooth_curve(p[these], std[these], _BANDWIDTH)
        label = f"{name} ({int(these.sum()):,})"
        axes.plot(grid.numpy(), curve.numpy(), color="white", linewidth=3, zorder=2.5)
        axes.plot(grid.numpy(), curve.numpy(), color=color, linewidth=1.8, label=label, zorder=3)
    axes.set_title(panel.title)
    axes.set_xlabel("probability")


def _sample(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:_MOST_DOTS]
