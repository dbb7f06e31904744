"""The figures that deltabars is held to, by size: what must be reached, and what is aimed at."""

from __future__ import annotations

from benchmarks.results import Goal

RESIDUAL = 1e-5  # of every eigenpair, ‖Aq − λq‖ / max(1, λ)
_EXACT = 1e-4  # an eigenvalue, relative: far below what a truncated method loses

_GOALS = {
    ("small", "product"): Goal(1.0, 0.7),
    ("small", "hessian"): Goal(3.0, 6.0, at_least=True, accuracy=RESIDUAL),
    ("small", "opg"): Goal(5.0, 15.0, at_least=True, accuracy=_EXACT),
    ("small", "predict"): Goal(5.0, 20.0, at_least=True),
    ("gpu", "product"): Goal(1.5, 1.0),
    ("gpu", "hessian"): Goal(250.0, 80.0, accuracy=RESIDUAL),
    ("gpu", "hessian1500"): Goal(500.0, 180.0, accuracy=RESIDUAL),
    ("gpu", "opg"): Goal(5.0, 2.5, accuracy=RESIDUAL),
    ("gpu", "predict one"): Goal(1.2, 0.6),
    ("gpu", "predict three"): Goal(2.0, 0.9),
}

GROWTH = Goal(1.1)  # an exponent
MEMORY = Goal(2.5, 1.5)  # in units of K·P numbers
PUBLISHED_HESSIAN = Goal(1e-4)
PUBLISHED_OPG = Goal(1e-4)
PUBLISHED_OPG_BELOW = Goal(-1e-5, at_least=True)


def goal(size: str, figure: str) -> Goal | None:
    """Return the goal of a figure at a size; None where there is none."""
    return _GOALS.get((size, figure))
