"""The eigenpairs of one matrix: the choice of a solver, its options, and an audit of its answer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import deltabars.eigen as eigen
from deltabars.curvature.base import CurvatureOperator, RowOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.eigen.basis import default_block_size, fewest
from deltabars.eigen.pairs import (
    PRODUCT_ROUNDING,
    ROWS_LEFT,
    SKEW,
    STOPPED,
    EigenPairs,
    OnStep,
    audit,
    embed,
    residual_tolerance,
    warn_of_audit,
    warn_unconverged,
)
from deltabars.errors import CheckpointMismatchError, ConvergenceWarning, option
from deltabars.fitting.checkpoints import MatrixCheckpoint
from deltabars.fitting.forecast import Forecast
from deltabars.fitting.growth import ProbeGrowth
from deltabars.fitting.options import Deadline, FitOptions
from deltabars.problem.parameters import LastLayer
from deltabars.runtime.memory import BASIS, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import ShardedVectors, Space

_ALWAYS_DENSE = 512  # parameters: forming the matrix costs less than a Krylov space is worth
_MOSTLY_DENSE = 4096  # likewise, where an eighth or more of the pairs are wanted
_USUAL_GROWTH = 2.2  # basis vectors a pair: about what trained networks take
_LEAST_GROWTH = 64
_GROWING_BLOCK = 20  # vectors, where the number of pairs is not known yet


def solve(
    name: str,
    operator: CurvatureOperator,
    options: FitOptions,
    *,
    progress: bool,
    growth: ProbeGrowth | None,
    checkpoint: MatrixCheckpoint | None,
    deadline: Deadline,
) -> tuple[EigenPairs, dict[str, Any], dict[str, Any]]:
    """Compute the eigenpairs of one matrix.

    With a growth, as many as are enough by it. With a checkpoint, from where it was left. After
    the deadline, those that have converged by then.

    Returns:
        The pairs; how they were found, how good they are, and how long they took; and how long
        that was expected to take (see `Forecast`).
    """
    started = time.perf_counter()
    space, network = operator.spaces.whole, operator.problem.network
    rank = growth.most if growth is not None else int(options.rank or 0)
    found = None if checkpoint is None else checkpoint.finished(operator.device, growth)
    if found is not None:
        _check_derivatives(name, operator, *found, options.seed)
        if found[0].statistics.get("solver") in ("lanczos", "block_krylov"):
            warn_unconverged(found[0], float(found[0].statistics["tolerance"]))
        warn_of_audit(name, found[1])
        return _sharded(found[0], space), found[1], {}
    total = rank if growth is None else None
    with (
        network.same_bits(),
        full_precision(operator.device),
        Progress(f"Eigenpairs of the {name}", total, "pair", progress) as bar,
    ):
        pairs, foreseen = _run(name, operator, options, rank, bar, growth, checkpoint, deadline)
        is_stopped = STOPPED in pairs.statistics
        if growth is not None:
            pairs = replace(pairs, values=growth.settled(pairs.values))
            if 0 < growth.useful(pairs.values) < len(pairs):
                pairs = pairs.first(growth.useful(pairs.values))
        elif is_stopped:
            _warn_of_time(name, rank, pairs, checkpoint is not None)
        quality = audit(operator.whole_matmat, space, pairs, options.seed)
        measured = {key: quality.pop(key) for key in (SKEW, PRODUCT_ROUNDING)}
        pairs = replace(pairs, statistics={**measured, **pairs.statistics})
        warn_of_audit(name, quality)
        if isinstance(operator, RowOperator):
            # No eigenvalue of G or GGN is below λ; one that comes out so is rounded.
            floor = operator.row_shift
            quality["rounded_below_l2"] = max(0.0, floor - float(pairs.values[-1]))
            pairs = replace(pairs, values=pairs.values.clamp(min=floor))
            quality["data_trace"] = operator.data_trace()
    below = max(0.0, operator.problem.l2 - pairs.least)
    seconds = time.perf_counter() - started
    diagnostics = {**pairs.statistics, **quality, "tail_below_l2": below, "seconds": seconds}
    if checkpoint is not None and not is_stopped:
        checkpoint.finish(pairs, diagnostics, growth)
    return _sharded(pairs, space), diagnostics, foreseen


def _check_derivatives(
    name: str,
    operator: CurvatureOperator,
    pairs: EigenPairs,
    before: Mapping[str, Any],
    seed: int,
) -> None:
    """Refuse pairs from a checkpoint that are no longer those of the matrix. Cost: a product."""
    with operator.problem.network.same_bits(), full_precision(operator.device):
        now = audit(operator.whole_matmat, operator.spaces.whole, pairs, seed)
    if not now["residual_rms"] <= max(now["residual_limit"], 2 * before["residual_rms"]):
        raise CheckpointMismatchError(
            f"checkpoint: expected eigenpairs of this {name}, got ‖Aq − λq‖ of "
            f"{now['residual_rms']:.2g}, where it was {before['residual_rms']:.2g}: the weights "
            "and the loss are the same, but derivatives of the model have changed (a detach(), "
            "say). Give another folder."
        )


def _sharded(pairs: EigenPairs, space: Space) -> EigenPairs:
    """Mark vectors (K, p) as the own columns of vectors that processes share."""
    if space.group.size == 1:
        return pairs
    return replace(pairs, vectors=ShardedVectors(pairs.vectors, space))


def _warn_of_time(name: str, rank: int, pairs: EigenPairs, is_kept: bool) -> None:
    left = int(pairs.statistics.get(ROWS_LEFT, 0))
    got = f"the {len(pairs)} that had converged" if not left else f"{left:,} rows unprocessed"
    resume = f"with {option('checkpoint=')} it can be resumed"
    if is_kept:
        resume = "the same call resumes"
    warnings.warn(
        f"max_seconds: expected {rank} eigenpairs of the {name}, got {got} when the time was over. "
        f"Error bounds count what is missing. Give more time ({resume}), a smaller rank, or fewer "
        f"parameters, such as {option('params', LastLayer())}.",
        ConvergenceWarning,
        stacklevel=4,
    )


def _run(
    name: str,
    operator: CurvatureOperator,
    options: FitOptions,
    rank: int,
    bar: Progress,
    growth: ProbeGrowth | None,
    checkpoint: MatrixCheckpoint | None,
    deadline: Deadline,
) -> tuple[EigenPairs, dict[str, Any]]:
    """Choose a solver and run it; return the last forecast of its time as well."""
    size, kind = operator.shape[0], options.solver
    if kind == "auto":
        small = size <= _ALWAYS_DENSE or (size <= _MOSTLY_DENSE and 8 * rank >= size)
        kind = "dense" if small else "krylov"
    tolerance = options.residual_tolerance
    if tolerance is None:
        tolerance = residual_tolerance(operator.dtype, operator.problem.l2)
    matrix = _OwnColumns(operator, rank + options.smallest)
    is_hessian = isinstance(operator, HessianOperator)
    block = 1 if is_hessian else _GROWING_BLOCK if growth else default_block_size(rank)
    room = _vectors_within(operator, rank + options.smallest, block, growth)
    forecast: Forecast | None = None

    def report(products: int, done: int) -> None:
        assert forecast is not None
        aim = "" if growth is None else f", {growth.aim}"
        forecast.step(products)
        bar.show(done, f"{products} products{aim}", forecast.left())

    def begin(kind: str, block: int, most: int) -> Forecast:
        return Forecast(
            name,
            operator,
            bar.line,
            kind=kind,
            pairs=rank,
            block=block,
            is_open=growth is not None and kind == "krylov",
            most=most,
        )

    try:
        if kind == "dense":
            forecast = begin(kind, 64, size)
            try:
                pairs = eigen.dense(operator, rank, on_step=_in_time(report, size, deadline))
            except _TooLongError:
                kind = "krylov"
            else:
                pairs = _cut(pairs, operator, growth) if growth else _own(pairs, operator)
                return pairs, forecast.end()
        if kind == "arpack":
            forecast = begin(kind, 1, size)
            pairs = eigen.arpack(
                operator,
                rank,
                tolerance=tolerance,
                max_products=options.max_products,
                seed=options.seed,
                on_step=report,
            )
            return _own(pairs, operator), forecast.end()
        if kind == "incremental" and not is_hessian:
            forecast = begin(kind, 1, 2 * rank)
            pairs = eigen.incremental_svd(matrix, rank, on_step=report, is_over=deadline.is_over)
        else:
            forecast = begin("krylov", block, room)
            pairs = eigen.block_krylov(
                matrix,
                rank,
                block_size=block,
                smallest=options.smallest,
                tolerance=tolerance,
                max_products=options.max_products,
                max_vectors=room,
                seed=options.seed,
                growth=growth,
                on_step=report,
                checkpoint=checkpoint,
                is_over=deadline.is_over,
            )
    finally:
        foreseen = {} if forecast is None else forecast.end()
    if matrix.is_reached:
        pairs = embed(pairs, operator.spaces, operator.problem.l2)
    return pairs, foreseen


class _TooLongError(Exception):
    """The matrix will not be formed in time."""


def _in_time(report: OnStep, size: int, deadline: Deadline) -> OnStep:
    """Report products, of `size` in all, and stop them where there is no time for them."""
    started = time.monotonic()

    def step(products: int, done: int) -> None:
        report(products, done)
        ahead = (time.monotonic() - started) * (size - products) / products
        if products < size and deadline.is_over(ahead):
            raise _TooLongError

    return step


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


def _cut(pairs: EigenPairs, operator: CurvatureOperator, growth: ProbeGrowth) -> EigenPairs:
    """Keep as many of all pairs as are enough."""
    growth.least = pairs.exact_least
    pairs, spaces = _own(pairs, operator), operator.spaces
    projections = spaces.reached.inner(growth.rows, spaces.select(pairs.vectors))
    return pairs.first(fewest(growth, pairs.values, projections) or len(pairs))


def _vectors_within(
    operator: CurvatureOperator, pairs: int, block_size: int, growth: ProbeGrowth | None
) -> int:
    """Return how far a Krylov basis may grow before it is restarted.

    As far as it usually needs to, so that it is not restarted at all; but within its share of the
    memory budget. Vectors of the reached parameters alone are shorter, and there may be more.
    """
    # Of the process with the most columns, so that all come to the same number.
    spaces = operator.spaces
    size, columns = (max(space.columns.widths) for space in (spaces.whole, spaces.reached))
    row = max(1, columns) * operator.dtype.itemsize
    fitting = share(operator.problem.memory_budget, BASIS) // row
    if growth is not None:
        return max(fitting, 4 * block_size)
    usual = int(_USUAL_GROWTH * pairs) - 4 * block_size
    if columns < size:  # the pairs are expanded at the end, beside the basis
        usual = max(usual, int((_USUAL_GROWTH - 1) * pairs * size / columns) - 4 * block_size)
    usual = max(usual, pairs + _LEAST_GROWTH)
    return max(min(usual, fitting - 2 * block_size), pairs + 2 * block_size)
