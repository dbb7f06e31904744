"""Incremental SVD: the leading eigenpairs of RᵀR from one pass over the rows R, as in the paper."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.basis import completed
from deltabars.eigen.pairs import (
    DISCARDED,
    OUT_OF_TIME,
    ROWS_LEFT,
    STOPPED,
    EigenPairs,
    IsOver,
    OnStep,
    Products,
    check_rank,
    default_tolerance,
    residual_scale,
)
from deltabars.errors import BadValueError
from deltabars.runtime.vectors import Space


def incremental_svd(
    source: Any,
    rank: int,
    *,
    centred: bool = False,
    on_step: OnStep | None = None,
    is_over: IsOver | None = None,
) -> EigenPairs:
    """Compute the `rank` largest eigenpairs of scale·RᵀR + shift·I from one pass over blocks of R.

    Each block is stacked under diag(s)·V, the singular values and vectors so far, and the SVD of
    the stack is cut to `rank`: the span of what is cut is lost, so the values returned are lower
    bounds, exact where R has no more than `rank` dimensions. `statistics["discarded_energy"]` is
    the sum of the squares that were cut, times the scale: no eigenvalue is too low by more than
    that, and no residual is larger. The `residuals` returned are that bound.

    Args:
        source: an object with `row_blocks()`, `row_scale` and `row_shift` (an OPGOperator or a
            GGNOperator); an iterable of blocks of rows (n, P), scaled by one over their number; or
            a positive semidefinite matrix as the other solvers take it, whose own rows then serve
            (P products; its singular values are its eigenvalues).
        rank: how many pairs, 1 to P.
        centred: subtract the mean row first, as scikit-learn's IncrementalPCA (and so the paper's
            program) does. G itself is not centred: at an optimum the mean gradient is −λω̂.
        on_step: called with the rows done and 0.
        is_over: asked between blocks. Where it returns True, of the remaining rows only the sum of
            squares is taken, which counts as cut: the bounds hold. (Not for a matrix.)

    Cost: one pass; (rank + n)²·P operations a block, (2·rank + n)·P numbers.
    """
    space = getattr(source, "space", None) or Space(0)
    matrix, scale, shift = None, None, 0.0
    if hasattr(source, "row_blocks"):
        blocks = source.row_blocks()
        if space.group.size > 1:
            blocks = space.exchange(blocks, source.device, source.dtype)
        scale, shift = float(source.row_scale), float(source.row_shift)
    elif hasattr(source, "shape"):
        matrix, is_over = Products(source), None
        eye = torch.eye(matrix.shape[0], device=matrix.device, dtype=matrix.dtype)
        blocks = map(matrix.matmat, eye.split(max(rank, 16)))
    elif isinstance(source, Iterable):
        blocks = source
    else:
        raise BadValueError(
            "incremental_svd: expected an operator, a matrix or blocks of rows, got "
            f"{type(source).__name__}."
        )
    state: _State | None = None
    is_stopped, is_centred = False, centred and matrix is None
    for raw in blocks:
        block = torch.as_tensor(raw).detach()
        if block.ndim != 2:
            raise BadValueError(f"Rows: expected blocks (n, P), got shape {tuple(block.shape)}.")
        if state is None:
            space = space if space.group.size > 1 else Space(block.shape[1])
            check_rank(rank, space.size)
            zeros = block.new_zeros(block.shape[1])
            state = _State(block.new_zeros(0), block[:0], zeros, 0, 0.0, space)
        if is_stopped:
            state = state.skip(block)
            continue
        state = state.add(block, rank, is_centred)
        if on_step is not None:
            on_step(state.count, 0)
        is_stopped = is_over is not None and is_over()
    if state is None:
        raise BadValueError("Rows: expected at least one block, got none.")
    vectors = state.vectors
    if matrix is None:
        scale = 1.0 / (state.count + state.left) if scale is None else scale
        values, lost = state.strengths.double().square() * scale + shift, state.discarded * scale
    else:
        values = (matrix.matmat(vectors).double() * vectors.double()).sum(1)
        order = values.argsort(descending=True)
        values, vectors, lost = values[order], vectors[order], state.discarded**0.5
    full = torch.full((rank,), shift, dtype=torch.float64, device=vectors.device)
    full[: len(values)] = values
    bound = torch.full_like(full, lost) / residual_scale(full)
    tolerance = default_tolerance(vectors.dtype)
    statistics: dict[str, int | float | str] = {
        "solver": "incremental",
        "products": 0,
        "converged": int((bound <= tolerance).sum()),
        "tolerance": tolerance,
        "rows": state.count,
        "centred": is_centred,
        DISCARDED: lost,
    }
    if state.left:
        statistics |= {STOPPED: OUT_OF_TIME, ROWS_LEFT: state.left}
    return EigenPairs(full, completed(vectors, rank, state.space), bound, statistics=statistics)


@dataclass(frozen=True)
class _State:
    """The leading singular values and right singular vectors of the rows so far."""

    strengths: Tensor  # (k,)
    vectors: Tensor  # (k, p)
    mean: Tensor  # (p,), of the rows, where they are centred
    count: int  # of rows
    discarded: float  # the sum of the squared singular values that were cut
    space: Space
    left: int = 0  # rows that were not processed, and count as cut

    def add(self, block: Tensor, rank: int, centred: bool) -> _State:
        """Add a block (n, P)."""
        new, total = block.shape[0], self.count + block.shape[0]
        stack = [self.strengths[:, None] * self.vectors, block]
        mean = self.mean
        if centred:
            # The scatter of two groups is theirs about their own means, plus that of the means.
            gap = block.mean(0) - mean
            stack[1] = block - block.mean(0)
            stack.append(math.sqrt(self.count * new / total) * gap[None])
            mean = mean + gap * (new / total)
        strengths, vectors = singular(torch.cat(stack), self.space)
        cut = float(strengths[rank:].double().square().sum())
        vectors = vectors[:rank].contiguous()
        return _State(strengths[:rank], vectors, mean, total, self.discarded + cut, self.space)

    def skip(self, block: Tensor) -> _State:
        """Count a block (n, P) as cut.

        The rows about any point, such as the mean so far, are above those about their own mean.
        """
        gap = (block - self.mean).double()
        cut = float(self.space.group.all_reduce_(gap.square().sum(1)).sum())
        return replace(self, discarded=self.discarded + cut, left=self.left + len(block))


def singular(rows: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """Compute the singular values of rows (m, p), and the own columns of their right vectors.

    Where processes share the columns, by a QR factorisation in each and one of all their factors.
    """
    if space.group.size == 1:
        _, strengths, vectors = torch.linalg.svd(rows, full_matrices=False)
        return strengths, vectors
    own, factor = torch.linalg.qr(rows.T)  # (p, k), (k, m)
    factors = space.group.gather_objects(factor.cpu())
    sizes = [1, *map(len, factors)]
    found = factor.new_zeros(sum(sizes), min(sum(sizes) - 1, len(rows)), device="cpu")
    if space.group.is_first:  # Wᵀ of the SVD of all columns, by way of their own QR
        columns, inner = torch.linalg.qr(torch.cat(factors))  # (Σk, r), (r, m)
        _, strengths, turn = torch.linalg.svd(inner.T, full_matrices=False)
        found = torch.cat([strengths[None], columns @ turn.T])
    strengths, *turns = space.broadcast_(found).split(sizes)
    return strengths[0].to(rows), turns[space.group.rank].to(rows).T @ own.T
