"""The options of a fit, checked: one record for the solvers, the manifest and checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

import torch

from deltabars.covariance.estimators import DEFAULT_ESTIMATOR, ESTIMATORS
from deltabars.eigen.pairs import check_rank, is_whole
from deltabars.errors import BadValueError, option
from deltabars.problem.parameters import ParameterSpace, Selection
from deltabars.problem.prior import L2Rates, Prior
from deltabars.runtime.distributed import Group

SOLVERS = ("auto", "krylov", "incremental", "dense", "arpack")
DEFAULT_RANK = 100
DEFAULT_TOLERANCE = 0.05  # of `rank="auto"`


@dataclass(frozen=True)
class FitOptions:
    """The options of `fit`, by the names of its arguments; all are checked here.

    Attributes:
        rank: None until the number of parameters is known (see `resolved`).
        probe: `"given"` where inputs were given for it.
    """

    estimator: str = DEFAULT_ESTIMATOR
    rank: int | str | None = None
    tolerance: float | None = None
    probe: str | None = None
    solver: str = "auto"
    seed: int = 0
    memory_budget: int | None = None
    batch_size: int | None = None
    residual_tolerance: float | None = None
    max_products: int | None = None
    smallest: int = 0
    max_seconds: float | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.estimator, str) or self.estimator not in ESTIMATORS:
            raise BadValueError(
                f"estimator: expected one of {list(ESTIMATORS)}, got {self.estimator!r}. A "
                "sandwich fit serves hessian and opg as well."
            )
        if not isinstance(self.solver, str) or self.solver not in SOLVERS:
            raise BadValueError(f"solver: expected one of {list(SOLVERS)}, got {self.solver!r}.")
        self._check_rank()
        whole = {"seed": 0, "smallest": 0, "batch_size": 1, "max_products": 1}
        for name, least in whole.items():
            value = getattr(self, name)
            if value is None and name in ("batch_size", "max_products"):
                continue
            if not is_whole(value) or value < least or value >= 2**63:
                most = " to 2^63 − 1" if name == "seed" else " on"
                raise BadValueError(
                    f"{name}: expected a whole number from {least}{most}, got {value!r}."
                )
            object.__setattr__(self, name, int(value))
        for name, example in (("residual_tolerance", ""), ("max_seconds", ", such as 600")):
            value = getattr(self, name)
            real = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (real and float(value) > 0):
                raise BadValueError(
                    f"{name}: expected a number above zero{example}, got {value!r}."
                )
        if self.max_seconds is not None:
            seconds = float(self.max_seconds)
            object.__setattr__(self, "max_seconds", seconds if seconds < math.inf else None)
        self._check_solver()

    def _check_rank(self) -> None:
        if isinstance(self.rank, str):
            if self.rank != "auto":
                raise BadValueError(f"rank: expected a whole number or 'auto', got {self.rank!r}.")
            if self.solver in ("arpack", "incremental"):
                raise BadValueError(
                    f"solver: expected 'auto', 'krylov' or 'dense' with {option('rank', 'auto')}, "
                    f"got {self.solver!r}, which must know the rank before it starts."
                )
            good = isinstance(self.tolerance, int | float) and not isinstance(self.tolerance, bool)
            if self.tolerance is not None and not (good and 0 < self.tolerance < math.inf):
                raise BadValueError(
                    "tolerance: expected a number above zero, such as 0.05 for 5 % of a score, got "
                    f"{self.tolerance!r}."
                )
            return
        if self.tolerance is not None or self.probe is not None:
            raise BadValueError(
                f"tolerance, probe: expected them with {option('rank', 'auto')} only, got "
                f"{option('rank', self.rank)}."
            )
        if self.rank is not None:
            if not is_whole(self.rank) or self.rank < 1:
                raise BadValueError(
                    f"rank: expected a whole number from 1 to P, got {self.rank!r}."
                )
            object.__setattr__(self, "rank", int(self.rank))

    def _check_solver(self) -> None:
        matrices = ESTIMATORS[self.estimator]
        if self.solver == "incremental" and matrices == ("hessian",):
            raise BadValueError(
                "solver: expected 'krylov', 'dense' or 'arpack' for the Hessian, got "
                "'incremental', which works on rows of gradients (opg, ggn, and the opg part of a "
                "sandwich)."
            )
        if self.smallest and ("hessian" not in matrices or self.solver == "arpack"):
            raise BadValueError(
                f"smallest: expected 0, got {self.smallest}: the lower end of the spectrum is "
                "computed for a Hessian, by the solvers 'krylov' and 'dense'. (That of opg and ggn "
                "is λ.)"
            )
        if self.max_seconds is not None and self.solver in ("dense", "arpack"):
            raise BadValueError(
                "max_seconds: expected solver 'auto', 'krylov' or 'incremental', got "
                f"{self.solver!r}, which has no pairs before its end."
            )

    @property
    def is_automatic(self) -> bool:
        """Whether the rank is chosen by a probe."""
        return self.rank == "auto"

    def check_for(self, model: torch.nn.Module, params: Selection, l2: L2Rates) -> None:
        """Refuse what is wrong for a model whatever the data are, before these are read."""
        space = ParameterSpace.select(model, params)
        Prior.read(l2, space)
        if isinstance(self.rank, int):
            check_rank(self.rank, space.size)

    def resolved(self, num_parameters: int) -> FitOptions:
        """Return the same with a rank, where none was given."""
        if self.rank is not None:
            return self
        return replace(self, rank=min(DEFAULT_RANK, num_parameters))

    def as_json(self) -> dict[str, Any]:
        """Return all options by name."""
        return asdict(self)


def check_batch_size(batch_size: Any) -> None:
    """Refuse a batch size that is not a whole number from 1 on, or None."""
    if batch_size is not None and (not is_whole(batch_size) or batch_size < 1):
        raise BadValueError(f"batch_size: expected a whole number from 1 on, got {batch_size!r}.")


class Deadline:
    """When a computation stops with what it has: never, where no seconds are given.

    Args:
        seconds: that it may take, from now or from `started` (by `time.monotonic`) on.
        group: the processes, which all go by the clock of the first one.
    """

    def __init__(self, seconds: float | None, group: Group, started: float | None = None) -> None:
        self._started = time.monotonic() if started is None else started
        self._seconds, self._group = seconds, group

    def is_over(self, ahead: float = 0.0) -> bool:
        """Return whether it is over, or will be in some seconds. One collective, if it matters."""
        if self._seconds is None:
            return False
        left = self._started + self._seconds - time.monotonic()
        return bool(self._group.broadcast_object(left <= ahead))

    def first_of(self, parts: int) -> Deadline:
        """Return that of the first of several computations, which share the time evenly."""
        if self._seconds is None or parts == 1:
            return self
        now = time.monotonic()
        left = self._started + self._seconds - now
        return Deadline(left / parts, self._group, now)
