"""Krylov solvers: Lanczos, and its block form, with full reorthogonalisation.

Both grow an orthonormal basis V of the Krylov space of A from random rows, one block at a time:

    A V_j = (terms in V_1 … V_j) + R_j V_{j+1}

so that T = V A Vᵀ is block tridiagonal. Its eigenpairs (θ, s) give the Ritz pairs (θ, sᵀV) of A,
whose residual norms ‖s_jᵀ R_j‖ cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.basis import Basis, extend, random_rows
from deltabars.eigen.operators import _Products, as_products
from deltabars.eigen.pairs import (
    LEAST_RITZ,
    EigenPairs,
    check_rank,
    default_tolerance,
    lower_scale,
    residual_scale,
    warn_unconverged,
)
from deltabars.errors import BadValueError
from deltabars.summation import inner

OnStep = Callable[[int, int], None]  # (products so far, pairs converged)

_GUARD_PRODUCTS = 8  # enough for a large missed eigenvalue to rise out of a random start


def lanczos(
    operator: Any,
    rank: int,
    *,
    smallest: int = 0,
    tolerance: float | None = None,
    max_products: int | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> EigenPairs:
    """The `rank` algebraically largest eigenpairs, by Lanczos with full reorthogonalisation.

    One product a step: the fewest products, for matrices whose products are dear. A converged
    set is probed for copies of repeated eigenvalues, which the start vector cannot see.

    Args:
        operator: a symmetric matrix (see `eigen.operators.as_products`).
        rank: how many pairs, 1 to P.
        smallest: how many eigenvalues of the lower end must converge as well.
        tolerance: for ‖Aq − λq‖ / residual_scale; 1e-5 in float32, 1e-10 in float64.
        max_products: stop there, with a warning if pairs have not converged; no limit by default.
        seed: of the random start vector.
        on_step: called with the products done and the pairs converged.

    Cost: a few times `rank` products, and as many vectors of memory; m²P operations for m steps.
    """
    return _solve("lanczos", operator, rank, 1, smallest, tolerance, max_products, seed, on_step)


def block_krylov(
    operator: Any,
    rank: int,
    *,
    block_size: int | None = None,
    smallest: int = 0,
    tolerance: float | None = None,
    max_products: int | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> EigenPairs:
    """The `rank` algebraically largest eigenpairs, by block Lanczos (block Krylov, Rayleigh-Ritz).

    More products than `lanczos`, in blocks: faster where many vectors cost little more than one
    (a kept Jacobian). Arguments as for `lanczos`; `block_size` is a tenth of the rank by default,
    between 2 and 100.
    """
    size = block_size if block_size is not None else max(2, min(100, rank // 10))
    if size < 1:
        raise BadValueError(f"block_size: expected at least 1, got {block_size}.")
    return _solve(
        "block_krylov", operator, rank, size, smallest, tolerance, max_products, seed, on_step
    )


@dataclass(frozen=True)
class _Ritz:
    """The state of a Krylov run: Ritz values (ascending), coordinates, residual norms."""

    values: Tensor  # (m,)
    coordinates: Tensor  # (m, m), a column a pair
    norms: Tensor  # (m,)

    def converged(self, rank: int, smallest: int, tolerance: float) -> tuple[int, bool]:
        """How many of the largest `rank` pairs have converged, and whether all asked for have."""
        top = self.values.flip(0)[:rank]
        upper = self.norms.flip(0)[:rank] <= tolerance * residual_scale(top)
        ends = self.values[-1:].expand(smallest)
        low = self.norms[:smallest] <= tolerance * lower_scale(self.values[:smallest], ends)
        enough = self.values.shape[0] >= rank + smallest
        return int(upper.sum()), enough and bool(upper.all()) and bool(low.all())


def _solve(
    solver: str,
    operator: Any,
    rank: int,
    block_size: int,
    smallest: int,
    tolerance: float | None,
    max_products: int | None,
    seed: int,
    on_step: OnStep | None,
) -> EigenPairs:
    matrix = as_products(operator)
    check_rank(rank, matrix.shape[0])
    if smallest < 0 or rank + smallest > matrix.shape[0]:
        raise BadValueError(
            f"smallest: expected 0 to {matrix.shape[0] - rank} (P − rank), got {smallest}."
        )
    limit = default_tolerance(matrix.dtype) if tolerance is None else tolerance
    if not limit > 0:
        raise BadValueError(f"tolerance: expected a number above zero, got {tolerance}.")
    generator = torch.Generator().manual_seed(seed)
    budget = max_products if max_products is not None else 2**62
    fewest = min(-(-rank // block_size) * block_size, matrix.shape[0])
    if budget < fewest:
        raise BadValueError(
            f"max_products: expected at least {fewest} for {rank} pairs, got {max_products}."
        )
    run = _Run(matrix, generator, limit, budget, on_step)
    pairs = run.largest(rank, block_size, smallest)
    if bool((pairs.residuals <= limit).all()):
        pairs = run.with_missed_copies(pairs)
    converged = int((pairs.residuals <= limit).sum())
    statistics = {
        **pairs.statistics,
        "solver": solver,
        "products": matrix.products,
        "converged": converged,
        "tolerance": limit,
    }
    pairs = replace(pairs, statistics=statistics)
    warn_unconverged(pairs, limit)
    return pairs


@dataclass(frozen=True)
class _Run:
    matrix: _Products
    generator: torch.Generator
    tolerance: float
    max_products: int
    on_step: OnStep | None

    def largest(
        self, rank: int, block_size: int, smallest: int = 0, locked: Tensor | None = None
    ) -> EigenPairs:
        """The largest pairs of the matrix on the orthogonal complement of `locked` (L, P)."""
        size = self.matrix.shape[0]
        basis = Basis(size, max(64, rank // 2), self.matrix.device, self.matrix.dtype)
        offset = 0
        if locked is not None:
            basis.append(locked)
            offset = locked.shape[0]
        room = size - offset
        block_size = min(block_size, room)
        start = random_rows(block_size, size, self.generator, self.matrix.device, self.matrix.dtype)
        block, _ = extend(basis, start, block_size, 0.0, self.generator)
        diagonal: list[Tensor] = []
        couplings: list[Tensor] = []
        norm, converged = 0.0, 0
        next_check = min(rank + smallest, room)
        while True:
            basis.append(block)
            image = self.matrix.matmat(block)  # (b, P)
            middle = inner(block, image).cpu()
            diagonal.append((middle + middle.T) / 2)
            norm = max(norm, float(middle.abs().max()))
            done = basis.rows - offset
            width = min(block_size, room - done)
            # Rounding in a product is of the order of eps·‖A‖: what is weaker than that is noise.
            noise = 10 * torch.finfo(self.matrix.dtype).eps * norm
            following, coupling = extend(basis, image, width, noise, self.generator)
            couplings.append(coupling.cpu())
            last = width == 0 or self.matrix.products + width > self.max_products
            if done >= next_check or last:
                ritz = _ritz(diagonal, couplings)
                converged, finished = ritz.converged(rank, smallest, self.tolerance)
                if finished or last:
                    return self._pairs(basis, offset, ritz, rank)
                next_check = done + max(block_size, done // 16)
            if self.on_step is not None:
                self.on_step(self.matrix.products, converged)
            block = following

    def with_missed_copies(self, pairs: EigenPairs) -> EigenPairs:
        """Look outside the pairs for a larger eigenvalue than the last, and take it in.

        A Krylov space of b start vectors holds at most b vectors for each distinct eigenvalue, so
        further copies of a repeated one are only found by chance. A few steps from a random start,
        orthogonal to the pairs, bring up what is well above them; Ritz values are lower bounds,
        so what they show is there.
        """
        rank = len(pairs)
        while rank < self.matrix.shape[0]:
            room = self.max_products - self.matrix.products
            if room < 2:
                return pairs
            probe_limit = self.matrix.products + min(_GUARD_PRODUCTS, room)
            probe = _Run(self.matrix, self.generator, self.tolerance, probe_limit, None)
            top = probe.largest(1, 1, locked=pairs.vectors).values[0]
            slack = 10 * self.tolerance * float(residual_scale(pairs.values)[-1])
            if float(top) <= float(pairs.values[-1]) + slack:
                return pairs
            missed = self.largest(1, 1, locked=pairs.vectors)
            pairs = _merge(pairs, missed, rank)
        return pairs

    def _pairs(self, basis: Basis, offset: int, ritz: _Ritz, rank: int) -> EigenPairs:
        device = self.matrix.device
        values = ritz.values.flip(0)[:rank]
        coordinates = ritz.coordinates.flip(1)[:, :rank]
        padded = torch.cat([coordinates.new_zeros(offset, coordinates.shape[1]), coordinates])
        residuals = ritz.norms.flip(0)[:rank] / residual_scale(values)
        rest = ritz.values.shape[0] - values.shape[0]
        lower, lower_norms = ritz.values[:rest], ritz.norms[:rest]
        lower_residuals = lower_norms / lower_scale(lower, values[:1].expand_as(lower))
        known = int((lower_residuals <= self.tolerance).long().cumprod(0).sum())
        return EigenPairs(
            values.to(device),
            basis.combine(padded.to(device)),
            residuals.to(device),
            lower[:known].to(device),
            lower_residuals[:known].to(device),
            {LEAST_RITZ: float(ritz.values[0])},
        )


def _ritz(diagonal: list[Tensor], couplings: list[Tensor]) -> _Ritz:
    """The eigenpairs of the block tridiagonal T, and their residuals through the last coupling."""
    projected = torch.block_diag(*diagonal)
    start = 0
    for middle, coupling in zip(diagonal[:-1], couplings[:-1], strict=True):
        here, after = start + middle.shape[0], start + sum(coupling.shape)
        projected[start:here, here:after] = coupling
        projected[here:after, start:here] = coupling.T
        start = here
    values, coordinates = torch.linalg.eigh(projected)
    norms = (couplings[-1].T @ coordinates[start:]).norm(dim=0)
    return _Ritz(values, coordinates, norms)


def _merge(pairs: EigenPairs, missed: EigenPairs, rank: int) -> EigenPairs:
    values, order = torch.cat([pairs.values, missed.values]).sort(descending=True, stable=True)
    keep = order[:rank]
    return replace(
        pairs,
        values=values[:rank],
        vectors=torch.cat([pairs.vectors, missed.vectors])[keep],
        residuals=torch.cat([pairs.residuals, missed.residuals])[keep],
    )
