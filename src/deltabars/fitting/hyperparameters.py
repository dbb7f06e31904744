"""λ and σ after a fit: both can change without new eigenpairs.

A fit holds the eigenpairs of the loss ½‖r‖², which its λ belongs to. −log p is that loss over σ²,
and the cost with it, so that, with A and A_G the data parts at σ = 1,

    H, GGN = (A + λI)/σ²        G = A_G/σ⁴ + λI/σ² = (A_G/σ² + λI)/σ²

The common factor 1/σ² is a factor of N, in Σ = H⁻¹/N as in H⁻¹GH⁻¹/N: an example counts 1/σ² times
as much. What remains is the data part of G, over σ². Neither eigenvectors nor λ change.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from deltabars.covariance.tail import warn_about_spectrum
from deltabars.errors import BadValueError
from deltabars.fitting.state import FittedState
from deltabars.likelihoods.gaussian import Gaussian, check_noise
from deltabars.problem.prior import L2Rates, Prior

State = TypeVar("State", bound=FittedState)


def with_l2(state: State, l2: L2Rates) -> State:
    """Move a fit to another λ; estimate its noise anew if it was estimated. Cost: nothing."""
    prior = Prior.read(l2, state.network.parameters, state.prior.scales or None)
    shift = prior.level - state.level
    spectra = {name: pairs.shifted(shift) for name, pairs in state.spectra.items()}
    for name, pairs in spectra.items():
        warn_about_spectrum(
            name,
            pairs.values,
            prior.level,
            state.num_parameters,
            pairs.vectors.dtype,
            residuals=pairs.residual_norms,
        )
    diagnostics = {**state.diagnostics, "fitted_l2": state.diagnostics.get("fitted_l2", state.l2)}
    return with_settled_noise(state.moved(prior=prior, spectra=spectra, diagnostics=diagnostics))


def with_noise(state: State, noise: Any) -> State:
    """Move a fit to another noise; None or `"estimate"` takes that of the residuals."""
    if not isinstance(state.likelihood, Gaussian):
        raise BadValueError(
            f"noise: expected a fit with a Gaussian likelihood, got {state.likelihood.name}, which "
            "has none."
        )
    given = check_noise(noise)
    found = _estimated(state) if given is None else given
    likelihood = replace(state.likelihood, noise=found, estimated=given is None)
    return state.moved(likelihood=likelihood)


def with_settled_noise(state: State) -> State:
    """Estimate the noise of a fit where its likelihood has an estimated one; it depends on λ."""
    likelihood = state.likelihood
    is_open = isinstance(likelihood, Gaussian) and (
        likelihood.noise is None or likelihood.estimated
    )
    return with_noise(state, None) if is_open else state


def noises_at(state: FittedState, levels: Tensor) -> Tensor:
    """Return the σ of a fit at each λ, (n,), float64: given, or estimated there; else 1."""
    likelihood = state.likelihood
    if isinstance(likelihood, Gaussian) and likelihood.estimated:
        return _estimates(state, levels)
    return torch.full_like(levels, state.noise or 1.0, dtype=torch.float64)


def _estimates(state: FittedState, levels: Tensor) -> Tensor:
    """Estimate σ of a fit at each λ, (n,), float64: σ̂² = RSS/(N·C − γ).

    γ is the number of effective parameters in the computed pairs.
    γ of G depends on σ: then σ̂ is where both sides agree, which is at one place, as
    σ²·(N·C − γ(σ)) grows with σ. Of a sandwich fit γ is that of the Hessian. Zero where every
    target is met exactly; infinite where there are no more targets than effective parameters.
    """
    name = state.main_matrix
    found = (state.spectra[name].values - state.level).cpu()  # of the data part at noise 1, (K,)
    levels = levels.double()[:, None]
    squares = 2 * state.num_examples * state.diagnostics["mean_loss"]  # RSS

    def left(noise: Tensor) -> Tensor:
        data = found / noise[:, None] ** 2 if name == "opg" else found
        values = data + levels
        effective = torch.where(values > 0, data / values, 0.0).sum(1)
        return state.num_examples * state.num_outputs - effective

    low = torch.full_like(levels[:, 0], squares / (state.num_examples * state.num_outputs)).sqrt()
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


def _estimated(state: FittedState) -> float:
    """Estimate σ at the λ of a fit.

    Raises:
        BadValueError: no residuals, or no more targets than effective parameters.
    """
    noise = float(_estimates(state, torch.tensor([state.level], dtype=torch.float64))[0])
    if not 0 < noise < math.inf:
        found = "none: every target is met exactly"
        if noise:
            targets = state.num_examples * state.num_outputs
            found = f"{targets:,} targets for as many effective parameters or more"
        raise BadValueError(
            f"noise: expected residuals to estimate it from, got {found}. Give it, for example "
            "with likelihood=deltabars.likelihoods.Gaussian(noise=0.1)."
        )
    return noise
