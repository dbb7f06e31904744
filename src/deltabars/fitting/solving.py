"""The eigenpairs of one matrix: the choice of a solver, its time, and an audit of its answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import deltabars.eigen as eigen
from deltabars.covariance.sampling import TRACE
from deltabars.curvature.base import CurvatureOperator, RowOperator
from deltabars.eigen.basis import default_block_size, fewest
from deltabars.eigen.pairs import (
    PRODUCT_ROUNDING,
    ROWS_LEFT,
    SKEW,
    STOPPED,
    EigenPairs,
    audit,
    embed,
    residual_tolerance,
    warn_about_values,
    warn_of_audit,
    warn_unconverged,
)
from deltabars.errors import CheckpointMismatchError, ConvergenceWarning, option, warn
from deltabars.fitting.checkpoints import MatrixCheckpoint
from deltabars.fitting.growth import ProbeGrowth
from deltabars.fitting.state import FitOptions
from deltabars.fitting.surveying import TailProbe, tail_moments
from deltabars.problem.parameters import LastLayer
from deltabars.runtime.distributed import Group
from deltabars.runtime.memory import BASIS, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import ShardedVectors

_ALWAYS_DENSE = 512  # parameters: forming the matrix costs less than a Krylov space is worth
_MOSTLY_DENSE = 4096  # likewise, where an eighth or more of the pairs are wanted
_DENSE_BLOCK = 64
_USUAL_GROWTH = 2.2  # basis vectors a pair: about what trained networks take
_LEAST_GROWTH = 64
_RECOMPUTED_BLOCK = 20  # vectors at least, where rows are computed again on each pass
_GROWING_BLOCK = 20  # vectors, where the number of pairs is not known yet
_WORTH_ANNOUNCING = 60.0  # seconds
_ENOUGH = 0.5  # seconds that are measured; less is mostly chance
_FIRST = 40  # further products of Lanczos, before the first pair; of blocks, four
_SOME_PAIRS = 100  # where their number is not known


class Deadline:
    """When a computation stops with what it has, by the clock of the first process."""

    def __init__(self, seconds: float | None, group: Group) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._group = group

    def is_over(self) -> bool:
        """Return whether it is over. One collective, where there is a limit."""
        if self._end == math.inf:
            return False
        return bool(self._group.broadcast_object(time.monotonic() >= self._end))

    def first_of(self, parts: int) -> Deadline:
        """Return that of the first of several computations, which share the time evenly."""
        return Deadline((self._end - time.monotonic()) / parts, self._group)


@dataclass(frozen=True)
class Task:
    """The eigenpairs of one matrix, to be computed."""

    name: str
    operator: CurvatureOperator
    options: FitOptions
    growth: ProbeGrowth | None  # says how many are enough
    checkpoint: MatrixCheckpoint | None
    deadline: Deadline  # with those that have converged by then
    progress: bool

    @property
    def rank(self) -> int:
        """How many pairs are wanted, at most."""
        return self.growth.most if self.growth is not None else int(self.options.rank or 0)

    @property
    def solver(self) -> str:
        """The solver, where `"auto"` is to choose it."""
        given, size = self.options.solver, self.operator.shape[0]
        if given == "incremental" and not isinstance(self.operator, RowOperator):
            return "krylov"
        if given != "auto":
            return given
        small = size <= _ALWAYS_DENSE or (size <= _MOSTLY_DENSE and 8 * self.rank >= size)
        return "dense" if small and self.options.max_seconds is None else "krylov"


def solve(task: Task) -> tuple[EigenPairs, dict[str, Any], TailProbe]:
    """Compute eigenpairs; return how they were found, how good they are, and a probe beside them.

    What comes from a checkpoint is audited again.
    """
    kept = task.checkpoint
    found = None if kept is None else kept.finished(task.operator.device, task.growth)
    if found is not None:
        probe = _check_derivatives(task, *found)
        if found[0].statistics.get("solver") in ("lanczos", "block_krylov"):
            warn_unconverged(found[0], float(found[0].statistics["tolerance"]))
        pairs, diagnostics = found
    else:
        pairs, diagnostics, probe = _computed(task)
    warn_of_audit(task.name, diagnostics)
    warn_about_values(task.name, pairs, task.operator.problem.l2)
    space = task.operator.spaces.whole
    if space.group.size > 1:  # which hold their own columns
        pairs = replace(pairs, vectors=ShardedVectors(pairs.vectors, space))
    return pairs, diagnostics, probe


def _computed(task: Task) -> tuple[EigenPairs, dict[str, Any], TailProbe]:
    name, operator, growth = task.name, task.operator, task.growth
    started, total = time.perf_counter(), task.rank if growth is None else None
    with (
        operator.problem.network.same_bits(),
        full_precision(operator.device),
        Progress(f"Eigenpairs of the {name}", total, "pair", task.progress) as bar,
    ):
        pairs = _run(task, bar)
        is_stopped = STOPPED in pairs.statistics
        if growth is not None:
            pairs = replace(pairs, values=growth.settled(pairs.values))
            if 0 < growth.useful(pairs.values) < len(pairs):
                pairs = pairs.first(growth.useful(pairs.values))
        elif is_stopped:
            left = int(pairs.statistics.get(ROWS_LEFT, 0))
            got = f"{left:,} rows unprocessed" if left else f"the {len(pairs)} that had converged"
            resume = f"with {option('checkpoint=')} it can be resumed"
            if task.checkpoint is not None:
                resume = "the same call resumes"
            warn(
                f"max_seconds: expected {task.rank} eigenpairs of the {name}, got {got} when the "
                f"time was over. Error bounds count what is missing. Give more time ({resume}), a "
                f"smaller rank, or fewer parameters, such as {option('params', LastLayer())}.",
                ConvergenceWarning,
            )
        probe = TailProbe(operator, pairs, task.options.seed)
        beside = partial(probe.beside, operator)
        quality = audit(beside, operator.spaces.whole, pairs, task.options.seed)
        measured = {key: quality.pop(key) for key in (SKEW, PRODUCT_ROUNDING)}
        pairs = replace(pairs, statistics={**measured, **pairs.statistics})
        if isinstance(operator, RowOperator):
            # No eigenvalue of G or GGN is below λ; one that comes out so is rounded.
            quality["rounded_below_l2"] = max(0.0, operator.row_shift - float(pairs.values[-1]))
            pairs = replace(pairs, values=pairs.values.clamp(min=operator.row_shift))
            quality[TRACE] = operator.data_trace()
        moments = tail_moments(probe, name)
    diagnostics = {
        **pairs.statistics,
        **quality,
        **moments,
        "tail_below_l2": max(0.0, operator.problem.l2 - pairs.least),
        "seconds": time.perf_counter() - started,
    }
    if task.checkpoint is not None and not is_stopped:
        task.checkpoint.finish(pairs, diagnostics, growth)
    return pairs, diagnostics, probe


def _check_derivatives(task: Task, pairs: EigenPairs, before: Mapping[str, Any]) -> TailProbe:
    """Refuse pairs from a checkpoint that are no longer those of the matrix. Cost: a product."""
    operator = task.operator
    with operator.problem.network.same_bits(), full_precision(operator.device):
        probe = TailProbe(operator, pairs, task.options.seed)
        beside = partial(probe.beside, operator)
        now = audit(beside, operator.spaces.whole, pairs, task.options.seed)
    if not now["residual_rms"] <= max(now["residual_limit"], 2 * before["residual_rms"]):
        raise CheckpointMismatchError(
            f"checkpoint: expected eigenpairs of this {task.name}, got ‖Aq − λq‖ of "
            f"{now['residual_rms']:.2g}, where it was {before['residual_rms']:.2g}: the weights "
            "and the loss are the same, but derivatives of the model have changed (a detach(), "
            "say). Give another folder."
        )
    return probe


def _run(task: Task, bar: Progress) -> EigenPairs:
    operator, options, growth, rank = task.operator, task.options, task.growth, task.rank
    tolerance = options.residual_tolerance
    if tolerance is None:
        tolerance = residual_tolerance(operator.dtype, operator.problem.l2)
    block = _DENSE_BLOCK if task.solver == "dense" else 1
    if task.solver == "krylov" and isinstance(operator, RowOperator):
        block = _GROWING_BLOCK if growth else default_block_size(rank)
        if not operator.keeps_rows:  # a pass costs about the same for one vector and for twenty
            block = max(block, min(_RECOMPUTED_BLOCK, rank))
    report, is_over = _Steps(task, bar, block), task.deadline.is_over
    matrix = _OwnColumns(operator, rank + options.smallest)
    limited: dict[str, Any] = {
        "tolerance": tolerance,
        "max_products": options.max_products,
        "seed": options.seed,
        "on_step": report,
    }
    if task.solver == "dense":
        pairs = eigen.dense(operator, rank, on_step=report)
    elif task.solver == "arpack":
        pairs = eigen.arpack(operator, rank, **limited)
    elif task.solver == "incremental":
        pairs = eigen.incremental_svd(matrix, rank, on_step=report, is_over=is_over)
    else:
        pairs = eigen.block_krylov(
            matrix,
            rank,
            block_size=block,
            smallest=options.smallest,
            max_vectors=_vectors_within(task, block),
            growth=growth,
            checkpoint=task.checkpoint,
            is_over=is_over,
            **limited,
        )
    spaces, group = operator.spaces, operator.problem.group
    if task.solver in ("krylov", "incremental"):
        return embed(pairs, spaces, operator.problem.l2) if matrix.is_reached else pairs
    if group.size > 1:  # each has computed all columns, and keeps its own
        group.broadcast_(pairs.vectors)  # where eigenvalues repeat, unlike machines find others
        pairs = replace(pairs, vectors=pairs.vectors[:, spaces.whole.own].clone())
    if growth is not None:
        growth.least = pairs.exact_least
        projections = spaces.reached.inner(growth.rows, spaces.select(pairs.vectors))
        pairs = pairs.first(fewest(growth, pairs.values, projections) or len(pairs))
    return pairs


class _OwnColumns:
    """A curvature matrix as solvers work on it: rows of the columns of this process.

    Of the parameters that the examples reach alone where these are enough (`is_reached`).
    """

    def __init__(self, operator: CurvatureOperator, wanted: int) -> None:
        spaces = operator.spaces
        self.is_reached = spaces.indices is not None and wanted <= spaces.reached.size
        self.space = spaces.reached if self.is_reached else spaces.whole
        self.shape = (self.space.size, self.space.size)
        self.device, self.dtype = operator.device, operator.dtype
        self.matmat: Callable[..., Any] = (
            operator.reached_matmat if self.is_reached else operator.whole_matmat
        )
        if isinstance(operator, RowOperator):
            whole, reached = operator.row_blocks, operator.reached_row_blocks
            self.row_blocks = reached if self.is_reached else whole
            self.row_scale, self.row_shift = operator.row_scale, operator.row_shift


def _vectors_within(task: Task, block_size: int) -> int:
    """Return how far a Krylov basis may grow: as is usual, within its share of the budget."""
    # Of the process with the most columns, so that all come to the same number.
    spaces, pairs = task.operator.spaces, task.rank + task.options.smallest
    size, columns = (max(space.columns.widths) for space in (spaces.whole, spaces.reached))
    row = max(1, columns) * task.operator.dtype.itemsize
    fitting = share(task.operator.problem.memory_budget, BASIS) // row
    if task.growth is not None:
        return max(fitting, 4 * block_size)
    usual = int(_USUAL_GROWTH * pairs) - 4 * block_size
    if columns < size:  # the pairs are expanded at the end, beside the basis
        usual = max(usual, int((_USUAL_GROWTH - 1) * pairs * size / columns) - 4 * block_size)
    usual = max(usual, pairs + _LEAST_GROWTH)
    return max(min(usual, fitting - 2 * block_size), pairs + 2 * block_size)


class _Steps:
    """The steps of a solver, shown with the time that is left; a long one is announced.

    The time is forecast from how many products trained networks usually take.
    """

    def __init__(self, task: Task, bar: Progress, block: int) -> None:
        self._task, self._bar = task, bar
        self._is_open = task.growth is not None and task.rank > _SOME_PAIRS
        self._pairs = min(task.rank, _SOME_PAIRS) if self._is_open else task.rank
        size = task.operator.shape[0]
        rows = task.operator.num_rows if isinstance(task.operator, RowOperator) else size
        usual = int(_USUAL_GROWTH * self._pairs) + (4 * block if block > 1 else _FIRST)
        krylov = max(self._pairs, min(usual, size, rows + 2 * block))
        self._total = {"dense": size, "incremental": rows}.get(task.solver, krylov)
        self._first: tuple[float, int] | None = None
        self._is_announced = False

    def __call__(self, products: int, done: int) -> None:
        """Show a step, after so many products (rows, if incremental) and converged pairs."""
        aim = "" if self._task.growth is None else f", {self._task.growth.aim}"
        self._bar.show(done, f"{products} products{aim}", self._left(products))

    def _left(self, products: int) -> float | None:
        now = time.monotonic()
        if self._first is None:
            self._first = now, products
        started, before = self._first
        if now - started < _ENOUGH:
            return None
        each = (now - started) / max(1, products - before)
        left = each * max(0, self._total - products)
        if left > _WORTH_ANNOUNCING and not self._is_announced:
            aim = option("tolerance") if self._is_open else option("rank")
            opg = "" if self._task.name == "opg" else f"{option('estimator', 'opg')}, "
            self._bar.line(
                f"Eigenpairs of the {self._task.name}: expected about {left / 60:.0f} minutes more "
                f"for {'every ' if self._is_open else ''}{self._pairs} pairs. Less: {opg}"
                f"{option('params', LastLayer())}, another {aim}, a part of the data, or "
                f"{option('max_seconds')}."
            )
        self._is_announced = True
        return None if self._is_open else left or None
