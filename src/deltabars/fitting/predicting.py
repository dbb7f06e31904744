"""Predictions of a fit: the arguments checked, and a Scorer made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltabars.covariance.estimators import ESTIMATORS
from deltabars.covariance.low_rank import BOUNDS
from deltabars.curvature.sensitivity import check_space
from deltabars.distributed.vectors import first
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, option
from deltabars.fitting.describe import evidence_of
from deltabars.fitting.options import check_batch_size
from deltabars.fitting.state import FittedState
from deltabars.prediction.averaging import Classes, choose_classes, choose_moderation
from deltabars.prediction.scoring import Scorer
from deltabars.runtime.precision import full_precision


def predict(
    state: FittedState,
    inputs: Any,
    *,
    rank: int | None,
    full_rank: bool,
    space: str,
    covariance: bool,
    bound: str,
    estimator: str | Sequence[str] | None,
    classes: str | Sequence[int] | None,
    moderation: str | None,
    samples: int,
    seed: int,
    batch_size: int | None,
    progress: bool | None,
) -> Any:
    """Predict with error bars; the arguments are those of `DeltaFit.predict`."""
    names, used, chosen = check_asked(
        state, estimator=estimator, rank=rank, classes=classes, batch_size=batch_size
    )
    check_space(space)
    if bound not in BOUNDS:
        raise BadValueError(f"bound: expected one of {BOUNDS}, got {bound!r}.")
    if bound == "paper" and not full_rank:
        raise BadValueError(
            "bound: expected 'rigorous' with full_rank=False: the paper bounds the full-rank "
            "estimate only."
        )
    shown = shows_progress(state, progress)
    average = choose_moderation(
        moderation, samples, seed, state.num_outputs, state.likelihood, subset=chosen is not None
    )
    with full_precision(state.network.device):
        covariances = {name: state.covariance_of(name, used, full_rank) for name in names}
    matrices = {matrix for name in names for matrix in ESTIMATORS[name]}
    scorer = Scorer(
        state.pullback,
        state.likelihood,
        state.signature,
        {matrix: first(state.spectra[matrix].vectors, used) for matrix in sorted(matrices)},
        covariances,
        space,
        bound,
        with_covariance=covariance,
        classes=chosen,
        moderation=average,
        memory_budget=state.memory_budget,
    )
    results = {
        name: found.judged_by(evidence_of(state, used, name))
        for name, found in scorer.predict(inputs, batch_size, shown).items()
    }
    asked_for_one = estimator is None or isinstance(estimator, str)
    return results[names[0]] if asked_for_one else results


def check_asked(
    state: FittedState,
    *,
    estimator: str | Sequence[str] | None = None,
    rank: int | None = None,
    classes: str | Sequence[int] | None = None,
    batch_size: int | None = None,
) -> tuple[list[str], int, Classes | None]:
    """Check the estimators, the rank and the classes before inputs are read, and return them.

    Raises:
        BadValueError: the fit does not have them.
    """
    names = served(state, estimator)
    used = state.rank if rank is None else rank
    if not is_whole(used) or not 1 <= used <= state.rank:
        raise BadValueError(
            f"rank: expected a whole number from 1 to the {state.rank} fitted pairs, got "
            f"{used!r}. Fit with a larger rank for more."
        )
    check_batch_size(batch_size)
    return names, used, choose_classes(classes, state.num_outputs, state.likelihood)


def shows_progress(state: FittedState, progress: Any) -> bool:
    """Return whether to show progress: as given, else as the fit does."""
    if progress is not None and not isinstance(progress, bool):
        raise BadValueError(f"progress: expected True, False or None, got {progress!r}.")
    return state.progress if progress is None else progress


def served(state: FittedState, asked: str | Sequence[str] | None) -> list[str]:
    """Return the names of the wanted estimators; refuse those that the fit does not serve."""
    if asked is None:
        return [state.estimator]
    names = [asked] if isinstance(asked, str) else list(asked)
    possible = [
        name
        for name, needed in ESTIMATORS.items()
        if all(matrix in state.spectra for matrix in needed)
    ]
    for name in names:
        if name not in possible:
            advice = (
                f" Fit with {option('estimator', name)} for that one." if name in ESTIMATORS else ""
            )
            raise BadValueError(
                f"estimator: expected one of {possible}, which this {state.estimator} fit can "
                f"serve, got {name!r}.{advice}"
            )
    if not names:
        raise BadValueError(f"estimator: expected one or more of {possible}, got an empty list.")
    return names
