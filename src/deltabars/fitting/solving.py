"""Which eigensolver a matrix gets, and how good its answer is."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import deltabars.eigen as eigen
from deltabars.curvature.base import CurvatureOperator, RowOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.eigen.audit import audit, warn_of_audit
from deltabars.eigen.basis import default_block_size
from deltabars.eigen.krylov import ROWS_LEFT, STOPPED, OnStep
from deltabars.eigen.pairs import (
    PRODUCT_ROUNDING,
    SKEW,
    EigenPairs,
    embed,
    is_whole,
    residual_tolerance,
    warn_unconverged,
)
from deltabars.eigen.projected import fewest
from deltabars.errors import BadValueError, CheckpointMismatchError, ConvergenceWarning, option
from deltabars.fitting.checkpoints import MatrixCheckpoint
from deltabars.fitting.forecast import Forecast
from deltabars.fitting.growth import ProbeGrowth
from deltabars.problem.parameters import LastLayer
from deltabars.runtime.memory import BASIS, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Deadline, Progress
from deltabars.runtime.vectors import ShardedVectors, Space

SOLVERS = ("auto", "krylov", "incremental", "dense", "arpack")

_ALWAYS_DENSE = 512  # parameters: forming the matrix costs less than a Krylov space is worth
_MOSTLY_DENSE = 4096  # likewise, where an eighth or more of the pairs are wanted
_USUAL_GROWTH = 2.2  # basis vectors a pair: about what trained networks take
_LEAST_GROWTH = 64
_GROWING_BLOCK = 20  # vectors, where nobody knows yet how many pairs there will be


@dataclass(frozen=True)
class SolverOptions:
    """How eigenpairs are to be found; the fields are those of `fit`, checked."""

    solver: str
    rank: int
    seed: int
    tolerance: float | None
    max_products: int | None
    smallest: int

    def __post_init__(self) -> None:
        if not isinstance(self.solver, str) or self.solver not in SOLVERS:
            raise BadValueError(f"solver: expected one of {list(SOLVERS)}, got {self.solver!r}.")
        if not is_whole(self.rank) or self.rank < 1:
            raise BadValueError(f"rank: expected a whole number from 1 to P, got {self.rank!r}.")
        if not is_whole(self.seed) or not 0 <= self.seed < 2**63:
            raise BadValueError(
                f"seed: expected a whole number from 0 to 2^63 − 1, got {self.seed!r}."
            )
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "seed", int(self.seed))
        if self.max_products is not None and (
            not is_whole(self.max_products) or self.max_products < 1
        ):
            raise BadValueError(
                f"max_products: expected a whole number from 1 on, got {self.max_products!r}."
            )
        if not is_whole(self.smallest) or self.smallest < 0:
            raise BadValueError(
                f"smallest: expected a whole number from 0 on, got {self.smallest!r}."
            )
        if self.tolerance is not None and not (
            isinstance(self.tolerance, int | float) and self.tolerance > 0
        ):
            raise BadValueError(
                f"residual_tolerance: expected a number above zero, got {self.tolerance!r}."
            )

    def as_given(self) -> dict[str, Any]:
        """The options by the names that `fit` has for them."""
        own = asdict(self)
        return {**own, "residual_tolerance": own.pop("tolerance")}

    def check_for(self, matrices: tuple[str, ...]) -> None:
        """Refuse options that none of the matrices to be solved can follow."""
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


def solve(
    name: str,
    operator: CurvatureOperator,
    options: SolverOptions,
    progress: bool,
    growth: ProbeGrowth | None = None,
    checkpoint: MatrixCheckpoint | None = None,
    deadline: Deadline | None = None,
) -> tuple[EigenPairs, dict[str, Any], dict[str, Any]]:
    """The eigenpairs of one matrix; how they were found, how good they are, and how long they
    took; and how long that was expected to take (see `Forecast`). With a growth, as many as are
    enough by it, up to the rank of the options. With a checkpoint, from where it was left. After
    the deadline, with those that there are by then.
    """
    started = time.perf_counter()
    space = operator.problem.spaces.whole
    deadline = deadline or Deadline(None, space.group)
    if growth is not None:
        options = replace(options, rank=min(options.rank, growth.most))
    done = None if checkpoint is None else checkpoint.finished(operator.device, growth, space)
    if done is not None:
        _check_derivatives(name, operator, *done, options.seed)
        _warn_again(done[0])
        warn_of_audit(name, done[1], stacklevel=4)
        return _shared_out(done[0], space), done[1], {}
    with (
        operator.problem.network.same_bits(),
        full_precision(operator.device),
        Progress(
            f"Eigenpairs of the {name}",
            options.rank if growth is None else None,
            "pair",
            progress,
        ) as bar,
    ):
        forecast = Forecast(name, operator, bar.say)
        try:
            pairs = _run(operator, options, bar, growth, checkpoint, deadline, forecast)
        finally:
            foreseen = forecast.end()
        is_stopped = STOPPED in pairs.statistics
        if growth is not None:
            pairs = replace(pairs, values=growth.settled(pairs.values))
            if 0 < growth.useful(pairs.values) < len(pairs):
                pairs = pairs.first(growth.useful(pairs.values))
        elif is_stopped:
            _warn_of_time(name, options.rank, pairs, checkpoint is not None)
        quality = audit(operator.whole_matmat, space, pairs, options.seed)
        measured = {name: quality.pop(name) for name in (SKEW, PRODUCT_ROUNDING)}
        pairs = replace(pairs, statistics={**measured, **pairs.statistics})
        warn_of_audit(name, quality, stacklevel=4)
        if isinstance(operator, RowOperator):
            # No eigenvalue of G or GGN is below λ; one that comes out so is rounded.
            floor = operator.row_shift
            quality["rounded_below_l2"] = max(0.0, floor - float(pairs.values[-1]))
            pairs = replace(pairs, values=pairs.values.clamp(min=floor))
            quality["data_trace"] = operator.data_trace()
    below = max(0.0, operator.problem.l2 - pairs.least)
    seconds = time.perf_counter() - started
    found = {**pairs.statistics, **quality, "tail_below_l2": below, "seconds": seconds}
    if checkpoint is not None and is_stopped:
        checkpoint.session.leave()
    elif checkpoint is not None:
        checkpoint.finish(pairs, found, growth, space)
    return _shared_out(pairs, space), found, foreseen


def _check_derivatives(
    name: str,
    operator: CurvatureOperator,
    pairs: EigenPairs,
    before: Mapping[str, Any],
    seed: int,
) -> None:
    """Refuse pairs from a checkpoint that are not those of the matrix any more: one product."""
    with operator.problem.network.same_bits(), full_precision(operator.device):
        now = audit(operator.whole_matmat, operator.problem.spaces.whole, pairs, seed)
    if not now["residual_rms"] <= max(now["residual_limit"], 2 * before["residual_rms"]):
        raise CheckpointMismatchError(
            f"checkpoint: expected eigenpairs of this {name}, got ‖Aq − λq‖ of "
            f"{now['residual_rms']:.2g}, where it was {before['residual_rms']:.2g}: with the same "
            "weights and the same loss, the derivatives of the model are others (a detach(), say). "
            "Give another folder."
        )


def _shared_out(pairs: EigenPairs, space: Space) -> EigenPairs:
    """Pairs with vectors (K, p) of the columns that are here, as what they are."""
    if space.group.size == 1:
        return pairs
    return replace(pairs, vectors=ShardedVectors(pairs.vectors, space))


def _warn_of_time(name: str, rank: int, pairs: EigenPairs, is_kept: bool) -> None:
    left = int(pairs.statistics.get(ROWS_LEFT, 0))
    got = f"the {len(pairs)} that had converged" if not left else f"none of {left:,} rows' share"
    resume = (
        "the same call resumes" if is_kept else f"with {option('checkpoint=')} it can be resumed"
    )
    warnings.warn(
        f"max_seconds: expected {rank} eigenpairs of the {name}, got {got} when the time was over. "
        f"Error bounds count what is missing. Give more time ({resume}), a smaller rank, or fewer "
        f"parameters, such as {option('params', LastLayer())}.",
        ConvergenceWarning,
        stacklevel=4,
    )


def _warn_again(pairs: EigenPairs) -> None:
    """Say of pairs from a checkpoint what their solver said of them."""
    if pairs.statistics.get("solver") in ("lanczos", "block_krylov"):
        warn_unconverged(pairs, float(pairs.statistics["tolerance"]))


def _run(
    operator: CurvatureOperator,
    options: SolverOptions,
    bar: Progress,
    growth: ProbeGrowth | None,
    checkpoint: MatrixCheckpoint | None,
    deadline: Deadline,
    forecast: Forecast,
) -> EigenPairs:
    rank = options.rank

    def report(products: int, done: int) -> None:
        aim = "" if growth is None else f", {growth.aim}"
        forecast.step(products)
        bar.show(done, f"{products} products{aim}", forecast.left())

    tolerance = options.tolerance
    if tolerance is None:
        tolerance = residual_tolerance(operator.dtype, operator.problem.l2)
    common: dict[str, Any] = {
        "tolerance": tolerance,
        "max_products": options.max_products,
        "seed": options.seed,
    }
    size = operator.shape[0]
    kind = options.solver
    if kind == "auto":
        small = size <= _ALWAYS_DENSE or (size <= _MOSTLY_DENSE and 8 * rank >= size)
        kind = "dense" if small else "krylov"
    is_open = growth is not None
    if kind == "dense":
        forecast.begin(kind, rank, 64, False, size)
        try:
            pairs = eigen.dense(operator, rank, on_step=_in_time(report, size, deadline))
        except _TooLongError:
            kind = "krylov"
        else:
            if growth is not None:
                growth.least = pairs.exact_least
            pairs = _own(pairs, operator)
            return pairs if growth is None else _cut(pairs, operator, growth)
    if kind == "arpack":
        forecast.begin(kind, rank, 1, False, size)
        return _own(eigen.arpack(operator, rank, on_step=report, **common), operator)
    if growth is not None:
        common["growth"] = growth
    common |= {"checkpoint": checkpoint, "is_over": deadline.is_over, "on_step": report}
    places = operator.reached
    if places is not None and rank + options.smallest > len(places):
        places = None
    matrix = _Shared(operator, is_reached=places is not None)
    if kind == "incremental" and isinstance(operator, RowOperator):
        forecast.begin(kind, rank, 1, False, 2 * rank)
        kept = {name: common[name] for name in ("on_step", "checkpoint", "is_over")}
        pairs = eigen.incremental_svd(matrix, rank, **kept)
    elif isinstance(operator, HessianOperator):
        common["max_vectors"] = _vectors_within(operator, rank + options.smallest, 1, growth)
        forecast.begin(kind, rank, 1, is_open, common["max_vectors"])
        pairs = eigen.lanczos(matrix, rank, smallest=options.smallest, **common)
    else:
        block = default_block_size(rank) if growth is None else _GROWING_BLOCK
        common["max_vectors"] = _vectors_within(operator, rank, block, growth)
        forecast.begin(kind, rank, block, is_open, common["max_vectors"])
        pairs = eigen.block_krylov(matrix, rank, block_size=block, **common)
    if places is None:
        return pairs
    return embed(pairs, operator.problem.spaces, operator.problem.l2)


class _TooLongError(Exception):
    """The matrix will not be formed in time."""


def _in_time(report: OnStep, size: int, deadline: Deadline) -> OnStep:
    """A report of products, of `size` in all, that ends them where there is no time for them."""
    started = time.monotonic()

    def step(products: int, done: int) -> None:
        report(products, done)
        ahead = (time.monotonic() - started) * (size - products) / products
        if products < size and deadline.is_over(ahead):
            raise _TooLongError

    return step


class _Shared:
    """A curvature matrix as solvers work on it: each rank has its own columns of the rows.

    Args:
        is_reached: whether it is that among the parameters that the examples reach.
    """

    def __init__(self, operator: CurvatureOperator, is_reached: bool) -> None:
        spaces = operator.problem.spaces
        self.space = spaces.reached if is_reached else spaces.whole
        self.shape = (self.space.size, self.space.size)
        self.device, self.dtype = operator.device, operator.dtype
        self.matmat = operator.reached_matmat if is_reached else operator.whole_matmat
        if isinstance(operator, RowOperator):
            self.row_blocks = operator.reached_row_blocks if is_reached else operator.row_blocks
            self.row_scale, self.row_shift = operator.row_scale, operator.row_shift


def _own(pairs: EigenPairs, operator: CurvatureOperator) -> EigenPairs:
    """Pairs that every rank has computed, with the columns of this rank."""
    group = operator.problem.group
    if group.size == 1:
        return pairs
    group.agree_(pairs.vectors)  # where eigenvalues repeat, unlike machines find others
    return replace(pairs, vectors=pairs.vectors[:, operator.problem.spaces.whole.own].clone())


def _cut(pairs: EigenPairs, operator: CurvatureOperator, growth: ProbeGrowth) -> EigenPairs:
    """As many of the pairs as are enough."""
    spaces = operator.problem.spaces
    projections = spaces.reached.inner(growth.rows, spaces.picked(pairs.vectors))
    return pairs.first(fewest(growth, pairs.values, projections) or len(pairs))


def _vectors_within(
    operator: CurvatureOperator, pairs: int, block_size: int, growth: ProbeGrowth | None
) -> int:
    """How far a Krylov basis may grow before it is restarted.

    As far as it needs to as a rule, in which case it is not restarted at all; but within its share
    of the memory budget. Vectors of the reached parameters alone are shorter, and there may be more
    of them: what counts is the memory.
    """
    # Of the rank with the most columns, so that all come to the same number.
    spaces = operator.problem.spaces
    size, columns = (max(space.columns.widths) for space in (spaces.whole, spaces.reached))
    row = max(1, columns) * operator.dtype.itemsize
    fitting = share(operator.problem.memory_budget, BASIS) // row
    if growth is not None:
        return max(fitting, 4 * block_size)
    usual = int(_USUAL_GROWTH * pairs) - 4 * block_size
    if columns < size:  # the pairs are put among zeros at the end, beside the basis
        usual = max(usual, int((_USUAL_GROWTH - 1) * pairs * size / columns) - 4 * block_size)
    usual = max(usual, pairs + _LEAST_GROWTH)
    return max(min(usual, fitting - 2 * block_size), pairs + 2 * block_size)
