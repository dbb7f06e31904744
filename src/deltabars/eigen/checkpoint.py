"""The state of a Krylov run: saved now and then, and resumed to the same bits on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Generator, Tensor

from deltabars.eigen.basis import Basis, Followed, Growth, Projected
from deltabars.eigen.pairs import LEAST_RITZ, EigenPairs, Products
from deltabars.errors import CorruptFileError
from deltabars.runtime.memory import ran_out

T = TypeVar("T")

OF_PAIRS = ("values", "residuals", "smallest", "smallest_residuals", "vectors")


@dataclass(frozen=True)
class State:
    """Everything that a solver needs to continue."""

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


class Journal:
    """Save and resume a run: a search for pairs, or the pairs that it found.

    Attributes:
        found: the pairs of the search, where the saved run had come so far.
        restarts: of that search.
    """

    def __init__(
        self, checkpoint: Checkpoint, matrix: Products, generator: Generator, growth: Growth | None
    ) -> None:
        self._checkpoint, self._matrix = checkpoint, matrix
        self._generator, self._growth = generator, growth
        self.found: EigenPairs | None = None
        self.restarts = 0
        self._state = state = checkpoint.load()
        if state is None:
            return
        with refuse_altered():
            matrix.products = int(state.numbers["products"])
            generator.set_state(state.tensors["generator"].cpu())
            if growth is not None:
                growth.look_back(state.tensors["growth"])
            if "found.values" in state.tensors:
                parts = {n: state.tensors[f"found.{n}"].to(matrix.device) for n in OF_PAIRS}
                self._rows(parts["vectors"])
                position = state.numbers["position"]
                self.restarts = int(position["restarts"])
                statistics = {LEAST_RITZ: float(position["least"])}
                self.found = EigenPairs(statistics=statistics, **parts)

    def save(
        self,
        basis: Basis,
        projected: Projected,
        block: Tensor,
        position: Mapping[str, Any],
        *,
        at_once: bool = False,
    ) -> None:
        """Save a search, if it is time: the `block` is the next rows of the basis, (b, p)."""
        if at_once or self._checkpoint.is_due():
            tensors = {f"basis.{k}": panel for k, panel in enumerate(basis.panels)}
            self._save(dict(position), {**tensors, "block": block, **projected.tensors()})

    def save_found(self, pairs: EigenPairs, restarts: int) -> None:
        """Save the pairs that the search has found, if it is time."""
        if self._checkpoint.is_due():
            tensors = {f"found.{name}": getattr(pairs, name) for name in OF_PAIRS}
            self._save({"least": pairs.statistics[LEAST_RITZ], "restarts": restarts}, tensors)

    def resume(
        self,
        basis: Basis,
        projected: Projected,
        followed: Followed | None,
        block_size: int,
        position: Callable[..., T],
    ) -> tuple[Tensor, T] | None:
        """Fill an empty basis and the rest from the saved search, where there is one.

        Return the block, and the search's numbers as a `position`.
        """
        state, self._state = self._state, None
        if state is None:
            return None
        with refuse_altered():
            projected.restore(state.tensors)
            for k in range(sum(name.startswith("basis.") for name in state.tensors)):
                basis.append(self._rows(state.tensors[f"basis.{k}"]))
            if basis.rows != projected.size:
                raise ValueError("another number of rows")
            if followed is not None:  # in blocks as before, to the same bits
                for start in range(0, basis.rows, block_size):
                    followed.append(basis.copy(start, start + block_size))
            return self._rows(state.tensors["block"]), position(**state.numbers["position"])

    def _save(self, position: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["generator"] = self._generator.get_state()
        if self._growth is not None:
            tensors["growth"] = self._growth.looked()
        numbers = {"products": self._matrix.products, "position": position}
        self._checkpoint.save(State(numbers, tensors))

    def _rows(self, rows: Tensor) -> Tensor:
        width, dtype = self._matrix.space.width, self._matrix.dtype
        if tuple(rows.shape) != (len(rows), width) or rows.dtype != dtype:
            raise ValueError("rows of another shape or type")
        return rows.to(self._matrix.device)


@contextmanager
def refuse_altered() -> Iterator[None]:
    """Refuse a state that the work within did not save."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        if ran_out(error):
            raise
        raise CorruptFileError(
            f"checkpoint: expected a state of this solver, got one that is altered ({error}). "
            "Remove the folder, or give another."
        ) from error
