"""Figures of error bars and scores, and of the inputs that a network is most certain of."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deltabars.fitting.checking import Check
from deltabars.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
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


@style.house_style()
def save_uncertainty(path: Path, panels: Sequence[Panel], title: str = "") -> Figure:
    """Draw std against probability, a panel an estimator (the paper's Figure 5).

    Grey dots are pairs of a probability and its std, 100,000 at most. The curves are local-linear
    regressions over the predicted class's pairs, of right predictions (true positives) and of wrong
    ones (false positives), where there are enough nearby.
    """
    figure = style.new_figure(style.PAGE, 2.7)
    figure.suptitle(title)
    places = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, panel in zip(places, panels, strict=True):
        _draw_panel(axes, panel)
    highest = max(float(panel.std.max()) for panel in panels)
    places[0].set_xlim(-0.02, 1.02)
    places[0].set_ylim(-0.02 * highest, 1.05 * highest)
    places[0].set_ylabel("std of the probability")
    style.legend_below(figure, places)
    return style.save(figure, path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    x, y = panel.probability.flatten(), panel.std.flatten()
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_MOST_DOTS]
    dots: dict[str, Any] = {"s": 1.2, "color": style.FAINT, "linewidths": 0, "alpha": 0.5}
    axes.scatter(x[chosen].numpy(), y[chosen].numpy(), label="all classes", rasterized=True, **dots)
    top = panel.label[:, None]
    p, std = panel.probability.gather(1, top)[:, 0], panel.std.gather(1, top)[:, 0]
    for name, color, these in (
        ("true positives", style.TRUE_POSITIVE, panel.right),
        ("false positives", style.FALSE_POSITIVE, ~panel.right),
    ):
        grid, curve = style.smooth_curve(p[these], std[these], _BANDWIDTH)
        axes.plot(grid.numpy(), curve.numpy(), color="white", linewidth=3, zorder=2.5)
        axes.plot(grid.numpy(), curve.numpy(), color=color, linewidth=1.8, label=name, zorder=3)
    right, wrong = int(panel.right.sum()), int((~panel.right).sum())
    axes.set(title=panel.title, xlabel=f"probability ({right:,} true, {wrong:,} false positives)")


_IN_A_ROW, _CELLS = 3, 50  # panels; cells across one


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


@style.house_style()
def save_comparisons(path: Path, panels: Sequence[Comparison], title: str = "") -> Figure:
    """Draw how many pairs lie where, with the regression line and the identity, a panel each.

    Cells are coloured by the logarithm of their counts, on one scale for all panels. Both axes of
    a panel have the same limits.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm

    columns = 2 if len(panels) == 4 else min(len(panels), _IN_A_ROW)
    rows = -(-len(panels) // columns)
    width = min(style.PAGE, 0.9 + 2.4 * columns)
    figure = style.new_figure(width, 2.35 * rows + 0.55, "compressed")
    figure.suptitle(title)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    places = every[: len(panels)]
    for unused in every[len(panels) :]:
        unused.remove()
    cells = [_draw_comparison(axes, panel) for axes, panel in zip(places, panels, strict=True)]
    # The palest blues could not be told from the paper.
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.25, 1, 256)))
    most = max(float(np.asarray(cell.get_array()).max()) for cell in cells)
    for cell in cells:
        cell.set_norm(LogNorm(1, max(most, 2)))
        cell.set_cmap(shades)
    style.legend_below(figure, places)
    figure.colorbar(cells[-1], ax=places, shrink=0.9 / rows, pad=0.02, label="pairs in a cell")
    return style.save(figure, path)


