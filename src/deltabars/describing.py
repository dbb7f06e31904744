"""A fit in a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltabars.decay import L2
    from deltabars.fitted import DeltaFit


def describe(fit: DeltaFit) -> str:
    """What was fitted, its spectra, and how many parameters they determine."""
    lines = [
        f"DeltaFit: {fit.estimator}, N = {fit.num_examples:,}, P = {fit.num_parameters:,}, "
        f"K = {fit.rank:,}, λ = {_in_words(fit.l2)}"
        + ("" if fit.noise is None else f", σ = {fit.noise:g}")
    ]
    for name, pairs in fit.spectra.items():
        lines.append(
            f"  {name}: eigenvalues {float(pairs.values[0]):.4g} … "
            f"{float(pairs.values[-1]):.4g}"
            f", largest residual {float(pairs.residuals.max()):.1g}"
        )
    hessian = fit.spectra.get("hessian")
    if hessian is not None and hessian.least < fit.level:
        lines.append(
            f"  the hessian's spectrum reaches {fit.level - hessian.least:.3g} below λ: its "
            "bounds are about the spectrum corrected to λ"
        )
    lines.append(f"  effective parameters: {fit.effective_parameters:.1f} in the K pairs")
    return "\n".join(lines)


def _in_words(l2: L2) -> str:
    if not isinstance(l2, Mapping):
        return f"{l2:g}"
    return ", ".join(f"{value:g} ({pattern})" for pattern, value in l2.items())
