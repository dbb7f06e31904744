"""What curvature matrices share: products with vectors; the rows of OPG and GGN."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from deltabars.curvature.pullback import Pullback, kept_parts
from deltabars.errors import BadValueError, ModelError, library
from deltabars.problem.data import Batch
from deltabars.problem.network import model_errors
from deltabars.problem.problem import Problem
from deltabars.runtime.memory import KEPT, attempt, chunk_within, share
from deltabars.runtime.precision import full_precision

_ROWS_AT_ONCE = 64


class CurvatureOperator(ABC):
    """A symmetric P×P matrix (1/N)·Σₙ Aₙ + λI, seen through its products with vectors.

    Attributes:
        shape: (P, P).
        device, dtype: of the products.
        spaces: of all parameters, and of those that the examples reach; in the rows and columns of
            the others the matrix is λI.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.shape = problem.num_parameters, problem.num_parameters
        self.device, self.dtype = problem.device, problem.dtype
        self.spaces = problem.spaces

    def matmat(self, vectors: Tensor) -> Tensor:
        """Multiply the matrix with each row: (b, P) -> (b, P). Cost: one pass over the data."""
        fits = vectors.ndim == 2 and vectors.shape[1] == self.shape[0]
        if not fits or vectors.dtype != self.dtype or vectors.device != self.device:
            raise BadValueError(
                f"Vectors: expected rows (b, {self.shape[0]}) of {self.dtype} on {self.device}, "
                f"got {tuple(vectors.shape)} of {vectors.dtype} on {vectors.device}."
            )
        space = self.spaces.whole
        return space.group.gather_columns(self.whole_matmat(vectors[:, space.own]), space.columns)

    def whole_matmat(self, vectors: Tensor) -> Tensor:
        """Multiply rows of which each process has its own columns in ℝᴾ: (b, p) -> (b, p)."""
        return self.data_matmat(vectors).add_(vectors, alpha=self.problem.l2)

    def data_matmat(self, vectors: Tensor) -> Tensor:
        """Multiply the data part alone, without λI, with such rows: (b, p) -> (b, p)."""
        return self.spaces.expand(self._mean(self.spaces.select(vectors)))

    def reached_matmat(self, vectors: Tensor) -> Tensor:
        """Multiply such rows among the parameters that are reached: (b, p') -> (b, p')."""
        return self._mean(vectors).add_(vectors, alpha=self.problem.l2)

    def _mean(self, vectors: Tensor) -> Tensor:
        """Multiply with the data part, (1/N)·Σₙ Aₙ. Cost: two collectives."""
        space = self.spaces.reached
        whole = space.group.gather_columns(vectors, space.columns)
        with self.problem.network.evaluation(), model_errors():
            total = self._data_sum(whole)
        own = space.group.reduce_columns(total, space.columns)
        return own.div_(self.problem.num_examples)

    @abstractmethod
    def _data_sum(self, vectors: Tensor) -> Tensor:
        """Compute Σₙ Aₙ v for each row v of `vectors` (b, P') over the examples of this process."""

    def _put_back(self, part: Tensor) -> Tensor:
        """Put reached columns (b, P') among zeros: (b, P)."""
        if self.spaces.indices is None:
            return part
        whole = part.new_zeros(part.shape[0], self.shape[1])
        return whole.index_copy_(1, self.spaces.indices, part)

    def to_dense(self) -> Tensor:
        """Return the matrix itself, (P, P). Cost: P products."""
        eye = torch.eye(self.shape[0], device=self.device, dtype=self.dtype)
        return torch.cat([self.matmat(block) for block in eye.split(_ROWS_AT_ONCE)])

    def to_scipy(self) -> Any:
        """Return a `scipy.sparse.linalg.LinearOperator` (SciPy's vectors are columns)."""
        linear_operator = library("scipy.sparse.linalg", "scipy").LinearOperator

        def matmat(columns: Any) -> Any:
            rows = torch.tensor(columns.T.copy(), device=self.device, dtype=self.dtype)
            return self.matmat(rows).T.cpu().numpy()

        def matvec(column: Any) -> Any:
            return matmat(column.reshape(-1, 1)).reshape(-1)

        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        return linear_operator(self.shape, matvec, matvec, matmat, kind)


