"""How many parameters the data determine (MacKay), of all that a spectrum shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deltabars.covariance import ESTIMATORS, Tail
from deltabars.eigen import EigenPairs

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


def _main_pairs(fit: DeltaFit) -> EigenPairs:
    return fit.pairs_of(ESTIMATORS[fit.estimator][0])


def _positive(pairs: EigenPairs) -> Tensor:
    return pairs.values[pairs.values > 0]  # the others have no place in a covariance
