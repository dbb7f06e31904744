"""What every curvature matrix of a cost has in common: (1/N)·Σₙ Aₙ + λI."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deltabars.batches import Batch
from deltabars.curvature.columns import kept_parts
from deltabars.curvature.pullback import Pullback
from deltabars.errors import BadValueError, MissingDependencyError, ModelError
from deltabars.memory import KEPT, attempt, chunk_within, share
from deltabars.network import model_errors
from deltabars.problem import Problem
from deltabars.space import Space

_ROWS_AT_ONCE = 64


class CurvatureOperator(ABC):
    """A symmetric P×P matrix (1/N)·Σₙ Aₙ + λI, seen through its products with vectors."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return (self.problem.num_parameters, self.problem.num_parameters)

    @property
    def device(self) -> torch.device:
        """Where products are computed."""
        return self.problem.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the products."""
        return self.problem.dtype

    @property
    def reached(self) -> Tensor | None:
        """The places (P',) of the parameters that the examples reach; None for all of them.

        In the rows and columns of the others the matrix is λI.
        """
        return self.problem.reached

    def matmat(self, vectors: Tensor) -> Tensor:
        """Products of the matrix with each row of `vectors`: (b, P) -> (b, P).

        Cost: one pass over the data.
        """
        self._check_vectors(vectors)
        total = self.problem.ranks.sum_(self._sum_here(self._pick(vectors)))
        mean = self._put_back(total.div_(self.problem.num_examples))  # (b, P)
        return mean.add_(vectors, alpha=self.problem.l2)

    def whole_matmat(self, vectors: Tensor) -> Tensor:
        """The same of rows of which each rank has its own columns in ℝᴾ: (b, p) -> (b, p).

        Cost: one pass over the data, and two messages where there are other ranks.
        """
        return self._shared(vectors, self.problem.spaces.whole, self._sum_of_all)

    def reached_matmat(self, vectors: Tensor) -> Tensor:
        """The same among the parameters that are reached: (b, p') -> (b, p')."""
        return self._shared(vectors, self.problem.spaces.reached, self._sum_here)

    def _shared(
        self, vectors: Tensor, space: Space, sum_here: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ranks, columns = space.ranks, space.columns
        total = sum_here(ranks.all_columns(vectors, columns))
        mean = ranks.summed_columns(total, columns).div_(self.problem.num_examples)
        return mean.add_(vectors, alpha=self.problem.l2)

    def _sum_of_all(self, vectors: Tensor) -> Tensor:
        return self._put_back(self._sum_here(self._pick(vectors)))

    def _sum_here(self, vectors: Tensor) -> Tensor:
        with self.problem.network.evaluation(), model_errors():
            return self._data_sum(vectors)

    def _pick(self, whole: Tensor) -> Tensor:
        """The columns of (b, P) that are reached: (b, P')."""
        return whole if self.reached is None else whole.index_select(1, self.reached)

    def _put_back(self, part: Tensor) -> Tensor:
        """Columns (b, P') in their places among zeros: (b, P)."""
        if self.reached is None:
            return part
        whole = part.new_zeros(part.shape[0], self.shape[1])
        return whole.index_copy_(1, self.reached, part)

    def to_dense(self) -> Tensor:
        """The matrix itself, (P, P). Cost: P products."""
        size = self.shape[0]
        eye = torch.eye(size, device=self.device, dtype=self.dtype)
        return torch.cat([self.matmat(block) for block in eye.split(_ROWS_AT_ONCE)])

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` of the matrix (SciPy's vectors are columns)."""
        try:
            from scipy.sparse.linalg import LinearOperator
        except ImportError as error:
            raise MissingDependencyError(
                "to_scipy() needs SciPy: pip install 'deltabars[scipy]'."
            ) from error

        def matmat(columns: Any) -> Any:
            rows = torch.tensor(columns.T.copy(), device=self.device, dtype=self.dtype)
            return self.matmat(rows).T.cpu().numpy()

        def matvec(column: Any) -> Any:
            return matmat(column.reshape(-1, 1)).reshape(-1)

        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator(
            shape=self.shape, dtype=kind, matvec=matvec, rmatvec=matvec, matmat=matmat
        )

    @abstractmethod
    def _data_sum(self, vectors: Tensor) -> Tensor:
        """Σₙ Aₙ v for each row v of `vectors` (b, P') over the examples that are here."""

    def _check_vectors(self, vectors: Tensor) -> None:
        if vectors.ndim != 2 or vectors.shape[1] != self.shape[0]:
            raise BadValueError(
                f"Vectors: expected shape (b, {self.shape[0]}), one vector a row, got "
                f"{tuple(vectors.shape)}."
            )
        if vectors.dtype != self.dtype or vectors.device != self.device:
            raise BadValueError(
                f"Vectors: expected {self.dtype} on {self.device}, got {vectors.dtype} on "
                f"{vectors.device}."
            )


class RowOperator(CurvatureOperator):
    """A matrix (1/N)·RᵀR + λI of rows R that come from the examples one by one.

    The rows are kept where they fit the memory budget, and otherwise computed again on each pass;
    without the columns of parameters that are not reached, which are zero.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.pullback = Pullback(problem.network)
        self._parts = kept_parts(problem.parameters, problem.reached)
        row = self._bytes_per_row + problem.num_parameters * self.dtype.itemsize
        per_example = self._rows_per_example * (row + 2 * problem.activation_bytes)
        most = problem.chunk_size.value
        fitting = chunk_within(problem.memory_budget, per_example, most, self.device)
        self._chunk_size = problem.chunk_size.at_most(fitting)
        self._kept: Tensor | None = None

    @property
    def row_scale(self) -> float:
        """1/N: what RᵀR is multiplied by."""
        return 1.0 / self.problem.num_examples

    @property
    def row_shift(self) -> float:
        """λ: what is added to the diagonal."""
        return self.problem.l2

    @property
    def num_rows(self) -> int:
        """How many rows of R are here."""
        return self.problem.data.num_here * self._rows_per_example

    @property
    def keeps_rows(self) -> bool:
        """Whether all of R fits the part of the memory budget that it may take."""
        return self.num_rows * self._bytes_per_row <= share(self.problem.memory_budget, KEPT)

    @property
    def kept_bytes(self) -> int:
        """The memory that is held from product to product."""
        return 0 if self._kept is None else self._kept.nbytes

    def data_trace(self) -> float:
        """The trace of (1/N)·RᵀR: what all its eigenvalues sum up to. Cost: one pass over R."""
        blocks = self.reached_row_blocks()
        total = sum(float(block.square().sum(dtype=torch.float64)) for block in blocks)
        return math.fsum(self.problem.ranks.gather(float(total))) * self.row_scale

    def row_blocks(self) -> Iterator[Tensor]:
        """R in blocks (n, P), in the order of the data.

        Raises:
            ModelError: per-example derivatives cannot be had, or are not finite.
        """
        for block in self.reached_row_blocks():
            yield self._put_back(block)

    def reached_row_blocks(self) -> Iterator[Tensor]:
        """R in blocks (n, P'), without the columns that are zero."""
        kept = self._kept_rows()
        if kept is not None:
            yield from kept.split(self._chunk_size.value * self._rows_per_example)
        else:
            yield from self._computed_blocks()

    def _kept_rows(self) -> Tensor | None:
        if self._kept is None and self.keeps_rows:
            self._kept = self._all_rows()
        return self._kept

    def _all_rows(self) -> Tensor | None:
        """R whole, (rows, P'), or None where there is no memory for it after all."""
        size = (self.num_rows, self.problem.num_reached)
        whole = attempt(lambda: torch.empty(size, device=self.device, dtype=self.dtype))
        if whole is not None:
            for _ in self._computed_blocks(whole):
                pass
        return whole

    def _computed_blocks(self, whole: Tensor | None = None) -> Iterator[Tensor]:
        """R in blocks (n, P'), written to `whole` where that is given."""
        done = 0

        def compute(batch: Batch) -> Tensor:
            count = len(batch) * self._rows_per_example
            out = None if whole is None else whole[done : done + count]
            with self.problem.network.evaluation(), model_errors():
                shape = (len(batch), self._rows_per_example, -1)
                rows = self._rows(batch, None if out is None else out.view(shape))
            return rows.flatten(0, 1)

        for block in self._chunk_size.each(self.problem.chunks(self._chunk_size.value), compute):
            if not bool(block.sum().isfinite()):  # as quick as it can be: one NaN is enough
                raise ModelError(
                    "Per-example gradients: expected finite values, got NaN or infinity. Look "
                    "for square roots or logarithms at zero in the model."
                )
            done += len(block)
            yield block

    def _data_sum(self, vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors)
        kept = self._kept_rows()
        for block in self._computed_blocks() if kept is None else [kept]:
            total.addmm_(vectors @ block.T, block)
        return total

    @property
    def _bytes_per_row(self) -> int:
        return self.problem.num_reached * self.dtype.itemsize

    @property
    @abstractmethod
    def _rows_per_example(self) -> int:
        """How many rows of R one example gives."""

    @abstractmethod
    def _rows(self, batch: Batch, out: Tensor | None) -> Tensor:
        """The rows (B, rows an example, P') of a batch, written to `out` where that is given."""