def _draw_comparison(axes: Axes, panel: Comparison) -> PolyCollection:
    from matplotlib.ticker import MaxNLocator

    x, y = panel.x.double().numpy(), panel.y.double().numpy()
    low = min(0.0, x.min(), y.min())
    high = max(x.max(), y.max(), low + 1e-12)
    ends = low, high + 0.02 * (high - low)
    where: dict[str, Any] = {"gridsize": _CELLS, "extent": (*ends, *ends), "mincnt": 1}
    cells = axes.hexbin(x, y, linewidths=0, rasterized=True, **where)
    thin: dict[str, Any] = {"color": style.REFERENCE, "linestyle": ":", "linewidth": 0.9}
    axes.axline((0, 0), slope=1, label="identity", **thin)
    if not math.isnan(panel.slope):
        line: dict[str, Any] = {"color": style.REGRESSION, "linewidth": 1.2, "label": "regression"}
        axes.axline((0, panel.intercept), slope=panel.slope, **line)
        intercept = round(panel.intercept, 4) + 0.0  # not −0.0000
        numbers = f"R² = {panel.r2:.3f}\nslope = {panel.slope:.3f}\nintercept = {intercept:.4f}"
        # The corner that the points stay away from.
        across, up, align = (0.97, 0.04, "right") if panel.slope > 0.5 else (0.05, 0.76, "left")
        at: dict[str, Any] = {"transform": axes.transAxes, "ha": align, "fontsize": 7}
        axes.text(across, up, numbers.replace("-", "−"), **at)
    axes.set(xlim=ends, ylim=ends, aspect="equal", title=panel.title)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4))
    return cells


@style.house_style()
def save_surfaces(
    path: Path, ranks: Tensor, grid: Tensor, std: Tensor, error: Tensor, title: str
) -> Figure:
    """Draw smoothed std (R, g) and its error over K (R,) and probability (g,): Figure 6."""
    figure = style.new_figure(style.PAGE, 2.9)
    figure.suptitle(title)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, height, name in zip(panels, (std, error), ("std", "error of the std"), strict=True):
        top = float(height.nan_to_num().max()) or 1.0
        cells = ranks.numpy(), grid.numpy(), height.T.numpy()
        mesh = axes.pcolormesh(*cells, vmin=0, vmax=top, rasterized=True)
        figure.colorbar(mesh, ax=axes)
        axes.set(title=name, xlabel="eigenpairs K")
    panels[0].set_ylabel("probability")
    return style.save(figure, path)


@dataclass(frozen=True)
class Foreign:
    """One foreign input and its scores at R ranks, beside those of n training inputs."""

    image: Tensor  # (H, W) or (3, H, W), pixels in [0, 1]
    ranks: Tensor  # (R,), ascending
    full: Tensor  # (R,), the full-rank score
    full_low: Tensor  # (R,), the interval that contains the exact score
    full_high: Tensor  # (R,)
    low_rank: Tensor  # (R,), the score of the K computed eigenpairs alone
    references: Tensor  # (n, R), full-rank scores of training inputs


