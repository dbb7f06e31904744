"""What a command says while it works: a line a step, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from deltabars.errors import printable


def sayer(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line, or that does nothing."""
    return _ignore if quiet else _say


def _say(line: str) -> None:
    print(printable(f"… {line}"), file=sys.stderr, flush=True)


def _ignore(line: str) -> None:
    """Say nothing."""
