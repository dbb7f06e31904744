"""A fit in a few lines of text, and as tables in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deltabars.drawing import draw_fit
from deltabars.markup import html_table, paragraph

if TYPE_CHECKING:
    from deltabars.decay import L2
    from deltabars.fitted import DeltaFit


SANDWICH, REACH = "sandwich", "interval_reach"
WORTH_READING = 0.5  # of a std: an interval that reaches further says little


class Shown:
    """How a fit shows itself: as text, in a notebook, and drawn."""

    def __repr__(self: Any) -> str:
        return describe(self)

    def _repr_html_(self: Any) -> str:
        return describe_in_html(self)

    def plot_spectrum(self: Any, ax: Any = None) -> Any:
        """Draw the eigenvalues against their index into `ax`, or a new figure; returns the Axes.

        Dotted is λ; shaded is where the eigenvalues lie that were not computed, if none is below λ.
        """
        return draw_fit(self, ax)


def describe(fit: DeltaFit) -> str:
    """What was fitted, its spectra, and how many parameters they determine."""
    numbers = ", ".join(f"{name} = {value}" for name, value in _numbers(fit).items())
    lines = [f"DeltaFit: {fit.estimator}, {numbers}"]
    for name, pairs in fit.spectra.items():
        lines.append(
            f"  {name}: eigenvalues {float(pairs.values[0]):.4g} … "
            f"{float(pairs.values[-1]):.4g}"
            f", largest residual {float(pairs.residuals.max()):.1g}"
        )
    lines += [f"  {note}" for note in _notes(fit)]
    return "\n".join(lines)


def describe_in_html(fit: DeltaFit) -> str:
    """The same as tables."""
    numbers = _numbers(fit)
    spectra = [
        [
            name,
            f"{float(pairs.values[0]):.4g}",
            f"{float(pairs.values[-1]):.4g}",
            f"{float(pairs.values[-1]) / fit.level:.4g}",
            f"{float(pairs.residuals.max()):.1g}",
        ]
        for name, pairs in fit.spectra.items()
    ]
    titles = ["matrix", "λ₁", "λ_K", "λ_K / λ", "largest residual"]
    return (
        paragraph(f"DeltaFit: {fit.estimator}")
        + html_table(list(numbers), [list(numbers.values())])
        + html_table(titles, spectra)
        + "".join(paragraph(note) for note in _notes(fit))
    )


def _numbers(fit: DeltaFit) -> dict[str, str]:
    numbers = {
        "N": f"{fit.num_examples:,}",
        "P": f"{fit.num_parameters:,}",
        "K": f"{fit.rank:,}",
        "λ": _in_words(fit.l2),
    }
    return numbers if fit.noise is None else numbers | {"σ": f"{fit.noise:g}"}


def _notes(fit: DeltaFit) -> list[str]:
    notes = []
    hessian = fit.spectra.get("hessian")
    if hessian is not None and hessian.least < fit.level:
        notes.append(
            f"the hessian's spectrum reaches {fit.level - hessian.least:.3g} below λ: its "
            "bounds are about the spectrum corrected to λ"
        )
    reach = fit.diagnostics.get(SANDWICH, {}).get(REACH, 0.0)
    if reach > WORTH_READING:
        notes.append(
            f"the sandwich's intervals say little: up to ±{reach:.2g} times the std of what is "
            "outside the pairs; a larger rank narrows them"
        )
    lost = max(pairs.rounding for pairs in fit.spectra.values())
    if lost:
        notes.append(f"eigenvectors were rounded by up to {lost:.2g}, which the bounds count")
    return [*notes, f"effective parameters: {fit.effective_parameters:.1f} in the K pairs"]


def _in_words(l2: L2) -> str:
    if not isinstance(l2, Mapping):
        return f"{l2:g}"
    return ", ".join(f"{value:g} ({pattern})" for pattern, value in l2.items())
