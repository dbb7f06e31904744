"""Where a solver stands: what it saves on the way, so that it can be gone on with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deltabars.eigen.basis import Basis
from deltabars.eigen.operators import _Products
from deltabars.eigen.pairs import LEAST_RITZ, EigenPairs, lower_scale, residual_scale
from deltabars.eigen.projected import Followed, Growth, Projected, Ritz
from deltabars.errors import CorruptFileError
from deltabars.runtime.distributed import Columns
from deltabars.runtime.vectors import Space


@dataclass(frozen=True)
class Rows:
    """Rows (n, P) that may become more.

    Attributes:
        epoch: for as long as it stays the same, so do the rows that were there before.
        blocks: the rows, some at a time.
        start: how many come before them, that are kept already.
        columns: which columns of them each rank has; None where they are whole.
    """

    epoch: str
    blocks: Iterable[Tensor]
    start: int = 0
    columns: Columns | None = None


@dataclass(frozen=True)
class State:
    """All that a solver needs to go on as if it had not been stopped.

    Attributes:
        numbers: whole numbers and texts.
        tensors: what is small, or changes at every step.
        rows: what is large, and grows.
    """

    numbers: Mapping[str, int | str]
    tensors: Mapping[str, Tensor]
    rows: Mapping[str, Rows] = field(default_factory=dict)


class Checkpoint(Protocol):
    """Where states are kept."""

    def load(self, space: Space) -> State | None:
        """The state that was saved last, with rows in a space; None where there is none."""

    def is_due(self) -> bool:
        """Whether it is time to save again."""

    def save(self, state: State) -> None:
        """Keep a state in place of those before. What cannot be written is not an error."""


# So many restarts, and products for so many bases: thrice the longest lull seen.
_RESTARTS, _BASES = 200, 40
_LESS = 0.9


@dataclass
class Patience:
    """When restarts have come to a standstill: a cluster of eigenvalues that the basis cannot hold.

    Attributes:
        distance: the least there was (see `Ritz.distance`), but for falls of less than a tenth.
        restarts: since then.
        products: that were done then.
    """

    distance: float = math.inf
    restarts: int = 0
    products: int = 0

    def is_over(self, distance: float, products: int, max_vectors: int) -> bool:
        """Whether to stop, at a restart after so many products with a basis of so many vectors."""
        if distance < _LESS * self.distance:
            self.distance, self.restarts, self.products = distance, 0, products
            return False
        self.restarts += 1
        return self.restarts > _RESTARTS and products - self.products > _BASES * max_vectors


def to_keep(size: int, rank: int, smallest: int, block_size: int) -> Tensor:
    """Which of `size` ascending Ritz pairs a restart keeps: those wanted, and a third of the rest.

    What is kept beyond the wanted pairs saves it from being found again; what is not leaves room.
    """
    rest = size - rank - smallest
    spare = max(0, min(rest // 3, rest - 2 * block_size))
    below = smallest + spare // 2 if smallest else 0
    above = rank + smallest + spare - below
    return torch.cat([torch.arange(below), torch.arange(size - above, size)])


def insert(pairs: EigenPairs, missed: EigenPairs) -> EigenPairs:
    """The pairs with one more among them and without the last. The vectors move in place."""
    rank = len(pairs)
    place = int((pairs.values >= missed.values).sum())
    for row in range(rank - 1, place, -1):
        pairs.vectors[row] = pairs.vectors[row - 1]
    if place < rank:
        pairs.vectors[place] = missed.vectors[0]
    values, residuals = (
        torch.cat([own[:place], new, own[place:]])[:rank]
        for own, new in ((pairs.values, missed.values), (pairs.residuals, missed.residuals))
    )
    return replace(pairs, values=values, residuals=residuals)


def found_pairs(basis: Basis, ritz: Ritz, rank: int, least: float, tolerance: float) -> EigenPairs:
    """The `rank` largest Ritz pairs, whose vectors take the place of the basis.

    Args:
        least: the least Ritz value there has been.
        tolerance: for the eigenvalues of the lower end that are known as well.
    """
    values = ritz.values.flip(0)[:rank]
    basis.keep(ritz.coordinates.flip(1)[:, :rank])
    residuals = ritz.norms.flip(0)[:rank] / residual_scale(values)
    rest = ritz.values.shape[0] - values.shape[0]
    lower, lower_norms = ritz.values[:rest], ritz.norms[:rest]
    lower_residuals = lower_norms / lower_scale(lower, values[:1].expand_as(lower))
    known = int((lower_residuals <= tolerance).long().cumprod(0).sum())
    vectors = basis.take()
    device = vectors.device
    return EigenPairs(
        values.to(device),
        vectors,
        residuals.to(device),
        lower[:known].to(device),
        lower_residuals[:known].to(device),
        {LEAST_RITZ: least},
    )


_SMALL_PARTS = ("values", "residuals", "smallest", "smallest_residuals")


@dataclass(frozen=True)
class Position:
    """Where the loop of one search is, beside its basis and its projected matrix."""

    block: Tensor  # (b, P): the next rows of the basis
    norm: float
    least: float
    converged: int
    next_check: int
    restarts: int
    patience: Patience


@dataclass
class Course:
    """What a run has done so far.

    A run is a search for all pairs, and then perhaps some for pairs that the first has missed. A
    state holds the pairs that were found, if the first search is over, and the basis of the
    search that is under way, if there is one.

    Args:
        checkpoint: where to save and to start from; None for a run that does neither.
        matrix: its count of products is part of the state.
        generator: of the run's random vectors; likewise.
        growth: likewise, where there is one.

    Attributes:
        found: the pairs of the first search; None while it lasts.
        restarts: of the first search.
        copies: how many missed pairs were taken in.
    """

    checkpoint: Checkpoint | None
    matrix: _Products
    generator: torch.Generator
    growth: Growth | None = None
    found: EigenPairs | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    copies: int = field(default=0, init=False)
    _state: State | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        space = self.matrix.space
        self._state = None if self.checkpoint is None else self.checkpoint.load(space)
        if self._state is not None:
            with_errors(self._restore, self._state)

    @property
    def is_searching(self) -> bool:
        """Whether the state that is taken up is within a search for a missed pair."""
        state = self._state
        return self.found is not None and state is not None and "basis" in state.rows

    def take_up(
        self, basis: Basis, projected: Projected, followed: Followed | None, block_size: int
    ) -> Position | None:
        """Bring an empty basis and its company to where the saved search was; None for a new one.

        Bit by bit: the basis in panels as they were, and what is followed block by block.
        """
        state, self._state = self._state, None
        if state is None or "basis" not in state.rows:
            return None
        return with_errors(self._rebuild, state, basis, projected, followed, block_size)

    def save(self, basis: Basis, projected: Projected, at: Position, at_once: bool = False) -> None:
        """Save a search that is under way, if it is time."""
        if self.checkpoint is None or not (at_once or self.checkpoint.is_due()):
            return
        stage = f"search {self.copies if self.found is not None else 'first'}"
        numbers = {
            "size": projected.size,
            "converged": at.converged,
            "next_check": at.next_check,
            "restarts_now": at.restarts,
            "waited_restarts": at.patience.restarts,
            "waited_products": at.patience.products,
        }
        tensors = {
            "reals": torch.tensor([at.norm, at.least, at.patience.distance], dtype=torch.float64),
            **projected.packed(),
        }
        # The block comes to the basis as it is, and is then there already.
        blocks = [*basis.panels, at.block]
        rows = {"basis": self._rows(f"{stage}, restart {at.restarts}", blocks)}
        self._save(numbers, tensors, rows)

    def save_found(self, pairs: EigenPairs, restarts: int) -> None:
        """Note the pairs of the first search, and any that it missed; save them if it is time."""
        self.found, self.restarts = pairs, restarts
        if self.checkpoint is not None and self.checkpoint.is_due():
            self._save({}, {}, {})

    def _save(self, numbers: dict[str, Any], tensors: dict[str, Tensor], rows: Any) -> None:
        assert self.checkpoint is not None
        numbers |= {"products": self.matrix.products}
        numbers |= {"restarts": self.restarts, "copies": self.copies}
        tensors |= {"generator": self.generator.get_state()}
        if self.growth is not None:
            tensors["growth"] = self.growth.looked()
        if self.found is not None:
            rows = {"found": self._rows(f"copies {self.copies}", [self.found.vectors]), **rows}
            tensors |= {f"found.{name}": getattr(self.found, name) for name in _SMALL_PARTS}
            least = self.found.statistics[LEAST_RITZ]
            tensors["found.least"] = torch.tensor([least], dtype=torch.float64)
        self.checkpoint.save(State(numbers, tensors, rows))

    def _rows(self, epoch: str, blocks: list[Tensor]) -> Rows:
        return Rows(epoch, blocks, columns=self.matrix.space.columns)

    def _restore(self, state: State) -> None:
        self.matrix.products = int(state.numbers["products"])
        self.restarts, self.copies = int(state.numbers["restarts"]), int(state.numbers["copies"])
        self.generator.set_state(state.tensors["generator"])
        if self.growth is not None:
            self.growth.look_back(state.tensors["growth"])
        if "found" in state.rows:
            device = self.matrix.device
            parts = {name: state.tensors[f"found.{name}"].to(device) for name in _SMALL_PARTS}
            shape = len(parts["values"]), self.matrix.space.width
            vectors = torch.empty(shape, device=device, dtype=self.matrix.dtype)
            fill(vectors, state.rows["found"])
            statistics = {LEAST_RITZ: float(state.tensors["found.least"])}
            self.found = EigenPairs(vectors=vectors, statistics=statistics, **parts)

    def _rebuild(
        self,
        state: State,
        basis: Basis,
        projected: Projected,
        followed: Followed | None,
        block_size: int,
    ) -> Position:
        device, dtype = self.matrix.device, self.matrix.dtype
        projected.unpack(int(state.numbers["size"]), state.tensors)
        rest = []
        for rows in state.rows["basis"].blocks:
            room = projected.size - basis.rows
            basis.append(_checked(rows, self.matrix)[:room].to(device))
            rest.append(rows[room:])
        block = torch.cat(rest)
        if basis.rows != projected.size or not len(block):
            raise ValueError("another number of rows")
        if followed is not None:
            for start in range(0, basis.rows, block_size):
                followed.append(basis.copy(start, start + block_size))
        norm, least, distance = state.tensors["reals"].tolist()
        waited = (int(state.numbers[f"waited_{name}"]) for name in ("restarts", "products"))
        patience = Patience(distance, *waited)
        converged, next_check, restarts = (
            int(state.numbers[name]) for name in ("converged", "next_check", "restarts_now")
        )
        return Position(
            block.to(device, dtype), norm, least, converged, next_check, restarts, patience
        )


def fill(target: Tensor, rows: Rows) -> None:
    """Copy saved rows into a tensor that has their shape."""
    done = 0
    for block in rows.blocks:
        target[done : done + len(block)] = block.to(target.device)
        done += len(block)
    if done != len(target):
        raise ValueError("another number of rows")


def with_errors(work: Any, *arguments: Any) -> Any:
    """The result of `work` on a state, which must be one that this solver has saved."""
    try:
        return work(*arguments)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CorruptFileError(
            f"checkpoint: expected a state of this solver, got one that is altered ({error}). "
            "Remove the folder, or give another."
        ) from error


def _checked(rows: Tensor, matrix: _Products) -> Tensor:
    if rows.ndim != 2 or rows.shape[1] != matrix.space.width or rows.dtype != matrix.dtype:
        raise ValueError("rows of another shape or type")
    return rows
