"""What a work found: measures with their goals, notes, raw numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

MET_AIM, MET_MUST, MISSED = "aim", "must", "MISSED"


@dataclass(frozen=True)
class Goal:
    """A bound that a number must keep, and a better one that it should.

    Attributes:
        must, aim: at most these; at least these where `at_least`.
        accuracy: the largest error or residual with which a time counts at all.
    """

    must: float
    aim: float | None = None
    at_least: bool = False
    accuracy: float | None = None

    def verdict(self, value: float, accuracy: float | None) -> str:
        """`"aim"`, `"must"` or `"MISSED"`."""
        if self.accuracy is not None and not (accuracy is not None and accuracy <= self.accuracy):
            return MISSED
        if self.aim is not None and self._keeps(value, self.aim):
            return MET_AIM
        return MET_MUST if self._keeps(value, self.must) else MISSED

    def __str__(self) -> str:
        aim = "" if self.aim is None else f" ({self.aim:g})"
        return f"{'≥' if self.at_least else '≤'} {self.must:g}{aim}"

    def _keeps(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Attributes:
        what: was measured.
        seconds: of each repeat.
        figure: the number that a goal is about: a ratio, an exponent; None where that is the time.
        unit: of the figure.
        accuracy: an error or a residual, and `accuracy_of`, which.
        goal: what the figure, or else the time, is held to.
        products: matrix-vector products that were needed.
    """

    what: str
    seconds: tuple[float, ...] = ()
    figure: float | None = None
    unit: str = "×"
    accuracy: float | None = None
    accuracy_of: str = ""
    goal: Goal | None = None
    products: int | None = None

    @property
    def median(self) -> float | None:
        """The median of the seconds."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def verdict(self) -> str:
        """Which goal is met; empty where there is none."""
        value = self.figure if self.figure is not None else self.median
        if self.goal is None or value is None:
            return ""
        return self.goal.verdict(value, self.accuracy)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with what follows from them."""
        goal = None if self.goal is None else vars(self.goal)
        return vars(self) | {"goal": goal, "median": self.median, "verdict": self.verdict}


@dataclass(frozen=True)
class Record:
    """All that a work found.

    Attributes:
        work: its name.
        measures: the lines of the table.
        notes: what a reader should know: an absent peer, a synthetic basis.
        raw: further numbers, for the JSON.
        elapsed: seconds of the work as a whole.
    """

    work: str
    measures: tuple[Measure, ...] = ()
    notes: tuple[str, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    elapsed: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with the measures as mappings."""
        return vars(self) | {"measures": [measure.to_json() for measure in self.measures]}
