"""Copies of repeated eigenvalues that a Krylov space cannot see."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deltabars.eigen.pairs import EigenPairs, residual_scale
from deltabars.eigen.restarting import insert
from deltabars.eigen.resuming import Course

if TYPE_CHECKING:
    from deltabars.eigen.krylov import Run

_GUARD_PRODUCTS = 8  # enough for a large missed eigenvalue to rise out of a random start
_SMALL_REST = 64  # dimensions outside the pairs: these can be searched whole
_ROOM_FOR_ONE = 16  # vectors


def with_missed_copies(run: Run, pairs: EigenPairs) -> EigenPairs:
    """Look outside the pairs for a larger eigenvalue than the last, and take it in.

    A Krylov space of b start vectors holds at most b vectors for each distinct eigenvalue, so
    further copies of a repeated one are only found by chance. A few steps from a random start,
    orthogonal to the pairs, bring up what is well above them; Ritz values are lower bounds,
    so what they show is there.
    """
    rank, course = len(pairs), run.course
    run = replace(run, is_over=None)  # a few products, for pairs that are there in time
    beside = max(run.max_vectors - rank, _ROOM_FOR_ONE)  # the pairs are still there
    while rank < run.matrix.shape[0]:
        search = replace(run, max_vectors=beside)
        if not course.is_searching:
            course.save_found(pairs, run.restarts)
            if not _shows_more_than(pairs, search):
                return pairs
        pairs = insert(pairs, search.largest(1, 1, locked=pairs.vectors))
        course.copies += 1
    return pairs


def _shows_more_than(pairs: EigenPairs, run: Run) -> bool:
    """Whether a few steps outside the pairs show a larger eigenvalue than their last."""
    room = run.max_products - run.matrix.products
    if room < 2:
        return False
    rest = run.matrix.shape[0] - len(pairs)
    steps = rest if rest <= _SMALL_REST else _GUARD_PRODUCTS
    limit = run.matrix.products + min(steps, room)
    unsaved = Course(None, run.matrix, run.generator)
    probe = replace(run, max_products=limit, on_step=None, course=unsaved)
    top = probe.largest(1, 1, locked=pairs.vectors).values[0]
    slack = 10 * run.tolerance * float(residual_scale(pairs.values)[-1])
    return float(top) > float(pairs.values[-1]) + slack
