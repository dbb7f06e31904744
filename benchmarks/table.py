"""The results as a table of a hundred columns."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.results import Measure, Record

_COLUMNS = 100
_WIDTHS = (12, 33, 8, 11, 18, 12)
_HEAD = ("work", "what", "time", "figure", "accuracy", "must (aim)")


def head() -> str:
    """Return the head of the table."""
    line = _line(_HEAD) + "met"
    return f"{line}\n{'-' * _COLUMNS}"


def section(record: Record) -> str:
    """Return the lines of one work, its notes below them."""
    start = record.work
    lines = []
    if len(start) >= _WIDTHS[0]:  # a line of its own for a long name
        lines.append(start)
        start = ""
    for measure in record.measures:
        lines.append(_line((start, *_cells(measure))) + measure.verdict)
        start = ""
    for note in record.notes:
        lines += textwrap.wrap(
            f"({note})",
            _COLUMNS,
            initial_indent=f"{start:<{_WIDTHS[0]}}",
            subsequent_indent=" " * (_WIDTHS[0] + 1),
        )
        start = ""
    return "\n".join(line.rstrip() for line in lines)


def words(measure: Measure) -> str:
    """Return a measure as one line of plain text."""
    cells = [cell for cell in _cells(measure) if cell]
    if measure.products is not None:
        cells.append(f"{measure.products} products")
    return ", ".join(cells)


def foot(environment: dict[str, Any]) -> str:
    """Where and on what the figures were taken."""
    width = max(map(len, environment))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in environment.items())


def _cells(measure: Measure) -> tuple[str, ...]:
    accuracy = ""
    if measure.accuracy is not None:
        accuracy = f"{measure.accuracy_of} {measure.accuracy:.1e}"
    figure = "" if measure.figure is None else f"{_number(measure.figure)} {measure.unit}"
    goal = "" if measure.goal is None else str(measure.goal)
    return measure.what, _duration(measure.median), figure, accuracy, goal


def _line(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _number(value: float) -> str:
    return f"{value:.1e}" if abs(value) < 0.01 else f"{value:.3g}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
