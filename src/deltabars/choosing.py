"""The covariance that a fit's eigenpairs give, of an estimator and a rank of choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deltabars.covariance import Covariance, Defects, build_covariance
from deltabars.eigen import EigenPairs
from deltabars.errors import BadValueError

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit

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
