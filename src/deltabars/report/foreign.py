"""Pictures of how the score of an input unlike the training data grows with the rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deltabars.report.style import (
    FULL_RANK,
    LOW_RANK,
    PAGE,
    REFERENCE,
    house_style,
    legends_below,
    new_figure,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def save_foreign(path: str | os.PathLike[str], foreign: Foreign, title: str) -> None:
    """Draw a foreign input and its scores into an image file, as `draw_foreign` does."""
    save(draw_foreign(foreign, title), path)


@house_style()
def draw_foreign(foreign: Foreign, title: str) -> Figure:
    """Scores against K with full and with low rank, and the image (the paper's Figure 7)."""
    figure = new_figure(PAGE, 2.9)
    figure.suptitle(title)
    curves, picture = figure.subplots(1, 2, width_ratios=(3, 1))
    _draw_curves(curves, foreign)
    legends_below(figure, [curves], 0.2)
    image = foreign.image.numpy()
    colours = image.transpose(1, 2, 0) if image.ndim == 3 else image
    picture.imshow(colours, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    picture.set_xticks([])
    picture.set_yticks([])
    picture.spines[:].set_visible(True)
    picture.set_title("the foreign image")
    return figure


def _draw_curves(axes: Axes, foreign: Foreign) -> None:
    ranks = foreign.ranks.numpy()
    low, high = foreign.full_low.numpy(), foreign.full_high.numpy()
    axes.plot(ranks, foreign.full.numpy(), color=FULL_RANK, zorder=4, label="full rank")
    band: dict[str, Any] = {"color": FULL_RANK, "alpha": 0.2, "linewidth": 0}
    axes.fill_between(ranks, low, high, label="its error interval", **band)
    axes.plot(ranks, foreign.low_rank.numpy(), color=LOW_RANK, zorder=4, label="low rank")
    count = len(foreign.references)
    number = "ten" if count == 10 else f"{count}"
    for place, scores in enumerate(foreign.references):
        label = f"{number} highest training scores, full rank" if place == 0 else None
        axes.plot(ranks, scores.numpy(), color=REFERENCE, linewidth=0.6, alpha=0.6, label=label)
    axes.set_xlim(ranks.min(), ranks.max())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("eigenpairs K")
    axes.set_ylabel("score")
