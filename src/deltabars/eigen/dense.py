"""Exact eigenpairs of a matrix that is small enough to be formed."""

from __future__ import annotations

from typing import Any

import torch

from deltabars.eigen.pairs import (
    LEAST_RITZ,
    PRODUCT_ROUNDING,
    EigenPairs,
    OnStep,
    Products,
    check_finite,
    check_rank,
    residual_scale,
)

_ROWS_AT_ONCE = 64


def dense(operator: Any, rank: int, *, on_step: OnStep | None = None) -> EigenPairs:
    """Compute the `rank` largest eigenpairs by forming the matrix and `eigh` in float64.

    All other eigenvalues are returned as `smallest`.

    Cost: P products (or what `operator.gram()`, the matrix in float64, takes), P² numbers, P³
    operations.
    """
    matrix = Products(operator)
    size = matrix.shape[0]
    check_rank(rank, size)

    step = on_step or (lambda products, converged: None)
    is_gram = hasattr(operator, "gram")
    if is_gram:
        full = operator.gram(lambda share: step(max(1, int(share * size)), 0))
        check_finite(full.to(matrix.dtype))
    else:
        blocks = []
        for rows in torch.eye(size, device=matrix.device, dtype=matrix.dtype).split(_ROWS_AT_ONCE):
            blocks.append(matrix.matmat(rows))
            step(matrix.products, 0)
        full = torch.cat(blocks).double()
    full = (full + full.T) / 2
    ascending, columns = torch.linalg.eigh(full)
    residuals = (full @ columns - columns * ascending).norm(dim=0)
    residuals /= residual_scale(ascending, ascending[-1:])
    rounding = 4 * torch.finfo(full.dtype).eps * float(ascending[-1])
    return EigenPairs(
        ascending.flip(0)[:rank].contiguous(),
        columns.T.flip(0)[:rank].to(matrix.dtype, copy=True).contiguous(),
        residuals.flip(0)[:rank],
        ascending[: size - rank].contiguous(),
        residuals[: size - rank],
        {
            "solver": "dense",
            "products": matrix.products,
            "converged": rank,
            LEAST_RITZ: float(ascending[0]),
            **({PRODUCT_ROUNDING: rounding} if is_gram else {}),
        },
    )
