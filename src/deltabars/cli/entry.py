"""The command line: `deltabars COMMAND …`.

Exit codes: 0, it worked; 1, it failed, with one line on stderr that says why; 2, wrong usage.
Started by torchrun, each process has its own; all but the first say which they are.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import os
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TextIO

from deltabars.errors import (
    CheckpointWarning,
    DeltaBarsError,
    DeltaBarsWarning,
    MemoryWarning,
    UsageError,
    in_options,
    on_command_line,
    printable,
)
from deltabars.runtime import VERSION

_COMMANDS = (
    "demo", "fit", "predict", "rank", "spectrum", "report", "reproduce", "completion",
)  # fmt: skip
_OF_ONE_RANK = (CheckpointWarning, MemoryWarning)
_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in (str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib")))
)
# For terminals that have no such characters.
_IN_ASCII = {
    "λ": "lambda", "σ": "sigma", "ω": "omega", "γ": "gamma", "±": "+/-", "…": "...", "→": "->",
    "−": "-", "–": "-", "×": "x", "·": "*", "‖": "||", "½": "1/2", "²": "2", "₁": "1", "≤": "<=",
    "≥": ">=", "Σ": "sum ", "√": "sqrt", "’": "'",
}  # fmt: skip


class _Terminated(BaseException):
    """The process was asked to end: files that are being written are put away on the way out."""


_ENDINGS = {
    number: ending
    for name, ending in {
        "SIGTERM": ("terminated", _Terminated),
        "SIGHUP": ("terminated", _Terminated),
        "SIGINT": ("interrupted", KeyboardInterrupt),
    }.items()
    if (number := getattr(signal, name, None)) is not None
}
_asked: list[str] = []


def _end(number: int, frame: object) -> None:
    _ignore_signals()  # one is enough
    word, kind = _ENDINGS[number]
    _asked.append(word)
    raise kind("the process was asked to end")


def _ignore_signals() -> None:
    for number in _ENDINGS:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_IGN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    _never_fail_to_print()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    names: set[str] = set()
    if "MASTER_ADDR" in os.environ and not debug:  # or torch adds a page when a process is gone
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        usual = (signal.SIG_DFL, signal.default_int_handler)
        for number in _ENDINGS if arguments is None else ():
            if signal.getsignal(number) in usual:
                signal.signal(number, _end)
        parser, commands = make_parser()  # imports torch, which takes its time
        if not given:
            parser.print_help()
            return 0
        from deltabars.cli.options import with_config

        options, unknown = parser.parse_known_args(with_config(given, commands))
        if unknown:
            commands.get(given[0], parser).error(f"unrecognized arguments: {' '.join(unknown)}")
        debug = options.debug
        from deltabars.cli.launching import launched

        screen: Any = _Screen(sys.stdout)
        names = {action.dest for each in commands.values() for action in each._actions}
        with redirect_stdout(screen), warnings.catch_warnings(), on_command_line(names):
            warnings.showwarning = _Warnings(debug).show
            if options.print_python:
                code = str(options.python(options))
                encoding = sys.stdout.encoding or "utf-8"  # an escape means the character
                print(code.encode(encoding, "backslashreplace").decode(encoding))
                return 0
            try:
                with launched(options):
                    options.run(options)
            except UsageError as error:
                commands[given[0]].error(str(error))
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted")
        return 1
    except _Terminated:
        _complain("terminated")
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if _asked:  # a library made an error of its own of it
            _complain(_asked[0])
            return 1
        if debug:
            print(_printable_lines(traceback.format_exc()), end="", file=sys.stderr)
        with on_command_line(names):
            _complain(_one_line(error))
        return 1
    finally:
        _ignore_signals()  # on the way out of the process, which has its exit code
    return 0


def make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of its commands by name."""
    parser = _Parser(
        prog="deltabars",
        description="Error bars for the predictions of trained PyTorch networks.",
        epilog="`deltabars COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        importlib.import_module(f"deltabars.cli.{command}").register(commands)
    for of_command in commands.choices.values():
        of_command.allow_abbrev = False  # a shortened --config would not be seen
        add = of_command.add_argument
        add("--config", metavar="FILE", help="options from a TOML file; those given here win")
        add("--print-python", action="store_true", help="print the Python this stands for, and end")
        add("--debug", action="store_true", help="the traceback of an error as well")
    return parser, commands.choices


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, which names the command that lists the options."""

    def error(self, message: str) -> NoReturn:
        said = " ".join(message.removeprefix("argument ").split())
        said = printable(said.rstrip("."))
        self.exit(2, f"deltabars: {_speaker()}{said} (usage: {self.prog} --help)\n")


def _never_fail_to_print() -> None:
    """Replace characters that the terminal's encoding does not have."""
    codecs.register_error("deltabars", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="deltabars")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    escaped = [_IN_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in found]
    return "".join(escaped), error.end


class _Screen:
    """Standard output in which names, whoever chose them, cannot act on the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_printable_lines(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _complain(line: str) -> None:
    print(printable(f"deltabars: {_speaker()}{line}"), file=sys.stderr)


def _speaker() -> str:
    """Who says it, where several processes were started and it is not the first."""
    rank = os.environ.get("RANK", "0") if os.environ.get("MASTER_ADDR") else "0"
    return "" if rank == "0" else f"rank {rank}: "


def _one_line(error: Exception) -> str:
    """An error in one line: our own as they are, others with the place in the user's code."""
    message = " ".join(str(error).split())
    if isinstance(error, DeltaBarsError):
        return in_options(message)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    said = message.rstrip(".") or "no message"
    return f"{type(error).__name__}: {said}{place}. --debug shows the traceback."


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or str(Path(filename).resolve()).startswith(_LIBRARIES)


class _Warnings:
    """Shows each warning once, as one line without the place in the code that gave it."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug
        self._shown: set[str] = set()

    def show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Show a warning; one of ours that all ranks give alike is the first rank's to show."""
        ours = issubclass(category, DeltaBarsWarning)
        if ours and _speaker() and not issubclass(category, _OF_ONE_RANK):
            return
        said = " ".join(str(message).split())
        if said in self._shown:
            return
        self._shown.add(said)
        text = f"deltabars: {_speaker()}warning: {in_options(said) if ours else said}"
        place = f" ({filename}, line {lineno})" if self._debug and not ours else ""
        print(printable(text + place), file=file or sys.stderr)