class RowOperator(CurvatureOperator):
    """A matrix (1/N)·RᵀR + λI of rows Bₙᵀ Jₙ, with Jₙ = ∂z/∂ω of the outputs for example n.

    The rows R are kept where they fit the memory budget, and otherwise computed again on each pass;
    without the columns of parameters that are not reached, which are zero.

    Attributes:
        factor: the method of the likelihood that gives Bₙᵀ, from outputs and targets.
        rows_per_example: how many rows of R one example gives.
        num_rows: how many rows R has.
        row_scale, row_shift: what RᵀR is multiplied by, 1/N; what is added to the diagonal, λ.
        keeps_rows: whether R fits the part of the memory budget that it may take, on every process.
    """

    factor: ClassVar[str]
    rows_per_example: int

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.pullback = Pullback(problem.network)
        self.num_rows = problem.num_examples * self.rows_per_example
        self.row_scale, self.row_shift = 1.0 / problem.num_examples, problem.l2
        self._parts = kept_parts(problem.parameters, problem.reached)
        row = (problem.num_reached + problem.num_parameters) * self.dtype.itemsize
        per_example = self.rows_per_example * (row + 2 * problem.activation_bytes)
        most = problem.chunk_size.value
        fitting = chunk_within(problem.memory_budget, per_example, most, self.device)
        self._chunk_size = problem.chunk_size.at_most(fitting)
        kept = self.num_rows * max(self.spaces.reached.columns.widths) * self.dtype.itemsize
        self.keeps_rows = kept <= share(problem.memory_budget, KEPT)
        self._kept: Tensor | None = None
        self._squares: float | None = None  # of the rows of this process, summed; once known
        self._checked: set[tuple[int, int]] = set()  # chunks by their first example and their size

    @property
    def kept_bytes(self) -> int:
        """The memory that is held from product to product."""
        return 0 if self._kept is None else self._kept.nbytes

    def data_trace(self) -> float:
        """Return the trace of (1/N)·RᵀR, the sum of its eigenvalues. Cost: up to one pass."""
        if self._squares is None:
            blocks = self._blocks(self._kept_rows())
            self._squares = math.fsum(float(_square(block)) for block in blocks)
        return math.fsum(self.problem.group.gather_objects(self._squares)) * self.row_scale

    def gram(self, on_share: Callable[[float], None] = lambda share: None) -> Tensor:
        """Return the matrix itself in float64, (P, P). Cost: N·P² operations in float64.

        `on_share` is called with the share of the rows that are in it.
        """
        whole = torch.eye(self.shape[0], device=self.device, dtype=torch.float64)
        total = torch.zeros_like(whole)
        done, here = 0, self.problem.data.num_here * self.rows_per_example
        with self.problem.network.same_bits(), full_precision(self.device):
            for block in self.row_blocks():
                rows = block.double()
                total.addmm_(rows.T, rows)
                done += len(rows)
                on_share(done / here)
        total = self.problem.group.all_reduce_(total)
        return whole.mul_(self.problem.l2).add_(total, alpha=self.row_scale)

    def row_blocks(self) -> Iterator[Tensor]:
        """Yield the rows of the examples of this process, in blocks (n, P), in their order."""
        yield from map(self._put_back, self.reached_row_blocks())

    def reached_row_blocks(self) -> Iterator[Tensor]:
        """Yield the same in blocks (n, P'), without the columns that are zero."""
        yield from self._blocks(self._kept_rows() if self.problem.group.size == 1 else None)

    def _blocks(self, kept: Tensor | None) -> Iterable[Tensor]:
        """Return rows that are kept, or else those of this process, computed again."""
        size = self._chunk_size.value * self.rows_per_example
        return self._computed_blocks() if kept is None else kept.split(size)

    def _kept_rows(self) -> Tensor | None:
        """Return all of R, the own columns (rows, p'); None where there is no memory for it."""
        if self._kept is not None or not self.keeps_rows:
            return self._kept
        space, done = self.spaces.reached, 0
        size = (self.num_rows, space.width)
        kept = attempt(lambda: torch.empty(size, device=self.device, dtype=self.dtype))
        self.keeps_rows = all(space.group.gather_objects(kept is not None))
        if not self.keeps_rows or kept is None:
            return None
        alone = space.group.size == 1  # then rows are written where they are kept
        blocks = self._computed_blocks(kept if alone else None)
        for block in space.exchange(blocks, self.device, self.dtype):
            if not alone:
                kept[done : done + len(block)] = block
            done += len(block)
        self._kept = kept
        return kept

    def _mean(self, vectors: Tensor) -> Tensor:
        """Multiply with the data part; with rows that are kept by one collective, (b, rows)."""
        kept = self._kept_rows()
        if kept is None:
            return super()._mean(vectors)
        with full_precision(self.device):
            there = self.problem.group.all_reduce_(vectors @ kept.T)
            return (there @ kept).div_(self.problem.num_examples)

    def _data_sum(self, vectors: Tensor) -> Tensor:
        total, squares = torch.zeros_like(vectors), []
        for block in self._computed_blocks():
            total.addmm_(vectors @ block.T, block)
            if self._squares is None:
                squares.append(_square(block))
        if squares:
            self._squares = float(torch.stack(squares).sum())
        return total

    def _computed_blocks(
        self,
        whole: Tensor | None = None,
        on_outputs: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Iterator[Tensor]:
        """Yield R in blocks (n, P'), written to `whole` where that is given.

        `on_outputs` is called with the outputs and targets of each block before it is yielded.
        """
        done, each = 0, self.rows_per_example
        derive = getattr(self.problem.likelihood, self.factor)

        def compute(batch: Batch) -> Tensor:
            key, out = (done, len(batch)), None

            def factors(outputs: Tensor) -> Tensor:  # (B, C) -> (B, R, C)
                if on_outputs is not None and batch.targets is not None:
                    on_outputs(outputs.detach(), batch.targets)
                found = derive(outputs.double(), batch.targets).to(outputs.dtype)
                return cast(Tensor, found.reshape(len(batch), each, -1))

            if whole is not None:
                out = whole[done : done + len(batch) * each].view(len(batch), each, -1)
            with self.problem.network.evaluation(), model_errors():
                rows = self.pullback.rows(
                    batch.inputs, factors, out, self._parts, again=key in self._checked
                )
            if self.problem.data.in_memory:  # or else the next pass may have another order
                self._checked.add(key)
            return rows.flatten(0, 1)

        for block in self._chunk_size.each(self.problem.chunks(self._chunk_size.value), compute):
            if not bool(block.sum().isfinite()):  # as quick as it can be: one NaN is enough
                raise ModelError(
                    "Per-example gradients: expected finite values, got NaN or infinity. Look "
                    "for square roots or logarithms at zero in the model."
                )
            done += len(block)
            yield block


def _square(rows: Tensor) -> Tensor:
    """Sum the squares of all numbers, in float64."""
    return rows.square().sum(dtype=torch.float64)
