"""The look of every picture, and how one is written: all that is shared about matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, StorageError, library

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

_SETTINGS: dict[str, Any] = {
    "font.size": 8, "figure.titlesize": 10, "axes.titlesize": 9, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "legend.frameon": False, "legend.handlelength": 1.8,
    "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # text stays text, which journals ask for
    "svg.hashsalt": "deltabars",  # else names inside the file are random
}  # fmt: skip

# Without these entries two equal pictures would differ by a date or by matplotlib's version.
_METADATA: dict[str, dict[str, str | None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".svg": {"Date": None, "Creator": None},
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the settings of the house, whatever the user's own are; also a decorator."""
    with library("matplotlib.style", "figures").context(["default", _SETTINGS]):
        yield


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """Return an empty figure of that size in inches, known to no window and to no global list."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout=layout)


def save(figure: Figure, path: str | os.PathLike[str]) -> Figure:
    """Write a figure to a .png, .pdf or .svg file: the same bytes for the same picture."""
    suffix, known = Path(path).suffix.lower(), ", ".join(_METADATA)
    if suffix not in _METADATA:
        raise BadValueError(f"path: expected a name that ends in one of {known}, got {path}.")
    options: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if suffix == ".png" else {}
    # A layout knows the ticks' labels, and so the room they need, from the pass before.
    figure.draw_without_rendering()
    try:
        figure.savefig(path, dpi=DPI, metadata=_METADATA[suffix], **options)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}") from error
    return figure


def legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    """Put one legend under all panels, with an entry for each label."""
    entries: dict[Any, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(entries), 5)}
    figure.legend(entries.values(), entries.keys(), columnspacing=1.4, markerscale=4, **where)


_NEEDED = 3  # points within a bandwidth
_SPREAD = 1e-8  # of the points around a grid point, in squared bandwidths
_CHUNK = 8192
_GRID = 101


def smooth(x: Tensor, y: Tensor, grid: Tensor, bandwidth: float) -> Tensor:
    """Compute the local-linear regression of y on x with a Gaussian kernel, in float64.

    At each point t of the grid (g,) the value is a of the line that minimises

        Σₙ wₙ (yₙ − a − b dₙ)²        dₙ = (xₙ − t)/bandwidth,  wₙ = exp(−dₙ²/2)

    which is a = (S₂T₀ − S₁T₁)/(S₀S₂ − S₁²) with Sⱼ = Σ wₙdₙʲ and Tⱼ = Σ wₙdₙʲyₙ. It is NaN where
    fewer than three points lie within a bandwidth of t, or all have the same x. x is (n,); y is
    (n,), or (R, n) of R curves over the same x; the result is (g,), or (R, g).
    """
    rows = y if y.ndim == 2 else y[None]
    t = grid.double()
    near, s0, s1, s2 = t.new_zeros(4, len(t))
    t0, t1 = t.new_zeros(2, len(rows), len(t))
    for start in range(0, len(x), _CHUNK):
        part = slice(start, start + _CHUNK)
        d = (x[part].double() - t[:, None]) / bandwidth  # (g, chunk)
        values = rows[:, part].double()
        near += (d.abs() <= 1).sum(1)
        w = torch.exp(-0.5 * d**2)
        s0 += w.sum(1)
        t0 += values @ w.T
        w *= d
        s1 += w.sum(1)
        s2 += (w * d).sum(1)
        t1 += values @ w.T
    determinant = s0 * s2 - s1**2
    known = (near >= _NEEDED) & (determinant > _SPREAD * s0**2)
    curve = torch.where(known, (s2 * t0 - s1 * t1) / determinant, torch.nan)
    return curve if y.ndim == 2 else curve[0]


def smooth_curve(x: Tensor, y: Tensor, bandwidth: float) -> tuple[Tensor, Tensor]:
    """Smooth y at 101 even points from the lowest to the highest x (n,); return points and y."""
    if len(x) == 0:
        return x, y
    grid = torch.linspace(float(x.min()), float(x.max()), _GRID, dtype=torch.float64)
    return grid, smooth(x, y, grid, bandwidth)
