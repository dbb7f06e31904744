"""Pictures of the inputs that a network is most and least certain of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
