"""Exact eigenpairs of a matrix that is small enough to be formed."""

from __future__ import annotations

from typing import Any

import torch

from deltabars.eigen.pairs import (
    LEAST_RITZ,
    PRODUCT_ROUNDING,
    EigenPairs,
    OnStep,
    as_products,
    check_finite,
    check_rank,
    lower_scale,
    residual_scale,
)

_ROWS_AT_ONCE = 64


def dense(operator: Any, rank: int, *, on_step: OnStep | None = None) -> EigenPairs:
    """Compute the `rank` largest eigenpairs by forming the matrix and `eigh` in float64.

    All other eigenvalues are returned as `smallest`.

    Cost: P products (or what `operator.gram()`, the matrix in float64, takes), P² numbers, P³
    operations.
    """
    matrix = as_products(operator)
    size = matrix.shape[0]
    check_rank(rank, size)
    statistics: dict[str, int | float | str] = {}
    if hasattr(operator, "gram"):
        full = operator.gram(
            lambda share: None if on_step is None else on_step(max(1, int(share * size)), 0)
        )
        check_finite(full.to(matrix.dtype))
    else:
        eye = torch.eye(size, device=matrix.device, dtype=matrix.dtype)
        blocks = []
        for rows in eye.split(_ROWS_AT_ONCE):
            blocks.append(matrix.matmat(rows))
            if on_step is not None:
                on_step(matrix.products, 0)
        full = torch.cat(blocks).double()
    full = (full + full.T) / 2
    ascending, columns = torch.linalg.eigh(full)
    if hasattr(operator, "gram"):
        statistics[PRODUCT_ROUNDING] = 4 * torch.finfo(full.dtype).eps * float(ascending[-1])
    norms = (full @ columns - columns * ascending).norm(dim=0)
    values = ascending.flip(0)[:rank].contiguous()
    lower = ascending[: size - rank].contiguous()
    lower_norms = norms[: size - rank]
    return EigenPairs(
        values,
        columns.T.flip(0)[:rank].to(matrix.dtype, copy=True).contiguous(),
        norms.flip(0)[:rank] / residual_scale(values),
        lower,
        lower_norms / lower_scale(lower, values[:1].expand_as(lower)),
        {
            "solver": "dense",
            "products": matrix.products,
            "converged": rank,
            LEAST_RITZ: float(ascending[0]),
            **statistics,
        },
    )
