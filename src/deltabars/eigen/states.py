"""Where a solver stands: what it saves on the way, so that it can be gone on with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from deltabars.columns import Columns
from deltabars.space import Space


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
