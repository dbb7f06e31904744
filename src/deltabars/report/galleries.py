"""Pictures of the inputs that a network is most and least certain of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from deltabars.report.style import DPI, house_style, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One row of pictures (n, H, W) with a title, and a caption under each."""

    title: str
    images: Tensor
    captions: Sequence[str]


def save_gallery(path: str | os.PathLike[str], title: str, rows: Sequence[Row]) -> None:
    """Draw rows of grey pictures into an image file."""
    save(draw_gallery(title, rows), path)


@house_style()
def draw_gallery(title: str, rows: Sequence[Row]) -> Figure:
    """Rows of grey pictures, dark on white, with their captions."""
    columns = max(len(row.images) for row in rows)
    figure = new_figure(1.35 * columns, 2.15 * len(rows) + 0.4)
    figure.suptitle(title, fontsize=13)
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False).flat, rows, strict=True):
        part.suptitle(row.title, fontsize=11, x=0.01, ha="left")
        places = list(part.subplots(1, columns, squeeze=False).flat)
        for axes, image, caption in zip(places, row.images, row.captions, strict=False):
            axes.imshow(image.cpu().numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set_xlabel(caption, fontsize=8)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(True)
        for axes in places[len(row.images) :]:
            axes.set_axis_off()
    return figure


_DOTS = 2  # of the picture, in each direction, for a pixel of an image
_EDGE = 20  # dots around everything and between blocks
_TITLE = 44  # dots for a block's title, and for the title of all
_WHOLE = 1e-6  # of a dot, so that a product with DPI is not rounded down to one dot less
_LETTER = 12  # dots that a letter of a class's name needs at most


@dataclass(frozen=True)
class Block:
    """k images of each of C classes, with pixels in [0, 1]."""

    title: str
    images: Tensor  # (C, k, H, W), drawn dark on white, or (C, k, 3, H, W), in colour
    class_names: Sequence[str]


def save_rankings(path: str | os.PathLike[str], blocks: Sequence[Block], title: str) -> None:
    """Draw blocks of images into an image file, as `draw_rankings` does."""
    save(draw_rankings(blocks, title), path)


@house_style()
def draw_rankings(blocks: Sequence[Block], title: str) -> Figure:
    """Blocks side by side, a row a class (the paper's Figure 8).

    Every pixel of an image becomes 2×2 dots of a .png, so that nothing is blurred. Colours are
    rounded to multiples of 4/255, which the eye cannot tell and which saves over a quarter of the
    file. The names of the classes stand at the left of a block, unless the one before it has the
    same.
    """
    sheets = [_sheet(block) for block in blocks]
    names = [
        block.class_names
        if place == 0 or block.class_names != blocks[place - 1].class_names
        else ()
        for place, block in enumerate(blocks)
    ]
    margins = [_EDGE + _LETTER * max(map(len, these), default=0) for these in names]
    width = sum(margins) + sum(_DOTS * sheet.shape[1] for sheet in sheets) + _EDGE
    height = _DOTS * max(sheet.shape[0] for sheet in sheets) + _EDGE + 2 * _TITLE
    # Sizes are whole dots: no layout may move the images off them.
    figure = new_figure((width + _WHOLE) / DPI, (height + _WHOLE) / DPI, layout=None)
    figure.suptitle(title, y=1 - 0.25 * _TITLE / height, va="top")
    left = 0
    for block, sheet, these, margin in zip(blocks, sheets, names, margins, strict=True):
        tall, wide = _DOTS * sheet.shape[0], _DOTS * sheet.shape[1]
        left += margin
        bottom = height - 2 * _TITLE - tall
        axes = figure.add_axes((left / width, bottom / height, wide / width, tall / height))
        axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set_title(block.title)
        axes.set_xticks([])
        rows = (np.arange(len(these)) + 0.5) * (sheet.shape[0] / len(block.images)) - 0.5
        axes.set_yticks(rows, these)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(True)
        left += wide
    return figure


def _sheet(block: Block) -> np.ndarray:
    """All images of a block in one: (C·(H + 1) − 1, k·(W + 1) − 1), and (…, 3) for colours."""
    images = block.images.numpy()
    if images.ndim == 5:
        images, blank = _rounded(images.transpose(0, 1, 3, 4, 2)), 1.0
    else:
        images, blank = 1 - images, 0.8
    rows, columns, tall, wide = images.shape[:4]
    sheet = np.full((rows, tall + 1, columns, wide + 1, *images.shape[4:]), blank, images.dtype)
    sheet[:, :tall, :, :wide] = images.swapaxes(1, 2)
    sheet = sheet.reshape(rows * (tall + 1), columns * (wide + 1), *images.shape[4:])
    return sheet[:-1, :-1]


def _rounded(colours: np.ndarray) -> np.ndarray:
    """Colours in [0, 1] to the nearest of the bytes 0, 4, 8, …, 252 and 255."""
    return np.minimum(np.round(colours * 255 / 4) * 4, 255) / 255
