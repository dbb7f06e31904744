"""The noise σ of regression: what it does to eigenpairs, and how residuals tell it.

A fit holds the eigenpairs of the loss ½‖r‖², which its λ belongs to. −log p is that loss over σ²,
and the cost with it, so that, with A and A_G the data parts at σ = 1,

    H, GGN = (A + λI)/σ²        G = A_G/σ⁴ + λI/σ² = (A_G/σ² + λI)/σ²

The common factor 1/σ² is one on N, in Σ = H⁻¹/N as in H⁻¹GH⁻¹/N: an example says 1/σ² times as
much. What is left is the data part of G, over σ². Neither eigenvectors nor λ change.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deltabars.covariance import ESTIMATORS
from deltabars.eigen import EigenPairs
from deltabars.errors import BadValueError
from deltabars.likelihoods import Gaussian
from deltabars.likelihoods.gaussian import check_noise

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit


def at_noise(name: str, pairs: EigenPairs, l2: float, noise: float | None) -> EigenPairs:
    """The eigenpairs of σ² times a matrix at noise σ, λ included, from those at noise 1."""
    if name != "opg" or noise is None or noise == 1:
        return pairs
    factor = 1 / noise**2
    return pairs.mapped(factor, l2 * (1 - factor))


def with_noise(fit: DeltaFit, noise: Any) -> DeltaFit:
    """The same fit at another noise; None or `"estimate"` for that of the residuals."""
    if not isinstance(fit.likelihood, Gaussian):
        raise BadValueError(
            f"noise: expected a fit with a Gaussian likelihood, got {fit.likelihood.name}, which "
            "has none."
        )
    given = check_noise(noise)
    likelihood = Gaussian(estimate_noise(fit) if given is None else given)
    moved = replace(fit, likelihood=likelihood, _covariances={})
    if "overlap" in fit.__dict__:
        moved.__dict__["overlap"] = fit.overlap  # it depends on the vectors alone
    return moved


def with_settled_noise(fit: DeltaFit) -> DeltaFit:
    """The fit itself, with its noise estimated where that is what its likelihood asks for."""
    is_open = isinstance(fit.likelihood, Gaussian) and fit.likelihood.noise is None
    return with_noise(fit, None) if is_open else fit


def estimate_noise(fit: DeltaFit) -> float:
    """σ̂ with σ̂² = RSS/(N·C − γ), γ the effective parameters in the computed pairs.

    γ of G depends on σ: then σ̂ is where both sides agree, which is at one place, as
    σ²·(N·C − γ(σ)) grows with σ. Of a sandwich fit γ is that of the Hessian.

    Raises:
        BadValueError: no residuals, or no more targets than effective parameters.
    """
    name = ESTIMATORS[fit.estimator][0]
    targets = fit.num_examples * fit.num_outputs
    squares = 2 * fit.num_examples * fit.diagnostics["mean_loss"]  # RSS

    def left(noise: float) -> float:
        values = at_noise(name, fit.spectra[name], fit.level, noise).values
        values = values[values > 0]
        return targets - float(((values - fit.level) / values).sum())

    low = math.sqrt(squares / targets)
    if low == 0 or left(low) <= 0:
        found = (
            "none: every target is met exactly"
            if low == 0
            else f"{targets:,} targets for {targets - left(low):,.0f} effective parameters"
        )
        raise BadValueError(
            f"noise: expected residuals to estimate it from, got {found}. Give it, for example "
            "with likelihood=deltabars.likelihoods.Gaussian(noise=0.1)."
        )
    high = math.sqrt(squares / left(low))  # γ falls as σ grows: σ̂ is not above this
    while low < (middle := (low + high) / 2) < high:
        if middle**2 * left(middle) < squares:
            low = middle
        else:
            high = middle
    return high
