"""Rows that come from all ranks, of which each has its own columns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.basis import completed
from deltabars.eigen.krylov import OUT_OF_TIME, ROWS_LEFT, STOPPED, IsOver, OnStep
from deltabars.eigen.operators import as_products
from deltabars.eigen.pairs import (
    DISCARDED,
    EigenPairs,
    check_rank,
    default_tolerance,
    residual_scale,
)
from deltabars.eigen.resuming import Checkpoint, Rows, State, fill, with_errors
from deltabars.errors import BadValueError, CheckpointMismatchError
from deltabars.runtime.vectors import Space


def singular(rows: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """The singular values of rows (m, p), and the columns of their right vectors that are here.

    Where the columns are shared out, by a QR factorisation of each rank's and one of all of theirs.
    """
    if space.group.size == 1:
        _, strengths, vectors = torch.linalg.svd(rows, full_matrices=False)
        return strengths, vectors
    own, factor = torch.linalg.qr(rows.T)  # (p, k), (k, m)
    factors = space.group.gather(factor.cpu())
    sizes = [1, *map(len, factors)]
    found = factor.new_zeros(sum(sizes), min(sum(sizes) - 1, len(rows)), device="cpu")
    if space.group.is_first:  # Wᵀ of the SVD of all columns, by way of their own QR
        columns, inner = torch.linalg.qr(torch.cat(factors))  # (Σk, r), (r, m)
        _, strengths, turn = torch.linalg.svd(inner.T, full_matrices=False)
        found = torch.cat([strengths[None], columns @ turn.T])
    strengths, *turns = space.agree_(found).split(sizes)
    return strengths[0].to(rows), turns[space.group.rank].to(rows).T @ own.T


def incremental_svd(
    source: Any,
    rank: int,
    *,
    centred: bool = False,
    on_step: OnStep | None = None,
    checkpoint: Checkpoint | None = None,
    is_over: IsOver | None = None,
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
        checkpoint: where the state is saved at intervals, and taken up where it was left: the rows
            that were done are read again and compared, and nothing is done with them.
        is_over: asked between blocks. Where it says so, the state is saved, and of the rows that
            are left only the sum of squares is taken, which counts as cut: the bounds hold. (Not
            for a matrix by its own rows.)

    Cost: one pass; (rank + n)²·P operations a block, (2·rank + n)·P numbers.
    """
    space = getattr(source, "space", None) or Space(0)
    if hasattr(source, "row_blocks"):
        blocks = source.row_blocks()
        if space.group.size > 1:
            blocks = space.dealt(blocks, source.device, source.dtype)
        state = _State.after(blocks, rank, centred, on_step, checkpoint, space, is_over)
        factor, shift = float(source.row_scale), float(source.row_shift)
    elif hasattr(source, "shape"):
        return _of_matrix(source, rank, on_step, checkpoint, space)
    elif isinstance(source, Iterable):
        state = _State.after(source, rank, centred, on_step, checkpoint, space, is_over)
        factor, shift = 1.0 / (state.count + state.left), 0.0
    else:
        raise BadValueError(
            "incremental_svd: expected an operator, a matrix or blocks of rows, got "
            f"{type(source).__name__}."
        )
    values = state.strengths.double().square() * factor + shift
    lost = state.discarded * factor
    return _pairs(values, state.vectors, rank, shift, lost, state, centred)


def _of_matrix(
    matrix: Any, rank: int, on_step: OnStep | None, checkpoint: Checkpoint | None, space: Space
) -> EigenPairs:
    """The same for a positive semidefinite matrix, by its own rows."""
    products = as_products(matrix)
    eye = torch.eye(products.shape[0], device=products.device, dtype=products.dtype)
    blocks = (products.matmat(block) for block in eye.split(max(rank, 16)))
    state = _State.after(blocks, rank, False, on_step, checkpoint, space, None)
    values = (products.matmat(state.vectors).double() * state.vectors.double()).sum(1)
    order = values.argsort(descending=True)
    lost = state.discarded**0.5
    return _pairs(values[order], state.vectors[order], rank, 0.0, lost, state, False)