@style.house_style()
def save_foreign(path: Path, foreign: Foreign, title: str) -> Figure:
    """Draw scores against K with full and with low rank, and the image (the paper's Figure 7)."""
    figure = style.new_figure(style.PAGE, 2.9)
    figure.suptitle(title)
    axes, picture = figure.subplots(1, 2, width_ratios=(3, 1))
    ranks = foreign.ranks.numpy()
    low, high = foreign.full_low.numpy(), foreign.full_high.numpy()
    axes.plot(ranks, foreign.full.numpy(), color=style.FULL_RANK, zorder=4, label="full rank")
    band: dict[str, Any] = {"color": style.FULL_RANK, "alpha": 0.2, "linewidth": 0}
    axes.fill_between(ranks, low, high, label="its error interval", **band)
    axes.plot(ranks, foreign.low_rank.numpy(), color=style.LOW_RANK, zorder=4, label="low rank")
    thin: dict[str, Any] = {"color": style.REFERENCE, "linewidth": 0.6, "alpha": 0.6}
    lines = axes.plot(ranks, foreign.references.numpy().T, **thin)
    lines[0].set_label(f"{len(foreign.references)} highest training scores, full rank")
    axes.set(xlim=(ranks.min(), ranks.max()), xlabel="eigenpairs K", ylabel="score")
    axes.set_ylim(bottom=0)
    style.legend_below(figure, [axes])
    image = foreign.image.numpy()
    colours = image.transpose(1, 2, 0) if image.ndim == 3 else image
    picture.imshow(colours, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    picture.set(xticks=[], yticks=[], title="the foreign image")
    picture.spines[:].set_visible(True)
    return style.save(figure, path)


@dataclass(frozen=True)
class Row:
    """One row of pictures (n, H, W) with a title, and a caption under each."""

    title: str
    images: Tensor
    captions: Sequence[str]


@style.house_style()
def save_gallery(path: Path, title: str, rows: Sequence[Row]) -> Figure:
    """Draw rows of grey pictures, dark on white, with their captions, into an image file."""
    columns = max(len(row.images) for row in rows)
    figure = style.new_figure(1.35 * columns, 2.15 * len(rows) + 0.4)
    figure.suptitle(title, fontsize=13)
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False).flat, rows, strict=True):
        part.suptitle(row.title, fontsize=11, x=0.01, ha="left")
        places = list(part.subplots(1, columns, squeeze=False).flat)
        for axes, image, caption in zip(places, row.images, row.captions, strict=False):
            axes.imshow(image.cpu().numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set_xlabel(caption, fontsize=8)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(True)
        for axes in places[len(row.images) :]:
            axes.set_axis_off()
    return style.save(figure, path)


_PIXEL = 0.01  # inches


@dataclass(frozen=True)
class Block:
    """k images of each of C classes, with pixels in [0, 1]."""

    title: str
    images: Tensor  # (C, k, H, W), drawn dark on white, or (C, k, 3, H, W), in colour
    class_names: Sequence[str]


@style.house_style()
def save_rankings(path: Path, blocks: Sequence[Block], title: str) -> Figure:
    """Draw blocks of images side by side, a row a class, named once (the paper's Figure 8)."""
    sheets = [_sheet(block) for block in blocks]
    widths, height = [sheet.shape[1] for sheet in sheets], max(map(len, sheets))
    figure = style.new_figure(_PIXEL * sum(widths) + 1.5, _PIXEL * height + 0.7, "compressed")
    figure.suptitle(title)
    panels = figure.subplots(1, len(blocks), squeeze=False, width_ratios=widths)[0]
    named: Sequence[str] = ()
    for axes, block, sheet in zip(panels, blocks, sheets, strict=True):
        axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=block.title, xticks=[], yticks=[])
        if block.class_names != named:
            named, tall = block.class_names, len(sheet) / len(block.images)
            axes.set_yticks((np.arange(len(named)) + 0.5) * tall - 0.5, named)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(True)
    return style.save(figure, path)


def _sheet(block: Block) -> np.ndarray:
    """Join all images of a block: (C·(H + 1) − 1, k·(W + 1) − 1), and (…, 3) for colours."""
    images = block.images.numpy()
    is_grey = images.ndim == 4
    images = 1 - images if is_grey else images.transpose(0, 1, 3, 4, 2)
    rows, columns, tall, wide = images.shape[:4]
    shape = (rows, tall + 1, columns, wide + 1, *images.shape[4:])
    sheet = np.full(shape, 0.8 if is_grey else 1.0, images.dtype)
    sheet[:, :tall, :, :wide] = images.swapaxes(1, 2)
    return sheet.reshape(rows * (tall + 1), columns * (wide + 1), *images.shape[4:])[:-1, :-1]


_CHECK_SIDE = 3.4  # inches


@style.house_style()
def save_checks(path: str | os.PathLike[str], checks: Sequence[Check]) -> Figure:
    """Draw each check in a panel: what retraining moved against what the bar says, a point each."""
    figure = style.new_figure(_CHECK_SIDE * len(checks), _CHECK_SIDE)
    for axes, check in zip(figure.subplots(1, len(checks), squeeze=False)[0], checks, strict=True):
        check.plot(axes)
        found = check.agreement
        axes.set_title(f"R² {found.r_squared:.2f}, Spearman {found.spearman:.2f}")
    return style.save(figure, path)
