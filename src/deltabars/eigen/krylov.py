"""Krylov solvers: Lanczos, and its block form, with full reorthogonalisation.

Both grow an orthonormal basis V of the Krylov space of A from random rows, one block at a time:

    A V_j = (terms in V_1 … V_j) + R_j V_{j+1}

so that T = V A Vᵀ is block tridiagonal. Its eigenpairs (θ, s) give the Ritz pairs (θ, sᵀV) of A,
whose residual norms ‖s_jᵀ R_j‖ cost nothing. Where the basis may not grow any further, it is
restarted from the best of its Ritz vectors (a thick restart), which go on to converge.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.basis import (
    Basis,
    Followed,
    Growth,
    Projected,
    Ritz,
    default_block_size,
    extend,
)
from deltabars.eigen.checkpoint import Checkpoint, Journal
from deltabars.eigen.pairs import (
    LEAST_RITZ,
    OUT_OF_TIME,
    STOPPED,
    EigenPairs,
    IsOver,
    OnStep,
    Products,
    check_rank,
    check_tolerance,
    default_tolerance,
    is_whole,
    residual_scale,
    warn_unconverged,
)
from deltabars.errors import BadValueError, DeltaBarsError, library, option

_MARGIN = 0.8  # of the tolerance: rounding in the products does not show in the recurrence
_CHECKS = 24  # the Ritz pairs are computed each time that the basis has grown by a 24th
_FIRST_CHECK = 16  # vectors, of a basis that may stop at any time
_GUARD_PRODUCTS = 8  # enough for a large missed eigenvalue to rise out of a random start
_SMALL_REST = 64  # dimensions outside the pairs: these can be searched whole
_ROOM_FOR_ONE = 16  # vectors
# So many restarts, and products for so many bases: three times the longest lull seen.
_RESTARTS, _BASES = 200, 40
_LESS = 0.9
_NO_LIMIT = 2**62  # products


def lanczos(operator: Any, rank: int, **options: Any) -> EigenPairs:
    """Compute the `rank` algebraically largest eigenpairs, by Lanczos.

    One product a step: the fewest products, for matrices whose products are dear. A converged set
    is probed for copies of repeated eigenvalues, which the start vector cannot see.

    Args:
        operator: a symmetric matrix (see `eigen.pairs.Products`).
        rank: how many pairs, 1 to P.
        options: those of `block_krylov`, but for `block_size`, which is 1.

    Cost: a few times `rank` products, and as many vectors of memory (no more than `max_vectors`
    and two blocks, the result included); m²P operations for m products.

    Example:
        >>> import torch
        >>> from deltabars.eigen import lanczos
        >>> pairs = lanczos(torch.arange(1.0, 101).double().diag(), rank=3)
        >>> [round(float(value), 6) for value in pairs.values]
        [100.0, 99.0, 98.0]
    """
    return block_krylov(operator, rank, block_size=1, **options)


def block_krylov(
    operator: Any,
    rank: int,
    *,
    block_size: int | None = None,
    smallest: int = 0,
    tolerance: float | None = None,
    max_products: int | None = None,
    max_vectors: int | None = None,
    seed: int = 0,
    growth: Growth | None = None,
    on_step: OnStep | None = None,
    checkpoint: Checkpoint | None = None,
    is_over: IsOver | None = None,
) -> EigenPairs:
    """Compute the `rank` algebraically largest eigenpairs, by block Lanczos.

    More products than `lanczos`, in blocks: faster where many vectors cost little more than one.

    Args:
        operator: a symmetric matrix (see `eigen.pairs.Products`).
        rank: how many pairs, 1 to P.
        block_size: a tenth of the rank by default, between 2 and 100.
        smallest: how many eigenvalues of the lower end must converge as well.
        tolerance: for ‖Aq − λq‖ / residual_scale; 1e-5 in float32, 1e-10 in float64.
        max_products: stop there, with a warning if pairs have not converged; no limit by default.
        max_vectors: rows that the basis may have before it is restarted, at the cost of further
            products; at least `rank + smallest` and two blocks. No limit by default. Stops with a
            warning where restarts no longer help (a cluster of more eigenvalues than that).
        seed: of the random start vectors.
        growth: stops as soon as the converged pairs are enough by its measure; `rank` is then the
            most there may be, and where the basis is full, what has converged is returned and
            nothing is restarted.
        on_step: called with the products done and the pairs converged.
        checkpoint: where the state is saved now and then, and resumed from: with the same operator
            and arguments, to the same bits on a CPU.
        is_over: asked between steps. Where it returns True, the largest pairs that have converged
            by then are returned, at least one, and the state is saved.
    """
    block_size = default_block_size(rank) if block_size is None else block_size
    matrix = Products(operator)
    size = matrix.shape[0]
    check_rank(rank, size)
    limit = default_tolerance(matrix.dtype) if tolerance is None else tolerance
    check_tolerance(limit, matrix.dtype)
    budget = _NO_LIMIT if max_products is None else max_products
    room = size if max_vectors is None else max_vectors
    blocks = min(-(-rank // max(1, block_size)) * block_size, size)
    pairs_and_two_blocks = (rank + smallest if growth is None else 0) + 2 * block_size
    for name, value, least, most in (
        ("block_size", block_size, 1, _NO_LIMIT),
        ("smallest", smallest, 0, size - rank),
        ("max_products", budget, blocks if growth is None else 1, _NO_LIMIT),
        ("max_vectors", room, min(pairs_and_two_blocks, size), _NO_LIMIT),
    ):
        if not is_whole(value) or not least <= value <= most:
            end = "on" if most == _NO_LIMIT else f"to {most}"
            raise BadValueError(
                f"{name}: expected a whole number from {least} {end} for {rank} of P = {size} "
                f"pairs in blocks of {block_size}, got {value!r}."
            )
    generator = torch.Generator().manual_seed(seed)
    run = Run(matrix, generator, limit, budget, room, on_step, is_over)
    if checkpoint is not None:
        run.journal = Journal(checkpoint, matrix, generator, growth)
        run.restarts = run.journal.restarts
    found = None if run.journal is None else run.journal.found
    pairs = found or run.largest(rank, block_size, smallest, growth=growth)
    if not run.is_stopped and bool((pairs.residuals <= limit).all()):
        pairs = with_missed_copies(run, pairs)
    statistics = {
        **pairs.statistics,
        "solver": "lanczos" if block_size == 1 else "block_krylov",
        "products": matrix.products,
        "restarts": run.restarts,
        "converged": int((pairs.residuals <= limit).sum()),
        "tolerance": limit,
        **({STOPPED: OUT_OF_TIME} if run.is_stopped else {}),
    }
    pairs = replace(pairs, statistics=statistics)
    warn_unconverged(pairs, limit)
    return pairs


@dataclass
class Position:
    """The numbers of a search, beside its basis and its projected matrix."""

    next_check: int  # rows of the basis at which Ritz pairs are computed again
    norm: float = 0.0  # the largest entry of the projected matrix; rounding is relative to it
    least: float = math.inf  # the smallest Ritz value so far
    converged: int = 0
    restarts: int = 0
    distance: float = math.inf  # the smallest so far, but for falls of less than a tenth
    since: int = 0  # restarts since then
    products: int = 0  # that were done then

    def stands_still(self, distance: float, products: int, max_vectors: int) -> bool:
        """Return whether restarts no longer help: a cluster that the basis cannot hold."""
        if distance < _LESS * self.distance:
            self.distance, self.since, self.products = distance, 0, products
            return False
        self.since += 1
        return self.since > _RESTARTS and products - self.products > _BASES * max_vectors


@dataclass
class Run:
    """Search for eigenpairs of one matrix, within limits."""

    matrix: Products
    generator: torch.Generator
    tolerance: float
    max_products: int
    max_vectors: int
    on_step: OnStep | None = None
    is_over: IsOver | None = None
    journal: Journal | None = None  # of a run with a checkpoint
    restarts: int = 0
    is_stopped: bool = False  # by `is_over`

    def largest(
        self,
        rank: int,
        block_size: int,
        smallest: int = 0,
        locked: Tensor | None = None,
        growth: Growth | None = None,
    ) -> EigenPairs:
        """Return the largest pairs on the orthogonal complement of `locked` (L, p)."""
        space, device, dtype = self.matrix.space, self.matrix.device, self.matrix.dtype
        basis = Basis(space, rank if growth is None else _FIRST_CHECK, device, dtype, locked)
        followed = None if growth is None else Followed(growth, space)
        projected = Projected(device, space)
        room = space.size - (0 if locked is None else len(locked))
        block_size, aim = min(block_size, room), _MARGIN * self.tolerance
        saved = None
        if self.journal is not None:
            saved = self.journal.resume(basis, projected, followed, block_size, Position)
        if saved is not None:
            block, at = saved
            saved, self.restarts = None, at.restarts
        else:
            start = space.random_rows(block_size, self.generator, device, dtype)
            basis.remove_from(start)
            block, _ = extend(basis, start, block_size, 0.0, self.generator)
            del start
            at = Position(min(rank + smallest, room) if followed is None else _FIRST_CHECK)
        while True:
            basis.append(block)
            if followed is not None:
                followed.append(block)
            image = self.matrix.matmat(block)  # (b, p)
            # The products with the last rows of the basis are V_j A V_jᵀ.
            middle = basis.remove_from(image)[:, -len(block) :].cpu()
            del block  # the basis has it
            at.norm = max(at.norm, float(middle.abs().max()))
            width = min(block_size, room - basis.rows)
            # Rounding in a product is of the order of eps·‖A‖: what is weaker than that is noise.
            noise = 10 * torch.finfo(dtype).eps * at.norm
            block, coupling = extend(basis, image, width, noise, self.generator)
            del image
            projected.append(middle, coupling)
            last = width == 0 or self.matrix.products + width > self.max_products
            full = basis.rows + width > self.max_vectors
            if basis.rows >= at.next_check or last or full:
                ritz = projected.ritz()
                at.least = min(at.least, float(ritz.values[0]))
                at.converged, count = int((ritz.residuals.flip(0)[:rank] <= aim).sum()), None
                distance = ritz.distance(rank, smallest, aim)
                if followed is not None:
                    at.converged = min(ritz.leading(aim), rank)
                    count = followed.fewest(ritz, at.converged)
                    if full or last:
                        count = count or max(1, at.converged)
                elif (
                    last
                    or distance == 0
                    or (full and at.stands_still(distance, self.matrix.products, self.max_vectors))
                ):
                    count = rank
                if count is not None:
                    return _found_pairs(basis, ritz, count, at.least, self.tolerance)
                if full:
                    kept = _to_keep(len(ritz.values), rank, smallest, block_size)
                    basis.keep(projected.restart(ritz, kept))
                    at.restarts = self.restarts = at.restarts + 1
                at.next_check = basis.rows + max(block_size, basis.rows // _CHECKS)
            if self.on_step is not None:
                self.on_step(self.matrix.products, at.converged)
            if self.journal is not None:
                self.journal.save(basis, projected, block, asdict(at))
            if self.is_over is not None and self.is_over():
                ritz = projected.ritz()
                converged = min(ritz.leading(aim), rank)
                if converged:
                    self.is_stopped = True
                    if self.journal is not None:
                        self.journal.save(basis, projected, block, asdict(at), at_once=True)
                    if followed is not None:
                        converged = followed.fewest(ritz, converged) or converged
                    return _found_pairs(basis, ritz, converged, at.least, self.tolerance)


def _to_keep(size: int, rank: int, smallest: int, block_size: int) -> Tensor:
    """Choose which of `size` ascending Ritz pairs to keep: those wanted, and a third of the rest.

    What is kept beyond the wanted pairs need not be found again; what is not leaves room.
    """
    rest = size - rank - smallest
    spare = max(0, min(rest // 3, rest - 2 * block_size))
    below = smallest + spare // 2 if smallest else 0
    above = rank + smallest + spare - below
    return torch.cat([torch.arange(below), torch.arange(size - above, size)])


def _found_pairs(basis: Basis, ritz: Ritz, rank: int, least: float, tolerance: float) -> EigenPairs:
    """Return the `rank` largest Ritz pairs, and those of the lower end that are known as well.

    Their vectors take the place of the basis.
    """
    basis.keep(ritz.coordinates.flip(1)[:, :rank])
    rest = max(0, len(ritz.values) - rank)
    known = int((ritz.residuals[:rest] <= tolerance).long().cumprod(0).sum())
    values, residuals = ritz.values.flip(0)[:rank], ritz.residuals.flip(0)[:rank]
    lower, lower_residuals = ritz.values[:known], ritz.residuals[:known]
    vectors, statistics = basis.take(), {LEAST_RITZ: least}
    found = EigenPairs(values, vectors, residuals, lower, lower_residuals, statistics)
    return found.to(vectors.device)


def with_missed_copies(run: Run, pairs: EigenPairs) -> EigenPairs:
    """Search outside the pairs for eigenvalues larger than the last, and insert them.

    A Krylov space of b start vectors holds at most b vectors for each distinct eigenvalue. A few
    steps from a random start, orthogonal to the pairs, bring up further copies of repeated ones;
    Ritz values are lower bounds, so what they show is there.
    """
    rank = len(pairs)
    beside = max(run.max_vectors - rank, _ROOM_FOR_ONE)  # the pairs are still there
    # A few products each, for pairs that are there in time.
    search = replace(run, max_vectors=beside, journal=None, is_over=None)
    while rank < run.matrix.shape[0]:
        if run.journal is not None:
            run.journal.save_found(pairs, run.restarts)
        if not _shows_more_than(pairs, search):
            return pairs
        pairs = _insert(pairs, search.largest(1, 1, locked=pairs.vectors))
    return pairs


def _insert(pairs: EigenPairs, missed: EigenPairs) -> EigenPairs:
    """Insert one more pair in order and drop the last. The vectors move in place."""
    rank, at = len(pairs), int((pairs.values >= missed.values).sum())
    for row in range(rank - 1, at, -1):
        pairs.vectors[row] = pairs.vectors[row - 1]
    pairs.vectors[at : at + 1] = missed.vectors
    values = torch.cat([pairs.values[:at], missed.values, pairs.values[at:]])[:rank]
    residuals = torch.cat([pairs.residuals[:at], missed.residuals, pairs.residuals[at:]])[:rank]
    return replace(pairs, values=values, residuals=residuals)


def _shows_more_than(pairs: EigenPairs, run: Run) -> bool:
    """Return whether a few steps outside the pairs show a larger eigenvalue than their last."""
    done, rest = run.matrix.products, run.matrix.shape[0] - len(pairs)
    if run.max_products - done < 2:
        return False
    steps = rest if rest <= _SMALL_REST else _GUARD_PRODUCTS
    probe = replace(run, max_products=min(done + steps, run.max_products), on_step=None)
    top = probe.largest(1, 1, locked=pairs.vectors).values[0]
    slack = 10 * run.tolerance * float(residual_scale(pairs.values)[-1])
    return float(top) > float(pairs.values[-1]) + slack


def arpack(
    operator: Any,
    rank: int,
    *,
    tolerance: float | None = None,
    max_products: int | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> EigenPairs:
    """Compute the `rank` algebraically largest eigenpairs by `scipy.sparse.linalg.eigsh`.

    ARPACK's own test is relative to each eigenvalue; the residuals returned are measured with
    `rank` further products. Copies of repeated eigenvalues are searched as by `lanczos`. Arguments
    as for `lanczos`; the rank must be below P.
    """
    scipy = library("scipy.sparse.linalg", "scipy")
    matrix = Products(operator)
    size = matrix.shape[0]
    check_rank(rank, size)
    if rank >= size:
        raise BadValueError(
            f"rank: expected below P = {size} for ARPACK, got {rank}. Use the dense solver."
        )
    limit = default_tolerance(matrix.dtype) if tolerance is None else tolerance

    def matvec(vector: Any) -> Any:
        row = torch.from_numpy(vector.reshape(1, -1)).to(matrix.device, matrix.dtype)
        image = matrix.matmat(row)
        if on_step is not None:
            on_step(matrix.products, 0)
        return image[0].cpu().numpy()

    generator = torch.Generator().manual_seed(seed)
    start = matrix.space.random_rows(1, generator, torch.device("cpu"), matrix.dtype).numpy()[0]
    steps = min(size, max(2 * rank + 1, 20))
    restarts = None if max_products is None else max(1, max_products // (steps - rank))
    try:
        values, columns = scipy.eigsh(
            scipy.LinearOperator(matrix.shape, matvec=matvec, dtype=start.dtype),
            k=rank,
            which="LA",
            v0=start,
            tol=limit,
            ncv=steps,
            maxiter=restarts,
        )
    except scipy.ArpackNoConvergence as error:
        raise DeltaBarsError(
            f"ARPACK: expected {rank} converged eigenpairs, got {len(error.eigenvalues)}. Allow "
            f"more products, or use {option('solver', 'krylov')}."
        ) from error
    except scipy.ArpackError as error:
        raise DeltaBarsError(f"ARPACK failed: {error}. Use solver='krylov'.") from error
    largest = torch.from_numpy(values).to(matrix.device, torch.float64).flip(0)
    vectors = torch.from_numpy(columns).to(matrix.device, matrix.dtype).T.flip(0).contiguous()
    norms = (matrix.matmat(vectors).double() - largest[:, None] * vectors.double()).norm(dim=1)
    pairs = EigenPairs(largest, vectors, norms / residual_scale(largest))
    run = Run(matrix, generator, limit, max_products or _NO_LIMIT, size)
    pairs = with_missed_copies(run, pairs)
    counts = {"products": matrix.products, "converged": rank, "tolerance": limit}
    pairs = replace(pairs, statistics={"solver": "arpack", **counts})
    warn_unconverged(pairs, 10 * limit)  # ARPACK's test and ours differ by the rounding of A
    return pairs