@dataclass(frozen=True)
class _State:
    """The leading singular values and right singular vectors of the rows so far."""

    strengths: Tensor  # (k,)
    vectors: Tensor  # (k, p)
    mean: Tensor  # (p,), of the rows, where they are centred
    count: int  # of rows
    discarded: float  # the sum of the squared singular values cut
    space: Space
    left: int = 0  # rows that were left out, and are in what was cut

    @classmethod
    def after(
        cls,
        blocks: Iterable[Any],
        rank: int,
        centred: bool,
        on_step: OnStep | None,
        checkpoint: Checkpoint | None,
        space: Space,
        is_over: IsOver | None,
    ) -> _State:
        """The state after one pass over blocks of rows."""
        state: _State | None = None
        course = _Pass(checkpoint, space)
        is_stopped = False
        for raw in blocks:
            block = torch.as_tensor(raw).detach()
            if block.ndim != 2:
                raise BadValueError(
                    f"Rows: expected blocks (n, P), got shape {tuple(block.shape)}."
                )
            if space.group.size == 1:
                space = Space(block.shape[1])
            check_rank(rank, space.size)
            if state is None:
                nothing = block.new_zeros(0)
                state = cls(nothing, block[:0], block.new_zeros(block.shape[1]), 0, 0.0, space)
            course.note(block)
            if course.is_behind:
                continue
            if is_stopped:
                state = state.leave(block)
                continue
            saved = course.take_up(state)
            state = saved if saved is not None else state.add(block, rank, centred)
            if on_step is not None:
                on_step(state.count, 0)
            if saved is None:
                course.save(state)
                if is_over is not None and is_over():
                    course.save(state, at_once=True)
                    is_stopped = True
        course.check_end()
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
        strengths, vectors = singular(torch.cat(stack), self.space)
        cut = float(strengths[rank:].double().square().sum())
        vectors = vectors[:rank].contiguous()
        return _State(strengths[:rank], vectors, mean, total, self.discarded + cut, self.space)

    def leave(self, block: Tensor) -> _State:
        """Count one more block (n, P) as cut.

        The rows about any point, such as the mean so far, are above those about their own mean.
        """
        gap = (block - self.mean).double()
        cut = float(self.space.sum_(gap.square().sum(1)).sum())
        return replace(self, discarded=self.discarded + cut, left=self.left + len(block))


class _Pass:
    """One pass over the rows, that may take up one that was left.

    The rows that were done must come again, in the same order: a state that holds some rows and
    goes on with the wrong rest would count examples twice, and others not at all.
    """

    def __init__(self, checkpoint: Checkpoint | None, space: Space) -> None:
        self._checkpoint, self._space = checkpoint, space
        self._saved = None if checkpoint is None else checkpoint.load(space)
        self._until = 0 if self._saved is None else with_errors(_count, self._saved)
        self._count = 0
        self._digest = ""

    @property
    def is_behind(self) -> bool:
        """Whether the saved state holds rows that have not come again yet."""
        return self._count < self._until

    def note(self, block: Tensor) -> None:
        """Count and compare one more block."""
        if self._checkpoint is None:
            return
        self._count += len(block)
        seen = torch.stack([block.sum(1), block.square().sum(1)])
        seen = self._space.sum_(seen).cpu()
        self._digest = hashlib.blake2b(
            self._digest.encode() + seen.numpy().tobytes(), digest_size=16
        ).hexdigest()
        if self._saved is not None and not self.is_behind:
            same = self._saved.numbers["digest"] == self._digest
            self._check(same and self._count == self._until)

    def take_up(self, empty: _State) -> _State | None:
        """The saved state, once, where all its rows have come again."""
        saved, self._saved = self._saved, None
        return None if saved is None else with_errors(_restored, saved, empty)

    def save(self, state: _State, at_once: bool = False) -> None:
        """Save the state, if it is time."""
        if self._checkpoint is None or not (at_once or self._checkpoint.is_due()):
            return
        numbers: dict[str, int | str] = {"count": state.count, "digest": self._digest}
        tensors = {
            "strengths": state.strengths,
            "discarded": torch.tensor([state.discarded], dtype=torch.float64),
        }
        epoch, columns = f"after {state.count} rows", self._space.columns
        rows = {
            name: Rows(epoch, [part], columns=columns)
            for name, part in (("vectors", state.vectors), ("mean", state.mean[None]))
        }
        self._checkpoint.save(State(numbers, tensors, rows))

    def check_end(self) -> None:
        """Refuse a pass that ended before the rows of the saved state."""
        self._check(not self.is_behind)

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise CheckpointMismatchError(
                f"checkpoint: expected the first {self._until} rows of gradients as they were, "
                "got other ones. Give the data in the same order (no shuffling) with the same "
                "batch_size to as many ranks, or another folder."
            )


def _count(saved: State) -> int:
    return int(saved.numbers["count"])


def _restored(saved: State, empty: _State) -> _State:
    strengths = saved.tensors["strengths"].to(empty.mean)
    vectors = empty.mean.new_empty(len(strengths), len(empty.mean))
    mean = torch.empty_like(empty.mean)
    fill(vectors, saved.rows["vectors"])
    fill(mean[None], saved.rows["mean"])
    lost = float(saved.tensors["discarded"])
    return _State(strengths, vectors, mean, _count(saved), lost, empty.space)


def _pairs(
    values: Tensor,
    vectors: Tensor,
    rank: int,
    shift: float,
    lost: float,
    state: _State,
    centred: bool,
) -> EigenPairs:
    full = torch.full((rank,), shift, dtype=torch.float64, device=vectors.device)
    full[: len(values)] = values
    bound = torch.full_like(full, lost) / residual_scale(full)
    tolerance = default_tolerance(vectors.dtype)
    return EigenPairs(
        full,
        completed(vectors, rank, state.space),
        bound,
        statistics={
            "solver": "incremental",
            "products": 0,
            "converged": int((bound <= tolerance).sum()),
            "tolerance": tolerance,
            "rows": state.count,
            "centred": centred,
            DISCARDED: lost,
            **({STOPPED: OUT_OF_TIME, ROWS_LEFT: state.left} if state.left else {}),
        },
    )
