"""The state of a Krylov run: saved now and then, and resumed to the same bits on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from deltabars.eigen.basis import Basis, Followed, Growth, Projected
from deltabars.eigen.pairs import LEAST_RITZ, EigenPairs, Products
from deltabars.eigen.restart import Patience
from deltabars.errors import CorruptFileError
from deltabars.runtime.memory import ran_out

_OF_PAIRS = ("values", "residuals", "smallest", "smallest_residuals", "vectors")


@dataclass(frozen=True)
class State:
    """Everything that a solver needs to continue: numbers, and tensors on any device."""

    numbers: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Checkpoint(Protocol):
    """A place where the state of one matrix is kept."""

    def load(self) -> State | None:
        """Return the state that was saved last; None where there is none."""

    def is_due(self) -> bool:
        """Return whether it is time to save again."""

    def save(self, state: State) -> None:
        """Replace the saved state. What cannot be written is not an error."""


@dataclass(frozen=True)
class Position:
    """Where the loop of one search stands, beside its basis and its projected matrix."""

    block: Tensor  # (b, P): the next rows of the basis
    norm: float
    least: float
    converged: int
    next_check: int
    restarts: int
    patience: Patience


@dataclass
class Journal:
    """Save and resume a run: a search for all pairs, then perhaps some for pairs it has missed.

    Args:
        checkpoint: where; None for a run that is not saved.
        matrix: its count of products is part of the state.
        generator: of the run's random vectors; likewise.
        growth: likewise, where there is one.

    Attributes:
        found: the pairs of the first search; None while it lasts.
        restarts: of the first search.
        copies: how many missed pairs were inserted.
    """

    checkpoint: Checkpoint | None
    matrix: Products
    generator: torch.Generator
    growth: Growth | None = None
    found: EigenPairs | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    copies: int = field(default=0, init=False)
    _state: State | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        state = None if self.checkpoint is None else self.checkpoint.load()
        if state is not None:
            self._state = state
            _checked(self._restore, state)

    @property
    def is_searching(self) -> bool:
        """Whether the saved state lies within a search for a missed pair."""
        return self.found is not None and self._state is not None and "block" in self._state.tensors

    def resume(
        self, basis: Basis, projected: Projected, followed: Followed | None, block_size: int
    ) -> Position | None:
        """Fill an empty basis and the rest from the saved search; None where there is none."""
        state, self._state = self._state, None
        if state is None or "block" not in state.tensors:
            return None
        position: Position = _checked(self._resume, state, basis, projected, followed, block_size)
        return position

    def save(self, basis: Basis, projected: Projected, at: Position, at_once: bool = False) -> None:
        """Save a search that is under way, if it is time."""
        if self.checkpoint is None or not (at_once or self.checkpoint.is_due()):
            return
        numbers = {
            "norm": at.norm,
            "least": at.least,
            "converged": at.converged,
            "next_check": at.next_check,
            "restarts_now": at.restarts,
            "patience": asdict(at.patience),
        }
        tensors = {f"basis.{k}": panel for k, panel in enumerate(basis.panels)}
        self._save(numbers, {**tensors, "block": at.block, **projected.tensors()})

    def save_found(self, pairs: EigenPairs, restarts: int) -> None:
        """Note the pairs of the first search, and any that it missed; save them if it is time."""
        self.found, self.restarts = pairs, restarts
        if self.checkpoint is not None and self.checkpoint.is_due():
            self._save({}, {})

    def _save(self, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        assert self.checkpoint is not None
        numbers |= {"products": self.matrix.products}
        numbers |= {"restarts": self.restarts, "copies": self.copies}
        tensors["generator"] = self.generator.get_state()
        if self.growth is not None:
            tensors["growth"] = self.growth.looked()
        if self.found is not None:
            tensors |= {f"found.{name}": getattr(self.found, name) for name in _OF_PAIRS}
            numbers["found.least"] = self.found.statistics[LEAST_RITZ]
        self.checkpoint.save(State(numbers, tensors))

    def _restore(self, state: State) -> None:
        self.matrix.products = int(state.numbers["products"])
        self.restarts, self.copies = int(state.numbers["restarts"]), int(state.numbers["copies"])
        self.generator.set_state(state.tensors["generator"].cpu())
        if self.growth is not None:
            self.growth.look_back(state.tensors["growth"])
        if "found.values" in state.tensors:
            device = self.matrix.device
            parts = {name: state.tensors[f"found.{name}"].to(device) for name in _OF_PAIRS}
            self._check_rows(parts["vectors"])
            statistics = {LEAST_RITZ: float(state.numbers["found.least"])}
            self.found = EigenPairs(statistics=statistics, **parts)

    def _resume(
        self,
        state: State,
        basis: Basis,
        projected: Projected,
        followed: Followed | None,
        block_size: int,
    ) -> Position:
        numbers, tensors, device = state.numbers, state.tensors, self.matrix.device
        projected.restore(tensors)
        for k in range(sum(name.startswith("basis.") for name in tensors)):
            panel = tensors[f"basis.{k}"].to(device)
            self._check_rows(panel)
            basis.append(panel)
        if basis.rows != projected.size:
            raise ValueError("another number of rows")
        block = tensors["block"].to(device)
        self._check_rows(block)
        if followed is not None:  # in blocks as before, to the same bits
            for start in range(0, basis.rows, block_size):
                followed.append(basis.copy(start, start + block_size))
        return Position(
            block,
            float(numbers["norm"]),
            float(numbers["least"]),
            int(numbers["converged"]),
            int(numbers["next_check"]),
            int(numbers["restarts_now"]),
            Patience(**numbers["patience"]),
        )

    def _check_rows(self, rows: Tensor) -> None:
        shape = (len(rows), self.matrix.space.width)
        if tuple(rows.shape) != shape or rows.dtype != self.matrix.dtype:
            raise ValueError("rows of another shape or type")


def _checked(work: Any, *arguments: Any) -> Any:
    """Return the result of `work` on a state, which must be one that this solver has saved."""
    try:
        return work(*arguments)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        if ran_out(error):
            raise
        raise CorruptFileError(
            f"checkpoint: expected a state of this solver, got one that is altered ({error}). "
            "Remove the folder, or give another."
        ) from error
