"""The covariance of trained parameters from eigenpairs and λ, and the intervals around it.

`estimators.py` lists the estimators and has what all share, and A⁻¹/N; `sandwich.py` has H⁻¹GH⁻¹/N,
and `tail.py` what is known of the eigenvalues that were not computed.

Nothing here knows networks or data; eigenpairs come as plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from deltabars.covariance.estimators import ESTIMATORS, Covariance, InverseCovariance
from deltabars.covariance.sandwich import SandwichCovariance
from deltabars.covariance.tail import EXACT, Defects, Tail


def build_covariance(
    estimator: str,
    values: Mapping[str, Tensor],
    *,
    rank: int,
    l2: float,
    num_parameters: int,
    num_examples: float,
    overlap: Tensor | None = None,
    least_hessian: float | None = None,
    defects: Mapping[str, Defects] | None = None,
    full_rank: bool = True,
) -> Covariance:
    """Build the covariance of an estimator from the first `rank` eigenvalues of its matrices.

    Args:
        estimator: a key of ESTIMATORS.
        values: descending eigenvalues, λ included, by matrix.
        num_examples: N; N/σ² for eigenvalues of σ² times a matrix.
        overlap: Q_Hᵀ Q_G, (K, K), for the sandwich.
        least_hessian: the least eigenvalue of H, where the whole spectrum is known: the sandwich's
            interval then holds for every positive definite H, not only for those whose tail lies
            above λ. (The hessian estimator *defines* what is below λ as λ̃; its interval is about
            that.)
        defects: how far pairs can be from exact ones, by matrix; they are exact by default.
    """
    least = {"hessian": least_hessian} if estimator == "sandwich" else {}
    tails = {
        name: Tail.after(
            values[name],
            rank,
            l2,
            num_parameters,
            least.get(name),
            (defects or {}).get(name, EXACT),
        )
        for name in ESTIMATORS[estimator]
    }
    used = {name: values[name][: tail.rank].double() for name, tail in tails.items()}
    if estimator != "sandwich":
        return InverseCovariance(
            estimator, used[estimator], tails[estimator], num_examples, full_rank
        )
    assert overlap is not None
    return SandwichCovariance(
        used["hessian"],
        used["opg"],
        tails["hessian"],
        tails["opg"],
        overlap[: tails["hessian"].rank, : tails["opg"].rank],
        num_examples,
        full_rank,
    )
