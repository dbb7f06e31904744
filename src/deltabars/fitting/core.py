"""What a spectrum shows of the fit: how many parameters the data determine, and the optimum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltabars.covariance.estimators import ESTIMATORS, build_covariance
from deltabars.covariance.low_rank import Covariance
from deltabars.covariance.tail import Defects, Tail, warn_about_spectrum
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import BadValueError
from deltabars.likelihoods.gaussian import Gaussian, check_noise
from deltabars.problem.prior import L2, Decay
from deltabars.runtime.vectors import Basis, ShardedVectors, products

if TYPE_CHECKING:
    from deltabars.fitting.fitted import DeltaFit


def effective_parameters(fit: DeltaFit) -> float:
    """Σₖ (λₖ − λ)/λₖ over the K pairs."""
    values = _positive(_main_pairs(fit))
    return float(((values - fit.level) / values).sum())


def effective_parameters_interval(fit: DeltaFit) -> tuple[float, float]:
    """What the sum over all eigenvalues lies between, if the others are between λ and λ_K."""
    pairs = _main_pairs(fit)
    values, slack = _positive(pairs), pairs.slack
    last = Tail.after(values, len(values), fit.level, fit.num_parameters).last
    rest = fit.num_parameters - len(values)
    low = effective_parameters(fit) + min(0.0, rest * (1 - fit.level / last))
    most = float((1 - fit.level / (values + slack)).sum())
    return low, most + max(0.0, rest * (1 - fit.level / (last + slack)))


def distance_from_optimum(fit: DeltaFit, gradient: Tensor) -> float | None:
    """How far predictions at the optimum are from those at ω̂, in their error bars.

    The Newton step H⁻¹g moves a prediction along eigenvector k by N(qₖᵀg)²/λₖ of its variance. The
    mean of that over the K directions, each weighted by the share (λₖ − λ)/λₖ that the data
    determine of it; its square root. A gradient that is as large as chance makes it gives 1. None
    where the curvature is not positive, so that no minimum is known to be near.

    Args:
        gradient: g of the cost at ω̂, (P,), in the coordinates of the eigenvectors.
    """
    pairs = _main_pairs(fit)
    along = _along(gradient[None].to(pairs.vectors.device), pairs.vectors)[0].cpu()
    values = pairs.values.double().cpu()
    if not bool((values > 0).all()):
        return None
    known = values > fit.level
    weights = ((values - fit.level) / values)[known]
    if not len(weights):
        return 0.0
    squares = fit.informative_examples * along[known].square() / values[known]
    return float((weights @ squares / weights.sum()).sqrt())


def _along(gradient: Tensor, vectors: Basis) -> Tensor:
    """The components (1, K) of a gradient (1, P), of which each rank adds those of its columns."""
    if not isinstance(vectors, ShardedVectors):
        return products(gradient, vectors)
    own = products(gradient[:, vectors.space.own], vectors.part)
    return vectors.space.ranks.sum_(own)


def _main_pairs(fit: DeltaFit) -> EigenPairs:
    return fit.pairs_of(ESTIMATORS[fit.estimator][0])


def _positive(pairs: EigenPairs) -> Tensor:
    return pairs.values[pairs.values > 0]  # the others have no place in a covariance


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


# Units in the last place, of what was measured on networks of many kinds and doubled or more.
_ROWS = 8  # rows of gradients, relative to √λ₁
_SECOND = 8  # products with a Hessian, relative to λ₁, beyond what consistent products show
_PROJECTION = 2
_SHIFT = 8  # F
_RESULT = 4


def defects_of(name: str, pairs: EigenPairs) -> Defects:
    """How far the pairs of a matrix can be from exact ones, and what is computed with them."""
    eps = torch.finfo(pairs.vectors.dtype).eps
    is_hessian = name == "hessian"
    second = _SECOND * eps * float(pairs.values[0].abs()) if is_hessian else 0.0
    return Defects(
        slack=pairs.slack,
        rounding=pairs.rounding + 0.51 * pairs.skew + _PROJECTION * eps,
        skew=pairs.skew,
        residuals=pairs.residual_norms,
        products=pairs.product_rounding + second,
        rows=0.0 if is_hessian else _ROWS * eps,
        result=_RESULT * eps,
        shift=_SHIFT * eps,
    )


def covariance_of(fit: DeltaFit, estimator: str, rank: int, full_rank: bool) -> Covariance:
    """Σ of an estimator that the fit serves, from its first `rank` pairs, at its noise."""
    if not isinstance(full_rank, bool):
        raise BadValueError(f"full_rank: expected True or False, got {full_rank!r}.")
    known = {name: fit.pairs_of(name) for name in fit.spectra}
    both = estimator == "sandwich"
    return build_covariance(
        estimator,
        {name: pairs.values for name, pairs in known.items()},
        rank=rank,
        l2=fit.level,
        num_parameters=fit.num_parameters,
        num_examples=fit.informative_examples,
        overlap=fit.overlap if both else None,
        least_hessian=fit.spectra["hessian"].exact_least if both else None,
        defects={name: defects_of(name, pairs) for name, pairs in known.items()},
        full_rank=full_rank,
    )
