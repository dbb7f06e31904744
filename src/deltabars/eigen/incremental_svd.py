"""Incremental SVD of a stream of rows: the paper's way to the eigenpairs of G, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.krylov import OnStep
from deltabars.eigen.pairs import EigenPairs, check_rank, residual_scale
from deltabars.errors import BadValueError


def incremental_svd(
    source: Any, rank: int, *, centred: bool = False, on_step: OnStep | None = None
) -> EigenPairs:
    """The `rank` largest eigenpairs of scale·RᵀR + shift·I from one pass over blocks of rows R.

    Each block is stacked under diag(s)·V, the singular values and vectors so far, and the SVD of
    the stack is cut to `rank`: the span of what was cut is lost, so the values returned are lower
    bounds, exact where R has no more than `rank` dimensions. What was cut is returned in
    `statistics["discarded_energy"]`, the sum of the squares cut times the scale: no eigenvalue is
    too low by more than that. Residuals cannot be had in one pass; they are bounded by it too.

    Args:
        source: an object with `row_blocks()`, `row_scale` and `row_shift` (an OPGOperator or a
            GGNOperator), a matrix R, or an iterable of blocks (n, P); for the last two the scale
            is one over the number of rows.
        rank: how many pairs, 1 to P.
        centred: subtract the mean row first, as scikit-learn's IncrementalPCA (and so the paper's
            program) does. METHOD's G is not centred: at an optimum the mean gradient is −λω̂.
        on_step: called with the rows done and 0.

    Cost: one pass; (rank + n)²·P operations a block, (2·rank + n)·P numbers.
    """
    blocks, scale, shift = _rows_of(source)
    strengths: Tensor | None = None
    vectors: Tensor | None = None
    mean: Tensor | None = None
    count = 0
    discarded = 0.0
    for block in blocks:
        if block.ndim != 2:
            raise BadValueError(f"Rows: expected blocks (n, P), got shape {tuple(block.shape)}.")
        check_rank(rank, block.shape[1])
        stack = [block]
        if centred:
            new = block.mean(0)
            stack = [block - new]
            if mean is not None:
                # The scatter of two groups is theirs about their own means, plus this row's.
                weight = math.sqrt(count * block.shape[0] / (count + block.shape[0]))
                stack.append(weight * (mean - new)[None])
                new = mean + (new - mean) * (block.shape[0] / (count + block.shape[0]))
            mean = new
        if strengths is not None and vectors is not None:
            stack.insert(0, strengths[:, None] * vectors)
        _, strengths, vectors = torch.linalg.svd(torch.cat(stack), full_matrices=False)
        discarded += float(strengths[rank:].double().square().sum())
        strengths, vectors = strengths[:rank], vectors[:rank]
        count += block.shape[0]
        if on_step is not None:
            on_step(count, 0)
    if strengths is None or vectors is None:
        raise BadValueError("Rows: expected at least one block, got none.")
    factor = 1.0 / count if scale is None else scale
    values = torch.zeros(rank, dtype=torch.float64, device=vectors.device)
    values[: len(strengths)] = strengths.double().square() * factor
    values += shift
    lost = discarded * factor
    bound = torch.full_like(values, lost) / residual_scale(values)
    return EigenPairs(
        values,
        _fill(vectors, rank),
        bound,
        statistics={
            "solver": "incremental",
            "products": 0,
            "converged": rank,
            "rows": count,
            "centred": str(centred),
            "discarded_energy": lost,
        },
    )


def _rows_of(source: Any) -> tuple[Iterable[Tensor], float | None, float]:
    if hasattr(source, "row_blocks"):
        return source.row_blocks(), float(source.row_scale), float(source.row_shift)
    if isinstance(source, Tensor):
        return [source], None, 0.0
    if isinstance(source, Iterable):
        return source, None, 0.0
    raise BadValueError(
        "incremental_svd: expected rows (an operator with row_blocks, a matrix, or blocks of "
        f"rows), got {type(source).__name__}, whose matrix is not known as rows. Use lanczos."
    )


def _fill(vectors: Tensor, rank: int) -> Tensor:
    """Complete fewer than `rank` orthonormal rows: beyond the rows' span every direction serves."""
    missing = rank - vectors.shape[0]
    if missing == 0:
        return vectors.contiguous()
    # Householder QR of [Vᵀ, E] completes Vᵀ; the E that are needed are never more than rank.
    width = vectors.shape[1]
    fixed = torch.eye(width, rank + missing, device=vectors.device, dtype=vectors.dtype)
    columns = torch.linalg.qr(torch.cat([vectors.T, fixed], dim=1))[0]
    return torch.cat([vectors, columns[:, vectors.shape[0] : rank].T])
