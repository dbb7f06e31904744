"""The command line: `deltabars COMMAND …`.

Exit codes: 0, it worked; 1, it failed, with one line on stderr that says why; 2, wrong usage.
Started by torchrun, each process has its own; all but the first say which they are.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TextIO

from deltabars.cli.options import make_parser, with_config
from deltabars.errors import (
    CheckpointWarning,
    DeltaBarsError,
    DeltaBarsWarning,
    MemoryWarning,
    UsageError,
    in_options,
    library,
    on_command_line,
    printable,
)

_OF_ONE_PROCESS = (CheckpointWarning, MemoryWarning)
_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in (str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib")))
)
_SIGNALS: dict[int, str] = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
if hasattr(signal, "SIGHUP"):  # which Windows lacks
    _SIGNALS[signal.SIGHUP] = "terminated"
_asked: list[str] = []  # to end, by signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of terminals that lack λ
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    if "MASTER_ADDR" in os.environ and not debug:  # or torch adds a page when a process is gone
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    names: set[str] = set()
    _asked.clear()
    try:
        for number in _SIGNALS if arguments is None else ():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _end)
        parser, commands = make_parser()
        if not given:
            parser.print_help()
            return 0
        names = {action.dest for each in commands.values() for action in each._actions}
        options, unknown = parser.parse_known_args(with_config(given, commands))
        if unknown:
            commands.get(given[0], parser).error(f"unrecognized arguments: {' '.join(unknown)}")
        screen: Any = _Screen(sys.stdout)
        with redirect_stdout(screen), warnings.catch_warnings(), on_command_line(names):
            warnings.showwarning = _shown_once(debug)
            try:
                _run(options)
            except UsageError as error:
                commands[options.command].error(str(error))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if _asked or isinstance(error, KeyboardInterrupt):  # a library may make its own error of it
            _complain([*_asked, "interrupted"][0])
            return 1
        if debug:
            print(_printable_lines(traceback.format_exc()), end="", file=sys.stderr)
        with on_command_line(names):
            _complain(_one_line(error))
        return 1
    finally:
        _ignore_signals()  # on the way out of the process, which has its exit code
    return 0


def _run(options: argparse.Namespace) -> None:
    if options.command == "completion":
        shtab = library("shtab", "completion")
        print(shtab.complete(make_parser()[0], options.shell))
        return
    command = importlib.import_module(f"deltabars.cli.{options.command}")
    if getattr(options, "print_python", False):
        print(command.python(options))
        return
    from deltabars.cli.launching import launched

    with launched(options):
        command.run(options)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_IGN)


def _end(number: int, frame: object) -> NoReturn:
    """End by an exception, so that files that are being written are put away on the way out."""
    _ignore_signals()  # one is enough
    _asked.append(_SIGNALS[number])
    raise KeyboardInterrupt


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
    """Return which process says it, if it is not the first of several."""
    rank = os.environ.get("RANK", "0") if os.environ.get("MASTER_ADDR") else "0"
    return "" if rank == "0" else f"process {rank}: "


def _one_line(error: BaseException) -> str:
    """Return an error in one line: our own as it is, others with the line of the user's code."""
    message = " ".join(str(error).split())
    if isinstance(error, DeltaBarsError):
        return in_options(message)
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = frame.filename
        if not file.startswith("<") and not str(Path(file).resolve()).startswith(_LIBRARIES):
            place = f" ({file}, line {frame.lineno})"
    said = message.rstrip(".") or "no message"
    return f"{type(error).__name__}: {said}{place}. --debug shows the traceback."


def _shown_once(debug: bool) -> Callable[..., None]:
    """Return what shows each warning once, in one line."""
    known: set[str] = set()

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        ours, said = issubclass(category, DeltaBarsWarning), " ".join(str(message).split())
        # Of ours, those that all processes give alike are for the first one to show.
        repeated = ours and _speaker() and not issubclass(category, _OF_ONE_PROCESS)
        if said not in known and not repeated:
            known.add(said)
            place = f" ({filename}, line {lineno})" if debug and not ours else ""
            _complain(f"warning: {in_options(said) if ours else said}{place}")

    return show
