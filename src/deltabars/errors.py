"""Errors and warnings of deltabars.

Every message has three parts: what was expected, what was found, and what to do about it.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_command_line: frozenset[str] = frozenset()  # names of the options of the command that runs


_NONE_GIVEN = object()


def option(name: str, value: object = _NONE_GIVEN) -> str:
    """Return an option, alone or with a value, as the reader of a message gives it.

    `rank='auto'` and `params=last_layer()` in Python; `--rank auto` and `--params last-layer` while
    a command runs that has such an option. It is decided where the message is written, so that
    nothing in a message that comes from users is ever taken for an option.
    """
    if not is_option(name):
        return name if value is _NONE_GIVEN else f"{name}={value!r}"
    said = f"--{name.rstrip('=').replace('_', '-')}"
    if value is None:
        return f"no {said}"
    if value is _NONE_GIVEN or value is True:
        return said
    text = value if isinstance(value, str) else str(value).replace("_", "-").rstrip("()")
    return f"{said} {text.removeprefix('torch.')}"


def is_option(name: str) -> bool:
    """Return whether the command that runs has an option of this name."""
    return name.rstrip("=") in _command_line


def in_options(message: str) -> str:
    """Return a message that begins with options, `rank: expected …`, in its reader's names.

    Only these first words, which no user writes, are looked at.
    """
    names, colon, rest = message.partition(": expected ")
    if not all(name.replace("_", "").isalnum() for name in names.split(", ")):
        return message
    return ", ".join(map(option, names.split(", "))) + colon + rest


@contextmanager
def on_command_line(names: Iterable[str]) -> Iterator[None]:
    """Name these options as the command line does, in all threads, until the end of the block."""
    global _command_line
    before, _command_line = _command_line, frozenset(names)
    try:
        yield
    finally:
        _command_line = before


def printable(text: object) -> str:
    """Return a text in one line that a terminal shows as it is.

    What is not printable is escaped, as in JSON: line breaks, sequences that move the cursor, marks
    that turn the direction of reading. Names of files and classes come from other people.
    """
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in str(text))


class _OneLine:
    """An error whose message is one line, whatever names are in it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class DeltaBarsError(_OneLine, Exception):
    """The root of every error that deltabars raises on purpose."""


class BadValueError(DeltaBarsError, ValueError):
    """An argument has a value that cannot be used."""


class UsageError(BadValueError):
    """Something that a command needs was not given."""


class ModelError(BadValueError):
    """The model, its parameters or its outputs cannot be used."""


class DataError(BadValueError):
    """The training data or the inputs to predict cannot be used."""


class MissingDependencyError(DeltaBarsError, ImportError):
    """An optional library is needed and is not installed."""


class NotEnoughMemoryError(DeltaBarsError, MemoryError):
    """There is no memory for even one example at a time."""


class StorageError(DeltaBarsError):
    """A saved fit cannot be written or read."""


class CorruptFileError(StorageError):
    """The file is truncated, altered, or not a deltabars file."""


class FormatVersionError(StorageError):
    """The file was written in a newer format than this version reads."""


class WeightsMismatchError(StorageError):
    """The model's weights are not the ones that the file was fitted to."""


class CheckpointMismatchError(StorageError):
    """A checkpoint is of another fit: of other data, weights or options."""


class CheckpointInUseError(StorageError):
    """Another process is using the checkpoint's folder."""


class ProcessError(DeltaBarsError):
    """Another of the processes that work together has failed."""


RankError = ProcessError  # the name of version 0.5, for one version


class DeltaBarsWarning(_OneLine, UserWarning):
    """The root of every warning that deltabars gives."""


class ConvergenceWarning(DeltaBarsWarning):
    """Some eigenpairs did not reach the asked tolerance."""


class OptimumWarning(DeltaBarsWarning):
    """The weights are far from an optimum of the training cost, or not trained at all."""


class ModelWarning(DeltaBarsWarning):
    """The model can be used, but is computed in a slower way."""


class LossWarning(DeltaBarsWarning):
    """The loss can be read in more than one way, which decides what l2 means."""


class EvidenceWarning(DeltaBarsWarning):
    """A given λ is far from the one that the data support."""


class IntervalWarning(DeltaBarsWarning):
    """The guaranteed intervals of a prediction are wider than its error bars."""


class SpectrumWarning(DeltaBarsWarning):
    """The spectrum breaks the premise of the error bound, or of a covariance."""


class MemoryWarning(DeltaBarsWarning):
    """Memory ran out, and the computation continues with fewer examples at a time."""


class DataWarning(DeltaBarsWarning):
    """The data can be used, but something of them was left out, or looks wrong."""


class CheckpointWarning(DeltaBarsWarning):
    """A checkpoint could not be written or read; the fit continues without it."""


def warn(message: str, category: type[DeltaBarsWarning]) -> None:
    """Warn, with the line outside this package that called it, however deep the call is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("deltabars."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def library(name: str, extra: str) -> Any:
    """Return a library that an extra of deltabars installs, or refuse with that extra."""
    root = name.partition(".")[0]
    try:
        importlib.import_module(root)
        return importlib.import_module(name)
    except ImportError as error:
        wanted = f"pip install 'deltabars[{extra}]'"
        raise MissingDependencyError(f"This needs {root}: {wanted}.") from error


def first_line(error: BaseException) -> str:
    """Return what another library says, shortened: some of torch's messages are a page long."""
    return shortened((str(error).strip() or type(error).__name__).splitlines()[0])


def shortened(text: object) -> str:
    """Return what a file or another library says, in one line that a terminal can show."""
    plain = str(text)
    return printable(plain if len(plain) <= 120 else f"{plain[:117]}…")
