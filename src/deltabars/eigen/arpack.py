"""SciPy's ARPACK, the solver of the paper's program: an independent check of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deltabars.eigen.checkpoint import Journal
from deltabars.eigen.krylov import OnStep, Run, with_missed_copies
from deltabars.eigen.operators import as_products
from deltabars.eigen.pairs import (
    EigenPairs,
    check_rank,
    default_tolerance,
    residual_scale,
    warn_unconverged,
)
from deltabars.errors import BadValueError, DeltaBarsError, MissingDependencyError, option


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
