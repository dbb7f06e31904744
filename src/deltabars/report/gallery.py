"""Pictures of the inputs that a network is most and least certain of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deltabars.errors import MissingDependencyError, StorageError


@dataclass(frozen=True)
class Row:
    """One row of pictures (n, H, W) with a title, and a caption under each."""

    title: str
    images: Tensor
    captions: Sequence[str]


def save_gallery(path: str | os.PathLike[str], title: str, rows: Sequence[Row]) -> None:
    """Draw rows of grey pictures into an image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "Pictures need matplotlib: pip install 'deltabars[demo]'."
        ) from error
    columns = max(len(row.images) for row in rows)
    figure = Figure(figsize=(1.35 * columns, 2.3 * len(rows) + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=13)
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False).flat, rows, strict=True):
        part.suptitle(row.title, fontsize=11, x=0.01, ha="left")
        places = list(part.subplots(1, columns, squeeze=False).flat)
        for axes, image, caption in zip(places, row.images, row.captions, strict=False):
            axes.imshow(image.cpu().numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set_xlabel(caption, fontsize=8)
            axes.set_xticks([])
            axes.set_yticks([])
        for axes in places[len(row.images) :]:
            axes.set_axis_off()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}") from error
