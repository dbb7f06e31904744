"""Incremental SVD of a stream of rows: the paper's way to the eigenpairs of G, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.krylov import OnStep
from deltabars.eigen.operators import as_products
from deltabars.eigen.pairs import (
    DISCARDED,
    EigenPairs,
    check_rank,
    default_tolerance,
    residual_scale,
)
from deltabars.errors import BadValueError


def incremental_svd(
    source: Any, rank: int, *, centred: bool = False, on_step: OnStep | None = None
) -> EigenPairs:
    """The `rank` largest eigenpairs of scale·RᵀR + shift·I from one pass over blocks of rows R.

    Each block is stacked under diag(s)·V, the singular values and vectors so far, and the SVD of
    the stack is cut to `rank`: the span of what was cut is lost, so the values returned are lower
    bounds, exact where R has no more than `rank` dimensions. What was cut is returned in
    `statistics["discarded_energy"]`, the sum of the squares cut times the scale: no eigenvalue is
    too low by more than that, and no residual larger. The `residuals` returned are that bound.

    Args:
        source: an object with `row_blocks()`, `row_scale` and `row_shift` (an OPGOperator or a
            GGNOperator); an iterable of blocks of rows (n, P), scaled by one over their number; or
            a positive semidefinite matrix as the other solvers take it, whose own rows then serve
            (P products; its singular values are its eigenvalues).
        rank: how many pairs, 1 to P.
        centred: subtract the mean row first, as scikit-learn's IncrementalPCA (and so the paper's
            program) does. G itself is not centred: at an optimum the mean gradient is −λω̂.
        on_step: called with the rows done and 0.

    Cost: one pass; (rank + n)²·P operations a block, (2·rank + n)·P numbers.
    """
    if hasattr(source, "row_blocks"):
        state = _State.after(source.row_blocks(), rank, centred, on_step)
        factor, shift = float(source.row_scale), float(source.row_shift)
    elif hasattr(source, "shape"):
        return _of_matrix(source, rank, on_step)
    elif isinstance(source, Iterable):
        state = _State.after(source, rank, centred, on_step)
        factor, shift = 1.0 / state.count, 0.0
    else:
        raise BadValueError(
            "incremental_svd: expected an operator, a matrix or blocks of rows, got "
            f"{type(source).__name__}."
        )
    values = state.strengths.double().square() * factor + shift
    lost = state.discarded * factor
    return _pairs(values, state.vectors, rank, shift, lost, state.count, centred)


def _of_matrix(matrix: Any, rank: int, on_step: OnStep | None) -> EigenPairs:
    """The same for a positive semidefinite matrix, by its own rows."""
    products = as_products(matrix)
    eye = torch.eye(products.shape[0], device=products.device, dtype=products.dtype)
    blocks = (products.matmat(block) for block in eye.split(max(rank, 16)))
    state = _State.after(blocks, rank, False, on_step)
    values = (products.matmat(state.vectors).double() * state.vectors.double()).sum(1)
    order = values.argsort(descending=True)
    return _pairs(
        values[order], state.vectors[order], rank, 0.0, state.discarded**0.5, state.count, False
    )


@dataclass(frozen=True)
class _State:
    """The leading singular values and right singular vectors of the rows so far."""

    strengths: Tensor  # (k,)
    vectors: Tensor  # (k, P)
    mean: Tensor  # (P,), of the rows, where they are centred
    count: int  # of rows
    discarded: float  # the sum of the squared singular values cut

    @classmethod
    def after(
        cls, blocks: Iterable[Any], rank: int, centred: bool, on_step: OnStep | None
    ) -> _State:
        """The state after one pass over blocks of rows."""
        state: _State | None = None
        for raw in blocks:
            block = torch.as_tensor(raw).detach()
            if block.ndim != 2:
                raise BadValueError(
                    f"Rows: expected blocks (n, P), got shape {tuple(block.shape)}."
                )
            check_rank(rank, block.shape[1])
            if state is None:
                state = cls(block.new_zeros(0), block[:0], block.new_zeros(block.shape[1]), 0, 0.0)
            state = state.add(block, rank, centred)
            if on_step is not None:
                on_step(state.count, 0)
        if state is None:
            raise BadValueError("Rows: expected at least one block, got none.")
        return state

    def add(self, block: Tensor, rank: int, centred: bool) -> _State:
        """Take in one more block (n, P)."""
        new, total = block.shape[0], self.count + block.shape[0]
        stack = [self.strengths[:, None] * self.vectors, block]
        mean = self.mean
        if centred:
            # The scatter of two groups is theirs about their own means, plus that of the means.
            gap = block.mean(0) - mean
            stack[1] = block - block.mean(0)
            stack.append(math.sqrt(self.count * new / total) * gap[None])
            mean = mean + gap * (new / total)
        _, strengths, vectors = torch.linalg.svd(torch.cat(stack), full_matrices=False)
        cut = float(strengths[rank:].double().square().sum())
        return _State(strengths[:rank], vectors[:rank], mean, total, self.discarded + cut)


def _pairs(
    values: Tensor,
    vectors: Tensor,
    rank: int,
    shift: float,
    lost: float,
    rows: int,
    centred: bool,
) -> EigenPairs:
    full = torch.full((rank,), shift, dtype=torch.float64, device=vectors.device)
    full[: len(values)] = values
    bound = torch.full_like(full, lost) / residual_scale(full)
    tolerance = default_tolerance(vectors.dtype)
    return EigenPairs(
        full,
        _fill(vectors, rank),
        bound,
        statistics={
            "solver": "incremental",
            "products": 0,
            "converged": int((bound <= tolerance).sum()),
            "tolerance": tolerance,
            "rows": rows,
            "centred": centred,
            DISCARDED: lost,
        },
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
