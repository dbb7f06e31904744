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

import torch
from torch import Tensor

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
    found = _estimated(fit) if given is None else given
    likelihood = replace(fit.likelihood, noise=found, estimated=given is None)
    moved = replace(fit, likelihood=likelihood, _covariances={})
    if "overlap" in fit.__dict__:
        moved.__dict__["overlap"] = fit.overlap  # it depends on the vectors alone
    return moved


def with_settled_noise(fit: DeltaFit) -> DeltaFit:
    """The fit itself; with its noise estimated (again) where that is what its likelihood asks for.

    An estimate is one of a λ: a fit that has moved to another one needs another.
    """
    likelihood = fit.likelihood
    is_open = isinstance(likelihood, Gaussian) and (
        likelihood.noise is None or likelihood.estimated
    )
    return with_noise(fit, None) if is_open else fit


def noises_at(fit: DeltaFit, levels: Tensor) -> Tensor:
    """The σ of a fit at each λ, (n,), float64: the given one, or what it would estimate there.

    It is 1 where there is none.
    """
    likelihood = fit.likelihood
    if isinstance(likelihood, Gaussian) and likelihood.estimated:
        return _estimates(fit, levels)
    return torch.full_like(levels, fit.noise or 1.0, dtype=torch.float64)


def _estimates(fit: DeltaFit, levels: Tensor) -> Tensor:
    """σ̂ of a fit at each λ, (n,), float64: σ̂² = RSS/(N·C − γ), γ that of the computed pairs.

    γ of G depends on σ: then σ̂ is where both sides agree, which is at one place, as
    σ²·(N·C − γ(σ)) grows with σ. Of a sandwich fit γ is that of the Hessian. Zero where every
    target is met exactly; infinite where there are no more targets than effective parameters.
    """
    name = ESTIMATORS[fit.estimator][0]
    found = (fit.spectra[name].values - fit.level).cpu()  # of the data part at noise 1, (K,)
    levels = levels.double()[:, None]
    squares = 2 * fit.num_examples * fit.diagnostics["mean_loss"]  # RSS

    def left(noise: Tensor) -> Tensor:
        data = found / noise[:, None] ** 2 if name == "opg" else found
        values = data + levels
        effective = torch.where(values > 0, data / values, 0.0).sum(1)
        return fit.num_examples * fit.num_outputs - effective

    low = torch.full_like(levels[:, 0], squares / (fit.num_examples * fit.num_outputs)).sqrt()
    if squares == 0:
        return low
    rest = left(low)
    high = (squares / rest).sqrt()  # γ falls as σ grows: σ̂ is not above this
    while True:
        middle = (low + high) / 2
        is_open = (low < middle) & (middle < high)
        if not bool(is_open.any()):
            return torch.where(rest > 0, high, torch.inf)
        below = middle**2 * left(middle) < squares
        low = torch.where(is_open & below, middle, low)
        high = torch.where(is_open & ~below, middle, high)


def _estimated(fit: DeltaFit) -> float:
    """σ̂ at the λ of a fit.

    Raises:
        BadValueError: no residuals, or no more targets than effective parameters.
    """
    noise = float(_estimates(fit, torch.tensor([fit.level], dtype=torch.float64))[0])
    if not 0 < noise < math.inf:
        found = "none: every target is met exactly"
        if noise:
            targets = fit.num_examples * fit.num_outputs
            found = f"{targets:,} targets for as many effective parameters or more"
        raise BadValueError(
            f"noise: expected residuals to estimate it from, got {found}. Give it, for example "
            "with likelihood=deltabars.likelihoods.Gaussian(noise=0.1)."
        )
    return noise
