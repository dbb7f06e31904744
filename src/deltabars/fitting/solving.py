"""The eigenpairs of one matrix: the choice of a solver, its time, and an audit of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import deltabars.eigen as eigen
from deltabars.curvature.base import CurvatureOperator, RowOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
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
from deltabars.problem.parameters import LastLayer
from deltabars.runtime.distributed import Group
from deltabars.runtime.memory import BASIS, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import ShardedVectors, Space

_ALWAYS_DENSE = 512  # parameters: forming the matrix costs less than a Krylov space is worth
_MOSTLY_DENSE = 4096  # likewise, where an eighth or more of the pairs are wanted
_DENSE_BLOCK = 64
_USUAL_GROWTH = 2.2  # basis vectors a pair: about what trained networks take
_LEAST_GROWTH = 64
_GROWING_BLOCK = 20  # vectors, where the number of pairs is not known yet
_WORTH_REPORTING = 60.0  # seconds
_ENOUGH = 0.5  # seconds that are measured; less is mostly chance
_MOST_STEPS = 8  # that are measured
_FIRST = 40  # further products of Lanczos, before the first pair; of blocks, four
_SOME_PAIRS = 100  # where their number is not known


class Deadline:
    """When a computation stops with what it has: never, where no seconds are given.

    Args:
        seconds: that it may take from now on.
        group: the processes, which all go by the clock of the first one.
    """

    def __init__(self, seconds: float | None, group: Group) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._group = group

    def is_over(self) -> bool:
        """Return whether it is over. One collective, if there is one."""
        if self._end is None:
            return False
        return bool(self._group.broadcast_object(time.monotonic() >= self._end))

    def first_of(self, parts: int) -> Deadline:
        """Return that of the first of several computations, which share the time evenly."""
        left = None if self._end is None else (self._end - time.monotonic()) / parts
        return Deadline(left, self._group)


@dataclass(frozen=True)
class Task:
    """The eigenpairs of one matrix, to be computed.

    Attributes:
        name: of the matrix.
        operator: the matrix.
        options: of the fit.
        growth: what decides how many pairs are enough; None where their number is given.
        checkpoint: what a solver is resumed from, if any.
        deadline: after which the pairs that have converged by then are returned.
        progress: whether to show it.
    """

    name: str
    operator: CurvatureOperator
    options: FitOptions
    growth: ProbeGrowth | None
    checkpoint: MatrixCheckpoint | None
    deadline: Deadline
    progress: bool

    @property
    def rank(self) -> int:
        """How many pairs are wanted, at most."""
        return self.growth.most if self.growth is not None else int(self.options.rank or 0)

    @property
    def is_hessian(self) -> bool:
        """Whether products come one at a time."""
        return isinstance(self.operator, HessianOperator)

    @property
    def solver(self) -> str:
        """The solver, where `"auto"` is to choose it."""
        given, size = self.options.solver, self.operator.shape[0]
        if given == "incremental" and self.is_hessian:
            return "krylov"
        if given != "auto":
            return given
        small = size <= _ALWAYS_DENSE or (size <= _MOSTLY_DENSE and 8 * self.rank >= size)
        return "dense" if small and self.options.max_seconds is None else "krylov"


def solve(task: Task) -> tuple[EigenPairs, dict[str, Any], dict[str, Any]]:
    """Compute the eigenpairs of one matrix.

    With a growth, as many as are enough by it. With a checkpoint, from where it was left. After
    the deadline, those that have converged by then.

    Returns:
        The pairs; how they were found, how good they are, and how long they took; and how long
        that was expected to take (see `Forecast`).
    """
    started, name, operator, growth = time.perf_counter(), task.name, task.operator, task.growth
    space, level = operator.spaces.whole, operator.problem.l2
    if task.checkpoint is not None:
        found = task.checkpoint.finished(operator.device, growth)
        if found is not None:
            _check_derivatives(task, *found)
            if found[0].statistics.get("solver") in ("lanczos", "block_krylov"):
                warn_unconverged(found[0], float(found[0].statistics["tolerance"]))
            warn_of_audit(name, found[1])
            warn_about_values(name, found[0], level)
            return _sharded(found[0], space), found[1], {}
    total = task.rank if growth is None else None
    with (
        operator.problem.network.same_bits(),
        full_precision(operator.device),
        Progress(f"Eigenpairs of the {name}", total, "pair", task.progress) as bar,
    ):
        pairs, foreseen = _run(task, bar)
        is_stopped = STOPPED in pairs.statistics
        if growth is not None:
            pairs = replace(pairs, values=growth.settled(pairs.values))
            if 0 < growth.useful(pairs.values) < len(pairs):
                pairs = pairs.first(growth.useful(pairs.values))
        elif is_stopped:
            _warn_of_time(task, pairs)
        quality = audit(operator.whole_matmat, space, pairs, task.options.seed)
        measured = {key: quality.pop(key) for key in (SKEW, PRODUCT_ROUNDING)}
        pairs = replace(pairs, statistics={**measured, **pairs.statistics})
        warn_of_audit(name, quality)
        if isinstance(operator, RowOperator):
            # No eigenvalue of G or GGN is below λ; one that comes out so is rounded.
            quality["rounded_below_l2"] = max(0.0, operator.row_shift - float(pairs.values[-1]))
            pairs = replace(pairs, values=pairs.values.clamp(min=operator.row_shift))
            quality["data_trace"] = operator.data_trace()
    diagnostics = {
        **pairs.statistics,
        **quality,
        "tail_below_l2": max(0.0, level - pairs.least),
        "seconds": time.perf_counter() - started,
    }
    if task.checkpoint is not None and not is_stopped:
        task.checkpoint.finish(pairs, diagnostics, growth)
    pairs = _sharded(pairs, space)
    warn_about_values(name, pairs, level)
    return pairs, diagnostics, foreseen


def _check_derivatives(task: Task, pairs: EigenPairs, before: Mapping[str, Any]) -> None:
    """Refuse pairs from a checkpoint that are no longer those of the matrix. Cost: a product."""
    operator = task.operator
    with operator.problem.network.same_bits(), full_precision(operator.device):
        now = audit(operator.whole_matmat, operator.spaces.whole, pairs, task.options.seed)
    if not now["residual_rms"] <= max(now["residual_limit"], 2 * before["residual_rms"]):
        raise CheckpointMismatchError(
            f"checkpoint: expected eigenpairs of this {task.name}, got ‖Aq − λq‖ of "
            f"{now['residual_rms']:.2g}, where it was {before['residual_rms']:.2g}: the weights "
            "and the loss are the same, but derivatives of the model have changed (a detach(), "
            "say). Give another folder."
        )


def _sharded(pairs: EigenPairs, space: Space) -> EigenPairs:
    """Mark vectors (K, p) as the own columns of vectors that processes share."""
    if space.group.size == 1:
        return pairs
    return replace(pairs, vectors=ShardedVectors(pairs.vectors, space))


def _warn_of_time(task: Task, pairs: EigenPairs) -> None:
    left = int(pairs.statistics.get(ROWS_LEFT, 0))
    got = f"the {len(pairs)} that had converged" if not left else f"{left:,} rows unprocessed"
    resume = f"with {option('checkpoint=')} it can be resumed"
    if task.checkpoint is not None:
        resume = "the same call resumes"
    warn(
        f"max_seconds: expected {task.rank} eigenpairs of the {task.name}, got {got} when the time "
        f"was over. Error bounds count what is missing. Give more time ({resume}), a smaller rank, "
        f"or fewer parameters, such as {option('params', LastLayer())}.",
        ConvergenceWarning,
    )


def _run(task: Task, bar: Progress) -> tuple[EigenPairs, dict[str, Any]]:
    """Run the solver; return the last forecast of its time as well."""
    operator, options, growth, rank = task.operator, task.options, task.growth, task.rank
    tolerance = options.residual_tolerance
    if tolerance is None:
        tolerance = residual_tolerance(operator.dtype, operator.problem.l2)
    few = 1 if task.is_hessian else _GROWING_BLOCK if growth else default_block_size(rank)
    block = {"krylov": few, "dense": _DENSE_BLOCK}.get(task.solver, 1)
    forecast = Forecast(task, bar.line, block)

    def report(products: int, done: int) -> None:
        forecast.step(products)
        aim = "" if growth is None else f", {growth.aim}"
        bar.show(done, f"{products} products{aim}", forecast.left())

    matrix = _OwnColumns(operator, rank + options.smallest)
    limited = {"tolerance": tolerance, "max_products": options.max_products, "seed": options.seed}
    if task.solver == "dense":
        pairs = _own(eigen.dense(operator, rank, on_step=report), operator)
        if growth is not None:
            growth.least = pairs.exact_least
            projections = operator.spaces.reached.inner(
                growth.rows, operator.spaces.select(pairs.vectors)
            )
            pairs = pairs.first(fewest(growth, pairs.values, projections) or len(pairs))
    elif task.solver == "arpack":
        pairs = _own(eigen.arpack(operator, rank, on_step=report, **limited), operator)
    elif task.solver == "incremental":
        is_over = task.deadline.is_over
        pairs = eigen.incremental_svd(matrix, rank, on_step=report, is_over=is_over)
    else:
        pairs = eigen.block_krylov(
            matrix,
            rank,
            block_size=block,
            smallest=options.smallest,
            max_vectors=_vectors_within(task, block),
            growth=growth,
            on_step=report,
            checkpoint=task.checkpoint,
            is_over=task.deadline.is_over,
            **limited,
        )
    if matrix.is_reached and task.solver in ("krylov", "incremental"):
        pairs = embed(pairs, operator.spaces, operator.problem.l2)
    return pairs, forecast.found


class _OwnColumns:
    """A curvature matrix as solvers work on it: rows of the columns of this process.

    Attributes:
        is_reached: whether it is restricted to the parameters that the examples reach, where these
            are enough for the eigenvalues that are wanted.
    """

    def __init__(self, operator: CurvatureOperator, wanted: int) -> None:
        spaces = operator.spaces
        self.is_reached = spaces.indices is not None and wanted <= spaces.reached.size
        self.space = spaces.reached if self.is_reached else spaces.whole
        self.shape = (self.space.size, self.space.size)
        self.device, self.dtype = operator.device, operator.dtype
        self.matmat: Callable[..., Any] = operator.whole_matmat
        if self.is_reached:
            self.matmat = operator.reached_matmat
        if isinstance(operator, RowOperator):
            whole, reached = operator.row_blocks, operator.reached_row_blocks
            self.row_blocks = reached if self.is_reached else whole
            self.row_scale, self.row_shift = operator.row_scale, operator.row_shift


def _own(pairs: EigenPairs, operator: CurvatureOperator) -> EigenPairs:
    """Keep the columns of this process, of pairs that every process has computed."""
    group = operator.problem.group
    if group.size == 1:
        return pairs
    group.broadcast_(pairs.vectors)  # where eigenvalues repeat, unlike machines find others
    return replace(pairs, vectors=pairs.vectors[:, operator.spaces.whole.own].clone())


def _vectors_within(task: Task, block_size: int) -> int:
    """Return how far a Krylov basis may grow before it is restarted.

    As far as it usually needs to, so that it is not restarted at all; but within its share of the
    memory budget. Vectors of the reached parameters alone are shorter, and there may be more.
    """
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


class Forecast:
    """Forecast the time of one matrix's eigenpairs from that of the first products.

    It is reported in one line where it is more than a minute.

    Args:
        task: what is computed.
        report: called with that line.
        block: vectors a product.
    """

    def __init__(self, task: Task, report: Callable[[str], None], block: int) -> None:
        self._task, self._report, self._block = task, report, block
        self._is_open = task.growth is not None and task.rank > _SOME_PAIRS
        self._pairs = min(task.rank, _SOME_PAIRS) if self._is_open else task.rank
        size = task.operator.shape[0]
        rows = task.operator.num_rows if isinstance(task.operator, RowOperator) else size
        further = 4 * block if block > 1 else _FIRST
        usual = int(_USUAL_GROWTH * self._pairs) + further
        krylov = max(self._pairs, min(usual, size, rows + 2 * block))
        self._total = {"dense": size, "incremental": rows}.get(task.solver, krylov)
        self._started = time.monotonic()
        self._steps: list[tuple[float, int]] = []
        self._has_reported = False
        self.found: dict[str, Any] = {}

    def step(self, done: int) -> None:
        """Measure a step of the solver, after so many products (rows, if incremental)."""
        now = time.monotonic()
        if len(self._steps) <= _MOST_STEPS:
            self._steps.append((now, done))
        if not 1 < len(self._steps) <= _MOST_STEPS:
            return
        first, before = self._steps[0]  # which sets up what the others use
        each = (now - first) / max(1, done - before)
        seconds = first - self._started + each * max(0, self._total - before)
        products = -(-self._total // self._block)
        self.found = {"products": products, "seconds": seconds, "pairs": self._pairs}
        if now - first < _ENOUGH or seconds < _WORTH_REPORTING or self._has_reported:
            return
        self._has_reported = True
        size, unit = (60, "minutes") if seconds < 5400 else (3600, "hours")
        self._report(
            f"Eigenpairs of the {self._task.name}: expected about {seconds / size:.0f} {unit} for "
            f"{'every ' if self._is_open else ''}{self._pairs} pairs (about {products:,} products "
            f"of {each * self._block:.2g} s). Less: {'; '.join(self._cheaper())}."
        )

    def left(self) -> float | None:
        """Return the seconds that remain by the last forecast; None where it is too rough."""
        left = float(self.found.get("seconds", 0.0)) - (time.monotonic() - self._started)
        return left if left > 0 and not self._is_open else None

    def _cheaper(self) -> list[str]:
        """List cheaper ways."""
        found, operator = [], self._task.operator
        if isinstance(operator, GGNOperator | HessianOperator) and operator.problem.num_outputs > 1:
            found.append(f"{option('estimator', 'opg')}, with one gradient an example")
        chosen = operator.problem.parameters
        last = set(LastLayer().names(operator.problem.network.model))
        if not set(chosen.names) <= last:
            sizes = dict(zip(chosen.names, chosen.sizes, strict=True))
            count = sum(sizes.get(name, 0) for name in last)
            found.append(
                f"{option('params', LastLayer())}, with {count:,} in place of {chosen.size:,} "
                "parameters"
            )
        aim = f"a larger {option('tolerance')}" if self._is_open else f"a smaller {option('rank')}"
        return [*found, f"{aim}, a part of the data, or {option('max_seconds')}"]
