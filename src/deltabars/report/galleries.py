"""Pictures of the inputs that a network is most and least certain of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from deltabars.report.style import house_style, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One row of pictures (n, H, W) with a title, and a caption under each."""

    title: str
    images: Tensor
    captions: Sequence[str]


@house_style()
def save_gallery(path: str | os.PathLike[str], title: str, rows: Sequence[Row]) -> Figure:
    """Draw rows of grey pictures, dark on white, with their captions, into an image file."""
    columns = max(len(row.images) for row in rows)
    figure = new_figure(1.35 * columns, 2.15 * len(rows) + 0.4)
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
    return save(figure, path)


_PIXEL = 0.01  # inches


@dataclass(frozen=True)
class Block:
    """k images of each of C classes, with pixels in [0, 1]."""

    title: str
    images: Tensor  # (C, k, H, W), drawn dark on white, or (C, k, 3, H, W), in colour
    class_names: Sequence[str]


@house_style()
def save_rankings(path: str | os.PathLike[str], blocks: Sequence[Block], title: str) -> Figure:
    """Draw blocks of images side by side, a row a class (the paper's Figure 8).

    The names of the classes stand at the left of a block, unless the one before it has the same.
    """
    sheets = [_sheet(block) for block in blocks]
    width, height = sum(sheet.shape[1] for sheet in sheets), max(len(sheet) for sheet in sheets)
    figure = new_figure(_PIXEL * width + 1.5, _PIXEL * height + 0.7, "compressed")
    figure.suptitle(title)
    ratios = [sheet.shape[1] for sheet in sheets]
    panels = figure.subplots(1, len(blocks), squeeze=False, width_ratios=ratios)[0]
    named: Sequence[str] = ()
    for axes, block, sheet in zip(panels, blocks, sheets, strict=True):
        axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=block.title, xticks=[], yticks=[])
        if block.class_names != named:
            named, tall = block.class_names, len(sheet) / len(block.images)
            axes.set_yticks((np.arange(len(named)) + 0.5) * tall - 0.5, named)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(True)
    return save(figure, path)


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
