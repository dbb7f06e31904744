"""Pictures of eigenvalue spectra: both tails, and how they vary from network to network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.fitting.tuning import Tuning
from deltabars.report.style import (
    EIGENVALUE,
    PAGE,
    REFERENCE,
    SHADE,
    ZERO_CROSSING,
    house_style,
    legends_below,
    new_figure,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltabars.fitting.fitted import DeltaFit

_GAP = 0.16  # the drawn width of the gap, as a share of the two tails' together
_DECADES = 1e-3  # magnitudes are drawn down to this share of λ: at a crossing they go to zero
_LINE: dict[str, Any] = {"color": EIGENVALUE}
_THIN: dict[str, Any] = {"color": EIGENVALUE, "linewidth": 0.7}
_BAND: dict[str, Any] = {"color": EIGENVALUE, "alpha": 0.25, "linewidth": 0}


@dataclass(frozen=True)
class Spectrum:
    """The ends of one matrix's spectrum, for each of several trained networks.

    Lengths may differ from network to network.
    """

    name: str
    largest: Sequence[Tensor]  # (K,) each, descending
    smallest: Sequence[Tensor]  # (S,) each, ascending: the first one has index P; may be empty


def save_spectra(
    path: str | os.PathLike[str], spectra: Sequence[Spectrum], l2: float, num_parameters: int
) -> None:
    """Draw spectra into an image file, as `draw_spectra` does."""
    save(draw_spectra(spectra, l2, num_parameters), path)


def save_fit_spectra(path: str | os.PathLike[str], fit: DeltaFit) -> None:
    """Draw the spectra of a fit, a panel a matrix, with the lower end where all of it is known."""
    spectra = []
    for name, pairs in fit.spectra.items():
        # Of a part of the lower end it is not known which places its eigenvalues have.
        whole = len(pairs) + len(pairs.smallest) == fit.num_parameters
        lower = pairs.smallest.cpu()[: None if whole else 0]
        spectra.append(Spectrum(name, [pairs.values.cpu()], [lower]))
    save_spectra(path, spectra, fit.level, fit.num_parameters)


@house_style()
def draw_spectra(spectra: Sequence[Spectrum], l2: float, num_parameters: int) -> Figure:
    """Magnitudes of eigenvalues against their index, a panel a matrix (the paper's Figure 3).

    The line is the mean magnitude over the networks, the band reaches from their smallest to their
    largest; beyond the indices that all of them have, each has a thin line of its own. What was not
    computed between the tails is a gap of fixed width. A vertical line shows where eigenvalues turn
    negative: the mean over the networks where that is seen, with its range.

    Args:
        spectra: one for each panel.
        l2: λ, for a horizontal line.
        num_parameters: P, the index of the smallest eigenvalue.

    Raises:
        BadValueError: a spectrum has no network, other numbers of networks in its two tails, or
            more than P eigenvalues in them.
    """
    for spectrum in spectra:
        _check(spectrum, num_parameters)
    figure = new_figure(PAGE, 2.9)
    panels = figure.subplots(1, len(spectra), squeeze=False, sharey=True)[0]
    for axes, spectrum in zip(panels, spectra, strict=True):
        _draw_panel(axes, spectrum, l2, num_parameters)
    panels[0].set_ylabel("magnitude of the eigenvalue")
    legends_below(figure, panels, 0.25)
    values = np.concatenate([_stack([*s.largest, *s.smallest]).ravel() for s in spectra])
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    bottom = max(magnitudes.min(initial=l2), _DECADES * l2)
    panels[0].set_ylim(bottom / 2, 2 * magnitudes.max(initial=l2))
    return figure


def _check(spectrum: Spectrum, num_parameters: int) -> None:
    networks = len(spectrum.largest)
    if networks == 0 or networks != len(spectrum.smallest):
        raise BadValueError(
            f"{spectrum.name}: expected the largest and the smallest eigenvalues of one network or "
            f"more, got {networks} and {len(spectrum.smallest)}."
        )
    drawn = max(map(len, spectrum.largest)) + max(map(len, spectrum.smallest))
    if drawn > num_parameters:
        raise BadValueError(
            f"{spectrum.name}: expected {num_parameters} eigenvalues at most, got {drawn} in the "
            f"two tails, so that some would be drawn twice."
        )


def _draw_panel(axes: Axes, spectrum: Spectrum, l2: float, num_parameters: int) -> None:
    left, right = (np.abs(_stack(tail)) for tail in (spectrum.largest, spectrum.smallest))
    tails = left.shape[1], right.shape[1]
    missing = num_parameters - sum(tails)
    gap = _GAP * sum(tails) if missing else 0.0
    shift = missing - gap  # from an index in the right tail to its place

    networks = len(left)
    mean = f"mean of {networks} networks" if networks > 1 else "one network"
    ends = (
        (np.arange(1, tails[0] + 1), left),
        (np.arange(num_parameters - tails[1] + 1, num_parameters + 1) - shift, right[:, ::-1]),
    )
    for number, (places, magnitude) in enumerate(ends):
        if magnitude.shape[1] == 0:
            continue
        labels = (mean, "range over the networks") if number == 0 else (None, None)
        common = np.isfinite(magnitude).all(axis=0)
        axes.plot(places[common], magnitude[:, common].mean(axis=0), label=labels[0], **_LINE)
        if networks > 1:
            low, high = magnitude.min(axis=0), magnitude.max(axis=0)  # NaN, not drawn, beyond
            axes.fill_between(places, low, high, label=labels[1], **_BAND)
        for row in magnitude[:, ~common]:
            known = np.isfinite(row)
            if known.any():
                axes.plot(places[~common][known], row[known], label=_further(axes), **_THIN)
    axes.axhline(l2, color=REFERENCE, linestyle=":", linewidth=0.9, label=f"λ = {l2:g}")
    if missing:
        start = tails[0] + 0.5
        axes.axvspan(start, start + gap, color=SHADE, linewidth=0)
        text = f"gap: {missing:,}\neigenvalues\nnot computed"
        style: dict[str, Any] = {
            "rotation": 90,
            "ha": "center",
            "va": "top",
            "fontsize": 7,
            "color": "0.35",
        }
        axes.text(start + gap / 2, 0.96, text, transform=axes.get_xaxis_transform(), **style)
    _draw_crossings(axes, spectrum, num_parameters, shift)

    axes.set_yscale("log")  # an exact zero is drawn below the axis
    axes.set_xlim(0.5, num_parameters + 0.5 - shift)
    axes.set_title(spectrum.name)
    axes.set_xlabel(f"index k (P = {num_parameters:,})")
    _set_ticks(axes, tails, num_parameters, shift)


def _further(axes: Axes) -> str | None:
    """What a thin line is called: once a panel."""
    said = "single networks, known further"
    return None if said in axes.get_legend_handles_labels()[1] else said


def _draw_crossings(axes: Axes, spectrum: Spectrum, num_parameters: int, shift: float) -> None:
    found = [
        _crossing(largest.numpy(), smallest.numpy(), num_parameters)
        for largest, smallest in zip(spectrum.largest, spectrum.smallest, strict=True)
    ]
    longest = max(map(len, spectrum.largest))
    places = [at if at <= longest + 0.5 else at - shift for at in found if at is not None]
    if not places:
        return
    seen = "" if len(places) == len(found) else f", seen in {len(places)} of {len(found)}"
    which = "mean zero crossing" if len(found) > 1 else "zero crossing"
    line: dict[str, Any] = {"color": ZERO_CROSSING, "linestyle": ":", "linewidth": 1.3}
    axes.axvline(float(np.mean(places)), label=which + seen, **line)
    if len(places) > 1:
        band: dict[str, Any] = {"color": ZERO_CROSSING, "alpha": 0.15, "linewidth": 0}
        axes.axvspan(min(places), max(places), label="its range", **band)


def _crossing(largest: np.ndarray, smallest: np.ndarray, num_parameters: int) -> float | None:
    """The index, and a half, after which eigenvalues are negative; None where it is not seen."""
    if (largest < 0).any():
        return int((largest >= 0).sum()) + 0.5
    negative = int((smallest < 0).sum())
    in_the_gap = negative == len(smallest) and len(largest) + negative < num_parameters
    return None if negative == 0 or in_the_gap else num_parameters - negative + 0.5


def _set_ticks(axes: Axes, tails: tuple[int, int], num_parameters: int, shift: float) -> None:
    from matplotlib.ticker import MaxNLocator

    def steps(count: int) -> list[int]:
        most = max(1, round(6 * count / sum(tails)))  # as many as have room
        found = MaxNLocator(most, integer=True).tick_values(0, count)
        return [int(k) for k in found if 0 < k <= count]

    left = sorted({1, *steps(tails[0])})
    right = [0, *steps(tails[1] - 1)] if num_parameters > tails[0] else []
    labels = [f"{k:,}" for k in left] + [f"P−{k:,}" if k else "P" for k in right]
    places = [*left, *(num_parameters - k - shift for k in right)]
    axes.set_xticks(places, labels)


def _stack(tails: Sequence[Tensor]) -> np.ndarray:
    """Eigenvalues (networks, longest) in float64, with NaN where a network has no more."""
    stacked = np.full((len(tails), max(map(len, tails))), np.nan)
    for row, tail in zip(stacked, tails, strict=True):
        row[: len(tail)] = tail.numpy()
    return stacked


_WIDTH, _HEIGHT = 4.6, 3.2  # inches
_SHOWN = 50.0  # nats below the best that are drawn, and the width of its interval


def save_tuning(path: str | os.PathLike[str], tuning: Tuning) -> None:
    """Draw a search over λ into an image file, as `draw_tuning` does."""
    save(draw_tuning(tuning), path)


@house_style()
def draw_tuning(tuning: Tuning) -> Figure:
    """The log marginal likelihood with its interval, or the validation loss, against λ.

    The best λ and the fitted one are marked. What lies far below the best is cut off.
    """
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.subplots()
    levels, values = tuning.levels.numpy(), tuning.values.numpy()
    has_interval = tuning.low is not None and tuning.high is not None
    name = "log marginal likelihood" if has_interval else "mean validation loss"
    axes.plot(levels, values, color=EIGENVALUE, label=name, zorder=3)
    if tuning.low is not None and tuning.high is not None:
        band: dict[str, Any] = {"color": EIGENVALUE, "alpha": 0.2, "linewidth": 0}
        low, high = tuning.low.numpy(), tuning.high.numpy()
        axes.fill_between(levels, low, high, label="its interval", **band)
        best = int(values.argmax())
        reach = _SHOWN + float(high[best] - low[best])
        axes.set_ylim(values[best] - reach, float(high.max()) + reach / 9)
        shown = levels[values > values[best] - reach]
        ends = min(shown[0], tuning.fitted_level), max(shown[-1], tuning.fitted_level)
        axes.set_xlim(max(ends[0] / 10, levels[0]), min(ends[1] * 10, levels[-1]))
    else:
        axes.set_xlim(levels[0], levels[-1])
    mark: dict[str, Any] = {"linestyle": ":", "linewidth": 1.3}
    axes.axvline(tuning.fit.level, color=ZERO_CROSSING, label="the best λ", **mark)
    fitted = tuning.fitted_level
    axes.axvline(fitted, color=REFERENCE, linestyle="--", linewidth=0.9, label="the fitted λ")
    axes.set_xscale("log")
    axes.set_xlabel("λ")
    axes.set_ylabel(name)
    legends_below(figure, [axes], 0.2)
    return figure
