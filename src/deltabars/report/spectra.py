"""Figures of eigenvalue spectra: of a fit, of both ends for several networks, and of λ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from deltabars.fitting.tuning import Tuning
from deltabars.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltabars.fitting.fitted import DeltaFit

_DECADES = 1e-3  # magnitudes are drawn down to this share of λ: at a crossing they go to zero


@style.house_style()
def save_fit_spectra(path: str | os.PathLike[str], fit: DeltaFit) -> Figure:
    """Draw what `fit.plot_spectrum` shows into an image file."""
    figure = style.new_figure(0.7 * style.PAGE, 3.2)
    fit.plot_spectrum(figure.subplots())
    return style.save(figure, path)


@dataclass(frozen=True)
class Spectrum:
    """The ends of one matrix's spectrum, for each of several networks; lengths may differ."""

    name: str
    largest: Sequence[Tensor]  # (K,) each, descending
    smallest: Sequence[Tensor]  # (S,) each, ascending: the first one has index P; may be empty


@style.house_style()
def save_spectra(
    path: str | os.PathLike[str], spectra: Sequence[Spectrum], l2: float, num_parameters: int
) -> Figure:
    """Draw both ends of spectra into an image file, a panel an end (the paper's Figure 3).

    Magnitudes against the index: a thin line a network, and a thick one for their mean over the
    indices that all of them have. A horizontal line is λ; a vertical one shows where eigenvalues
    turn negative, the mean over the networks in whose ends that is seen.
    """
    ends = [
        (spectrum.name, [tail.double().numpy() for tail in tails], is_upper)
        for spectrum in spectra
        for tails, is_upper in ((spectrum.largest, True), (spectrum.smallest, False))
        if any(map(len, tails))
    ]
    figure = style.new_figure(style.PAGE, 2.9)
    sizes = [max(map(len, tails)) for _, tails, _ in ends]
    widths = [max(size, 0.35 * max(sizes)) for size in sizes]
    panels = figure.subplots(1, len(ends), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axes, (name, tails, is_upper) in zip(panels, ends, strict=True):
        _draw_end(axes, tails, is_upper, l2)
        axes.set_title(f"{name}, largest" if is_upper else f"{name}, smallest")
        axes.set_xlabel(f"index k of P = {num_parameters:,}" if is_upper else "index k")
    magnitudes = np.abs(np.concatenate([tail for _, tails, _ in ends for tail in tails]))
    bottom = max(magnitudes[magnitudes > 0].min(initial=l2), _DECADES * l2)
    panels[0].set_ylim(bottom / 2, 2 * magnitudes.max(initial=l2))
    panels[0].set_ylabel("magnitude of the eigenvalue")
    style.legend_below(figure, panels)
    return style.save(figure, path)


def _draw_end(axes: Axes, tails: Sequence[np.ndarray], is_upper: bool, l2: float) -> None:
    """Draw one end of a spectrum; the lower one against k − P."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for tail in tails if len(tails) > 1 else ():
        axes.plot(
            _indices(len(tail), is_upper), np.abs(tail), color=style.EIGENVALUE, linewidth=0.4
        )
    common = min(map(len, tails))
    mean = np.abs([tail[:common] for tail in tails]).mean(axis=0)
    label = f"mean of {len(tails)} networks" if len(tails) > 1 else "one network"
    axes.plot(_indices(common, is_upper), mean, color=style.EIGENVALUE, label=label)
    axes.axhline(l2, color=style.REFERENCE, linestyle=":", linewidth=0.9, label=f"λ = {l2:g}")
    negative = [int((tail < 0).sum()) for tail in tails]
    crossings = [
        0.5 + (len(tail) - count if is_upper else -count)
        for tail, count in zip(tails, negative, strict=True)
        if 0 < count < len(tail)  # otherwise it is elsewhere
    ]
    if crossings:
        label = f"mean zero crossing, seen in {len(crossings)} of {len(tails)}"
        at = sum(crossings) / len(crossings)
        axes.axvline(at, color=style.ZERO_CROSSING, linestyle=":", linewidth=1.3, label=label)
    axes.set_yscale("log")  # an exact zero is drawn below the axis
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if not is_upper:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"P − {-x:.0f}" if x else "P"))


def _indices(count: int, is_upper: bool) -> np.ndarray:
    return np.arange(1, count + 1) if is_upper else -np.arange(count)


_SHOWN = 50.0  # nats below the best that are drawn, and the width of its interval


@style.house_style()
def save_tuning(path: str | os.PathLike[str], tuning: Tuning) -> Figure:
    """Draw the log marginal likelihood with its interval, or the validation loss, against λ."""
    figure = style.new_figure(4.6, 3.2)
    axes = figure.subplots()
    levels, values, fitted = tuning.levels.numpy(), tuning.values.numpy(), tuning.fitted_level
    name = "mean validation loss" if tuning.low is None else "log marginal likelihood"
    axes.plot(levels, values, color=style.EIGENVALUE, label=name, zorder=3)
    if tuning.low is not None and tuning.high is not None:
        low, high = tuning.low.numpy(), tuning.high.numpy()
        band: dict[str, Any] = {"color": style.EIGENVALUE, "alpha": 0.2, "linewidth": 0}
        axes.fill_between(levels, low, high, label="its interval", **band)
        best = int(values.argmax())
        reach = _SHOWN + float(high[best] - low[best])
        axes.set_ylim(values[best] - reach, float(high.max()) + reach / 9)
        shown = levels[values > values[best] - reach]
        ends = min(shown[0], fitted), max(shown[-1], fitted)
        axes.set_xlim(max(ends[0] / 10, levels[0]), min(ends[1] * 10, levels[-1]))
    axes.axvline(tuning.fit.level, color=style.ZERO_CROSSING, linestyle=":", label="the best λ")
    axes.axvline(fitted, color=style.REFERENCE, linestyle="--", linewidth=0.9, label="the fitted λ")
    axes.set(xscale="log", xlabel="λ", ylabel=name)
    style.legend_below(figure, [axes])
    return style.save(figure, path)
