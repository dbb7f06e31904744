"""Krylov solvers: Lanczos, and its block form, with full reorthogonalisation.

Both grow an orthonormal basis V of the Krylov space of A from random rows, one block at a time:

    A V_j = (terms in V_1 … V_j) + R_j V_{j+1}

so that T = V A Vᵀ is block tridiagonal. Its eigenpairs (θ, s) give the Ritz pairs (θ, sᵀV) of A,
whose residual norms ‖s_jᵀ R_j‖ cost nothing. Where the basis may not grow any further, it is
restarted from the best of its Ritz vectors (a thick restart), which go on to converge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.basis import Basis, Followed, Growth, Projected, default_block_size, extend
from deltabars.eigen.checkpoint import Checkpoint, Journal, Position
from deltabars.eigen.pairs import (
    OUT_OF_TIME,
    STOPPED,
    EigenPairs,
    IsOver,
    OnStep,
    Products,
    as_products,
    check_rank,
    check_tolerance,
    default_tolerance,
    is_whole,
    residual_scale,
    warn_unconverged,
)
from deltabars.eigen.restart import Patience, found_pairs, insert, to_keep
from deltabars.errors import BadValueError, DeltaBarsError, MissingDependencyError, option

_MARGIN = 0.8  # of the tolerance: rounding in the products does not show in the recurrence
_CHECKS = 24  # the Ritz pairs are computed each time that the basis has grown by a 24th
_FIRST_CHECK = 16  # vectors, of a basis that may stop at any time
_GUARD_PRODUCTS = 8  # enough for a large missed eigenvalue to rise out of a random start
_SMALL_REST = 64  # dimensions outside the pairs: these can be searched whole
_ROOM_FOR_ONE = 16  # vectors


def lanczos(operator: Any, rank: int, **options: Any) -> EigenPairs:
    """Compute the `rank` algebraically largest eigenpairs, by Lanczos.

    One product a step: the fewest products, for matrices whose products are dear. A converged set
    is probed for copies of repeated eigenvalues, which the start vector cannot see.

    Args:
        operator: a symmetric matrix (see `eigen.pairs.as_products`).
        rank: how many pairs, 1 to P.
        options: those of `block_krylov`, but for `block_size`, which is 1.

    Cost: a few times `rank` products, and as many vectors of memory (no more than `max_vectors`
    and two blocks, the result included); m²P operations for m steps.

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

    More products than `lanczos`, in blocks: faster where many vectors cost little more than one
    (a kept Jacobian).

    Args:
        operator: a symmetric matrix (see `eigen.pairs.as_products`).
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
    if block_size < 1:
        raise BadValueError(f"block_size: expected at least 1, got {block_size}.")
    matrix = as_products(operator)
    size = matrix.shape[0]
    check_rank(rank, size)
    if smallest < 0 or rank + smallest > size:
        raise BadValueError(f"smallest: expected 0 to {size - rank} (P − rank), got {smallest}.")
    limit = default_tolerance(matrix.dtype) if tolerance is None else tolerance
    check_tolerance(limit, matrix.dtype)
    budget = 2**62 if max_products is None else max_products
    fewest = min(-(-rank // block_size) * block_size, size)
    if budget < fewest and growth is None:
        raise BadValueError(
            f"max_products: expected at least {fewest} for {rank} pairs, got {budget}."
        )
    room = size if max_vectors is None else max_vectors
    least_room = (rank + smallest if growth is None else 0) + 2 * block_size
    if not is_whole(room) or room < min(least_room, size):
        raise BadValueError(
            f"max_vectors: expected a whole number from {least_room} on (the pairs and two blocks "
            f"of {block_size}), got {room!r}."
        )
    generator = torch.Generator().manual_seed(seed)
    journal = Journal(checkpoint, matrix, generator, growth)
    run = Run(matrix, generator, limit, budget, room, on_step, journal, journal.restarts, is_over)
    pairs = journal.found or run.largest(rank, block_size, smallest, growth=growth)
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
class Run:
    """Search for eigenpairs of one matrix, within limits."""

    matrix: Products
    generator: torch.Generator
    tolerance: float
    max_products: int
    max_vectors: int
    on_step: OnStep | None
    journal: Journal
    restarts: int = 0
    is_over: IsOver | None = None
    is_stopped: bool = False  # by that

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
        room = space.size - (0 if locked is None else locked.shape[0])
        block_size = min(block_size, room)
        at = self.journal.resume(basis, projected, followed, block_size)
        if at is None:
            start = space.random_rows(block_size, self.generator, device, dtype)
            basis.remove_from(start)
            block, _ = extend(basis, start, block_size, 0.0, self.generator)
            del start
            norm, least, converged, patience = 0.0, math.inf, 0, Patience()
            next_check = min(rank + smallest, room) if followed is None else _FIRST_CHECK
        else:
            block, norm, least, converged = at.block, at.norm, at.least, at.converged
            next_check, self.restarts, patience = at.next_check, at.restarts, at.patience
            del at
        while True:
            basis.append(block)
            if followed is not None:
                followed.append(block)
            image = self.matrix.matmat(block)  # (b, p)
            # The products with the last rows of the basis are V_j A V_jᵀ.
            middle = basis.remove_from(image)[:, -len(block) :].cpu()
            del block  # the basis has it
            norm = max(norm, float(middle.abs().max()))
            width = min(block_size, room - basis.rows)
            # Rounding in a product is of the order of eps·‖A‖: what is weaker than that is noise.
            noise = 10 * torch.finfo(dtype).eps * norm
            block, coupling = extend(basis, image, width, noise, self.generator)
            del image
            projected.append(middle, coupling)
            last = width == 0 or self.matrix.products + width > self.max_products
            full = basis.rows + width > self.max_vectors
            if basis.rows >= next_check or last or full:
                ritz = projected.ritz()
                least = min(least, float(ritz.values[0]))
                aim = _MARGIN * self.tolerance
                converged, finished = ritz.converged(rank, smallest, aim)
                if followed is not None:
                    converged = ritz.leading(aim)
                    found = followed.fewest(ritz, min(converged, rank))
                    if found is not None or full or last:
                        count = found or max(1, min(converged, rank))
                        return found_pairs(basis, ritz, count, least, self.tolerance)
                elif finished or last:
                    return found_pairs(basis, ritz, rank, least, self.tolerance)
                if full:
                    distance = ritz.distance(rank, smallest, aim)
                    if patience.is_over(distance, self.matrix.products, self.max_vectors):
                        return found_pairs(basis, ritz, rank, least, self.tolerance)
                    kept = to_keep(len(ritz.values), rank, smallest, block_size)
                    basis.keep(projected.restart(ritz, kept))
                    self.restarts += 1
                next_check = basis.rows + max(block_size, basis.rows // _CHECKS)
            if self.on_step is not None:
                self.on_step(self.matrix.products, converged)
            at = Position(block, norm, least, converged, next_check, self.restarts, patience)
            self.journal.save(basis, projected, at)
            if self.is_over is not None and self.is_over():
                ritz = projected.ritz()
                converged = min(ritz.leading(_MARGIN * self.tolerance), rank)
                if converged:
                    self.is_stopped = True
                    self.journal.save(basis, projected, at, at_once=True)
                    if followed is not None:
                        converged = followed.fewest(ritz, converged) or converged
                    return found_pairs(basis, ritz, converged, least, self.tolerance)
            del at


def with_missed_copies(run: Run, pairs: EigenPairs) -> EigenPairs:
    """Search outside the pairs for eigenvalues larger than the last, and insert them.

    A Krylov space of b start vectors holds at most b vectors for each distinct eigenvalue, so
    further copies of a repeated one are only found by chance. A few steps from a random start,
    orthogonal to the pairs, bring up what is well above them; Ritz values are lower bounds, so
    what they show is there.
    """
    rank, journal = len(pairs), run.journal
    run = replace(run, is_over=None)  # a few products, for pairs that are there in time
    beside = max(run.max_vectors - rank, _ROOM_FOR_ONE)  # the pairs are still there
    while rank < run.matrix.shape[0]:
        search = replace(run, max_vectors=beside)
        if not journal.is_searching:
            journal.save_found(pairs, run.restarts)
            if not _shows_more_than(pairs, search):
                return pairs
        pairs = insert(pairs, search.largest(1, 1, locked=pairs.vectors))
        journal.copies += 1
    return pairs


def _shows_more_than(pairs: EigenPairs, run: Run) -> bool:
    """Return whether a few steps outside the pairs show a larger eigenvalue than their last."""
    room = run.max_products - run.matrix.products
    if room < 2:
        return False
    rest = run.matrix.shape[0] - len(pairs)
    steps = rest if rest <= _SMALL_REST else _GUARD_PRODUCTS
    limit = run.matrix.products + min(steps, room)
    unsaved = Journal(None, run.matrix, run.generator)
    probe = replace(run, max_products=limit, on_step=None, journal=unsaved)
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
    `rank` further products. Copies of repeated eigenvalues, which its start vector cannot see, are
    looked for as `lanczos` does. Arguments as for `lanczos`. The rank must be below P.
    """
    try:
        from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh
    except ImportError as error:
        raise MissingDependencyError(
            "solver 'arpack' needs SciPy: pip install 'deltabars[scipy]'."
        ) from error
    matrix = as_products(operator)
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
        return image.reshape(-1).cpu().numpy()

    kind = torch.empty(0, dtype=matrix.dtype).numpy().dtype
    generator = torch.Generator().manual_seed(seed)
    start = matrix.space.random_rows(1, generator, torch.device("cpu"), matrix.dtype)
    steps = min(size, max(2 * rank + 1, 20))
    restarts = None if max_products is None else max(1, max_products // (steps - rank))
    try:
        values, columns = eigsh(
            LinearOperator(matrix.shape, matvec=matvec, dtype=kind),
            k=rank,
            which="LA",
            v0=start.reshape(-1).numpy(),
            tol=limit,
            ncv=steps,
            maxiter=restarts,
        )
    except ArpackNoConvergence as error:
        raise DeltaBarsError(
            f"ARPACK: expected {rank} converged eigenpairs, got {len(error.eigenvalues)}. Allow "
            f"more products, or use {option('solver', 'krylov')}."
        ) from error
    except ArpackError as error:
        raise DeltaBarsError(f"ARPACK failed: {error}. Use solver='krylov'.") from error
    ascending = torch.from_numpy(values).to(matrix.device, torch.float64)
    largest = ascending.flip(0).contiguous()
    vectors = torch.from_numpy(columns).to(matrix.device, matrix.dtype).T.flip(0).contiguous()
    norms = (matrix.matmat(vectors).double() - largest[:, None] * vectors.double()).norm(dim=1)
    pairs = EigenPairs(largest, vectors, norms / residual_scale(largest))
    budget = 2**62 if max_products is None else max_products
    run = Run(matrix, generator, limit, budget, size, None, Journal(None, matrix, generator))
    pairs = with_missed_copies(run, pairs)
    statistics: dict[str, int | float | str] = {
        "solver": "arpack",
        "products": matrix.products,
        "converged": rank,
        "tolerance": limit,
    }
    pairs = replace(pairs, statistics=statistics)
    warn_unconverged(pairs, 10 * limit)  # ARPACK's test and ours differ by the rounding of A
    return pairs
