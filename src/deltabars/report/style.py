"""The look of every picture, and how one is written: all that is shared about matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deltabars.errors import BadValueError, MissingDependencyError, StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
PAGE = 7.2  # inches, the width of a page's text: fonts then print in the sizes below

# Okabe and Ito's colours, which the colour-blind tell apart, by the part they play.
TRUE_POSITIVE = "#0072B2"
FALSE_POSITIVE = "#E69F00"
FULL_RANK = "#009E73"
LOW_RANK = "#0072B2"
EIGENVALUE = "#0072B2"
ZERO_CROSSING = "#009E73"
REGRESSION = "#D55E00"
REFERENCE = "#000000"
FAINT = "#A6A6A6"
SHADE = "#EEEEEE"

_SETTINGS: dict[str, Any] = {
    "font.size": 8,
    "figure.titlesize": 10,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "lines.linewidth": 1.3,
    "grid.color": "#D0D0D0",
    "grid.linewidth": 0.5,
    "patch.linewidth": 0.6,
    "pdf.fonttype": 42,  # text stays text, which journals ask for
    "svg.hashsalt": "deltabars",  # else names inside the file are random
}

# Without these entries two equal pictures would differ by a date or by matplotlib's version.
_METADATA: dict[str, dict[str, str | None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".svg": {"Date": None, "Creator": None},
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the settings of the house, whatever the user's own are; also a decorator.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise MissingDependencyError(
            "Pictures need matplotlib: pip install 'deltabars[figures]'."
        ) from error
    with style.context(["default", _SETTINGS]):
        yield


def new_figure(
    width: float,
    height: float,
    layout: Literal["constrained", "compressed"] | None = "constrained",
) -> Figure:
    """An empty figure of that size in inches, known to no window and to no global list."""
    with house_style():
        from matplotlib.figure import Figure

        return Figure(figsize=(width, height), dpi=DPI, layout=layout)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a .png, .pdf or .svg file: the same bytes for the same picture.

    Raises:
        BadValueError: the file's name ends otherwise.
        StorageError: the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _METADATA:
        raise BadValueError(
            f"path: expected a name that ends in one of {', '.join(_METADATA)}, got {path}."
        )
    options: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if suffix == ".png" else {}
    # Ticks are made while drawing, so the settings must hold here too.
    with house_style():
        # A layout knows the ticks' labels, and so the room they need, from the pass before.
        figure.draw_without_rendering()
        try:
            figure.savefig(path, dpi=DPI, metadata=_METADATA[suffix], **options)
        except OSError as error:
            raise StorageError(f"Cannot write {path}: {error.strerror or error}") from error


def legends_below(figure: Figure, panels: Sequence[Axes], drop: float) -> None:
    """One legend under all panels where it can serve them all, else one under each.

    It can where the entries of one panel include those of all others.

    Args:
        figure: the panels' figure.
        panels: axes with labelled lines, bands and dots.
        drop: how far below a panel its own legend starts, as a share of the panel's height.
    """
    entries = [axes.get_legend_handles_labels() for axes in panels]
    handles, labels = max(entries, key=lambda entry: len(entry[1]))
    spacing = {"columnspacing": 1.4, "markerscale": 4}
    if all(set(own) <= set(labels) for _, own in entries):
        columns = min(len(labels), 5)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **spacing)
        return
    for axes in panels:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -drop), borderaxespad=0, **spacing)
