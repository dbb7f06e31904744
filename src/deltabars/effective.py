"""What a spectrum shows of the fit: how many parameters the data determine, and the optimum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deltabars.covariance import ESTIMATORS, Tail
from deltabars.eigen import EigenPairs
from deltabars.sharded import ShardedVectors
from deltabars.vectors import Basis, products

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit


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
