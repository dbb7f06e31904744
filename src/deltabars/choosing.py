"""The covariance that a fit's eigenpairs give, of an estimator and a rank of choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltabars.covariance import Covariance, build_covariance
from deltabars.errors import BadValueError

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit


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
        slacks={name: pairs.slack for name, pairs in known.items()},
        roundings={name: pairs.rounding for name, pairs in known.items()},
        full_rank=full_rank,
    )
