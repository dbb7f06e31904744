"""The command line: `deltabars COMMAND …`.

Exit codes: 0, it worked; 1, it failed, with one line on stderr that says why; 2, wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

import deltabars
from deltabars.commands import bench, demo, reproduce
from deltabars.errors import DeltaBarsError, DeltaBarsWarning

_COMMANDS = (demo, reproduce, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            options.run(options)
    except DeltaBarsError as error:
        print(f"deltabars: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("deltabars: interrupted", file=sys.stderr)
        return 1
    return 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings as one line, without the place in the code that gave them."""
    ours = issubclass(category, DeltaBarsWarning)
    text = f"deltabars: warning: {message}\n"
    if not ours:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    print(text, end="", file=file or sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deltabars",
        description="Error bars for the predictions of trained PyTorch networks.",
    )
    parser.add_argument("--version", action="version", version=deltabars.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    return parser
