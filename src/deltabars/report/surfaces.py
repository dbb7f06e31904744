"""Pictures of error bars, and of their own error, over the rank and the probability."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from deltabars.report.style import PAGE, house_style, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_surfaces(
    path: str | os.PathLike[str],
    ranks: Tensor,
    grid: Tensor,
    std: Tensor,
    error: Tensor,
    title: str,
) -> None:
    """Draw two surfaces into an image file, as `draw_surfaces` does."""
    save(draw_surfaces(ranks, grid, std, error, title), path)


@house_style()
def draw_surfaces(ranks: Tensor, grid: Tensor, std: Tensor, error: Tensor, title: str) -> Figure:
    """Smoothed std (left) and its error (right) over K and probability (the paper's Figure 6).

    Nothing is drawn where a value is NaN.

    Args:
        ranks: (R,), ascending.
        grid: (g,), probabilities.
        std: (R, g).
        error: (R, g), the bound on std's own error.
        title: over both.
    """
    # A layout of its own: matplotlib's leave much room around 3-D axes, and cut their labels.
    figure = new_figure(PAGE, 3.0, layout=None)
    figure.suptitle(title, y=0.98)
    for left, height, name in ((0.0, std, "std"), (0.5, error, "error of the std")):
        axes = figure.add_axes((left, 0.07, 0.5, 0.83), projection="3d")
        _draw_surface(axes, ranks, grid, height, name)
    return figure


# matplotlib does not say what a 3-D projection's axes are.
def _draw_surface(axes: Any, ranks: Tensor, grid: Tensor, height: Tensor, name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    x, y = np.meshgrid(ranks.numpy(), grid.numpy(), indexing="ij")
    z = height.double().numpy()
    top = float(np.nanmax(z, initial=0.0)) or 1.0
    axes.plot_surface(
        x,
        y,
        z,
        rstride=1,
        cstride=1,
        cmap="viridis",
        vmin=0,
        vmax=top,
        linewidth=0.2,
        edgecolor=(1, 1, 1, 0.4),
        rasterized=True,
    )
    axes.set_zlim(0, top)
    axes.set_title(name, y=1.01)
    axes.set_xlabel("eigenpairs K", labelpad=-4)
    axes.set_ylabel("probability", labelpad=-4)
    axes.tick_params(pad=-2)
    axes.tick_params(axis="z", pad=2)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.view_init(elev=24, azim=-52)
    axes.set_box_aspect((1.15, 1.15, 0.8), zoom=1.13)
