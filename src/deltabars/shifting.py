"""A fit at another λ: the eigenvalues move by the difference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deltabars.covariance import warn_about_spectrum
from deltabars.decay import L2, Decay
from deltabars.noise import with_settled_noise

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit


def with_l2(fit: DeltaFit, l2: L2) -> DeltaFit:
    """The same fit for another λ, its noise estimated anew if it was estimated. Cost: nothing."""
    decay = Decay.read(l2, fit.network.parameters, fit.decay.scales or None)
    shift = decay.level - fit.level
    spectra = {name: pairs.shifted(shift) for name, pairs in fit.spectra.items()}
    for name, pairs in spectra.items():
        warn_about_spectrum(
            name,
            pairs.values,
            decay.level,
            fit.num_parameters,
            pairs.vectors.dtype,
            stacklevel=4,
            residuals=pairs.residual_norms,
        )
    diagnostics = {**fit.diagnostics, "fitted_l2": fit.diagnostics.get("fitted_l2", fit.l2)}
    moved = replace(fit, decay=decay, spectra=spectra, diagnostics=diagnostics, _covariances={})
    if "overlap" in fit.__dict__:
        moved.__dict__["overlap"] = fit.overlap  # it depends on the vectors alone
    return with_settled_noise(moved)
