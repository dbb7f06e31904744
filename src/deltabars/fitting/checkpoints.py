"""Checkpoints of a fit: a folder with two alternating state files for each matrix.

DIR/opg-0.safetensors, DIR/opg-1.safetensors       (one process)
DIR/opg-0-of-4-rank-2.safetensors, …               (process 2 of 4 writes its own columns)

A file holds the state of a solver under way, or the eigenpairs that were found. It takes its place
by a rename, so it is whole or it is not there. The newest state that all processes have is resumed,
by as many processes as have written it. An identity refuses a folder of another fit.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltabars.eigen.checkpoint import State
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import (
    BadValueError,
    CheckpointMismatchError,
    CheckpointWarning,
    CorruptFileError,
    FormatVersionError,
    StorageError,
)
from deltabars.eigen.basis import Growth
from deltabars.fitting.identity import check_same
from deltabars.runtime.distributed import Group
from deltabars.runtime.memory import ran_out
from deltabars.storage import format as storage
from deltabars.storage.writing import check_parent, is_full_disk, locked, remove_left

_SECONDS = 60.0
_MOST_OF_THE_TIME = 0.05  # that saving may take
_OF_PAIRS = ("values", "vectors", "residuals", "smallest", "smallest_residuals")
_FILE = re.compile(r"(hessian|opg|ggn)-[01](-of-(\d+)-rank-(\d+))?\.safetensors")
_OLD = re.compile(r"state-\d{8,16}\.safetensors")  # of version 0.5


@dataclass(frozen=True)
class CheckpointFolder:
    """Where a fit saves its state, and how often.

    Attributes:
        path: a folder, made if it does not exist. It may hold other files.
        seconds: between two states; more where saving takes more than a twentieth of the time.
            With 0 every step of a solver is saved.
    """

    path: str | os.PathLike[str]
    seconds: float = _SECONDS

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise BadValueError(f"checkpoint: expected the path of a folder, got {self.path!r}.")
        if not isinstance(self.seconds, int | float) or not 0 <= self.seconds < math.inf:
            raise BadValueError(f"seconds: expected a number from zero on, got {self.seconds!r}.")


Checkpoint = str | os.PathLike[str] | CheckpointFolder


@contextmanager
def opened(checkpoint: Checkpoint | None, group: Group) -> Iterator[Session | None]:
    """Open a checkpoint folder, locked by the first process; None without a checkpoint."""
    if checkpoint is None:
        yield None
        return
    given = checkpoint
    if not isinstance(given, CheckpointFolder):
        given = CheckpointFolder(given)
    with ExitStack() as stack:
        problem = None
        if group.is_first:
            try:
                _prepare(Path(given.path), stack)
            except StorageError as error:
                if not is_full_disk(error.__cause__):
                    raise
                problem = str(error).rstrip(".")
        problem = group.broadcast_object(problem)
        if problem is not None:
            warnings.warn(
                f"{problem}; the fit continues without a checkpoint.",
                CheckpointWarning,
                stacklevel=4,
            )
        yield Session(Path(given.path), given.seconds, group) if problem is None else None


def _prepare(folder: Path, stack: ExitStack) -> None:
    if not folder.is_dir():
        check_parent(folder, "checkpoint")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"checkpoint: expected a folder, got {folder} ({error.strerror or error})."
            ) from error
    stack.enter_context(locked(folder))
    remove_left(folder)
    if any(_OLD.fullmatch(path.name) for path in folder.iterdir()):
        raise CheckpointMismatchError(
            f"checkpoint: expected one of this version, got {folder}, which version 0.5 wrote. "
            "Finish that fit with 0.5, or give another folder."
        )


class Session:
    """The work of one process on a fit with a checkpoint.

    Attributes:
        memory_budget: of the fit that is resumed, in bytes; None for a new one.
        written: bytes that this process has written.
    """

    def __init__(self, folder: Path, seconds: float, group: Group) -> None:
        self.group, self.written = group, 0
        self._folder, self._seconds = folder, seconds
        self._ending = "" if group.size == 1 else f"-of-{group.size}-rank-{group.rank}"
        self._identity: Mapping[str, Any] = {}
        self._cost, self._saved_at, self._has_warned = 0.0, time.monotonic(), False
        self.memory_budget: int | None = None
        for path in sorted(folder.iterdir()) if group.is_first else ():
            match = _FILE.fullmatch(path.name)
            if match is None:
                continue
            processes = int(match[3] or 1)
            if processes != group.size:
                raise CheckpointMismatchError(
                    f"checkpoint: expected states of {group.size} processes, got {path}, of "
                    f"{processes}. Start as many, or give another folder."
                )
            with suppress(StorageError):
                budget = storage.read_header(path).get("memory_budget")
                self.memory_budget = budget if isinstance(budget, int) and budget > 0 else None
        self.memory_budget = group.broadcast_object(self.memory_budget)

    def begin(self, identity: Mapping[str, Any], memory_budget: int) -> None:
        """Compare every state in the folder with this fit.

        Raises:
            CheckpointMismatchError: one is of another; the message names what differs.
        """
        self._identity, self.memory_budget = identity, memory_budget
        for path in self._folder.iterdir():
            if _FILE.fullmatch(path.name) and path.stem.endswith(self._ending):
                try:
                    header = storage.read_header(path)
                except FormatVersionError:
                    raise
                except StorageError:
                    continue  # a warning follows when it is resumed
                check_same(header.get("identity") or {}, identity)
        self._saved_at = time.monotonic()

    def of(self, matrix: str) -> MatrixCheckpoint:
        """Return the checkpoint of one matrix's eigenpairs."""
        return MatrixCheckpoint(self, matrix)

    def path(self, matrix: str, number: int) -> Path:
        """Return the file of a state: each second one takes the place of the one before."""
        return self._folder / f"{matrix}-{number % 2}{self._ending}.safetensors"

    def is_due(self) -> bool:
        """Return whether it is time to save."""
        pause = max(self._seconds, self._cost / _MOST_OF_THE_TIME if self._seconds else 0.0)
        due = time.monotonic() - self._saved_at >= pause
        return bool(self.group.broadcast_object(due))

    def write(self, path: Path, header: Mapping[str, Any], state: State) -> None:
        """Write a state; warn once where that fails."""
        began = time.monotonic()
        content = {
            **header,
            "kind": "checkpoint",
            "identity": self._identity,
            "memory_budget": self.memory_budget,
            "numbers": dict(state.numbers),
        }
        try:
            storage.write(path, content, state.tensors)
            self.written += path.stat().st_size
        except (StorageError, OSError, RuntimeError, MemoryError) as error:
            if not isinstance(error, StorageError | OSError) and not ran_out(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"checkpoint: expected to save the state of the fit, got an error "
                    f"({str(error).rstrip('.')}); the fit continues and tries again later. What "
                    "was saved before is still there.",
                    CheckpointWarning,
                    stacklevel=2,
                )
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - began


class MatrixCheckpoint:
    """The checkpoint of one matrix's eigenpairs (see `eigen.checkpoint.Checkpoint`)."""

    def __init__(self, session: Session, matrix: str) -> None:
        self._session, self._matrix = session, matrix
        self._header, self._state = self._newest()
        self._number = int(self._header.get("number", 0))

    def load(self) -> State | None:
        """Return the state of its solver, where it was under way."""
        state, self._state = self._state, None
        return state

    def is_due(self) -> bool:
        """Return whether it is time to save."""
        return self._session.is_due()

    def save(self, state: State) -> None:
        """Save the state of its solver."""
        self._save({"finished": False}, state)

    def finished(
        self, device: torch.device, growth: Growth | None
    ) -> tuple[EigenPairs, dict[str, Any]] | None:
        """Return its eigenpairs and their diagnostics, where they were found."""
        if self._state is None or not self._header.get("finished"):
            return None
        tensors, numbers, self._state = self._state.tensors, self._state.numbers, None
        try:
            if growth is not None:
                growth.look_back(tensors["growth"])
            parts = {name: tensors[name].to(device) for name in _OF_PAIRS}
            pairs = EigenPairs(statistics=numbers["statistics"], **parts)
            if len(pairs.vectors) != len(pairs.values):
                raise ValueError("another number of eigenvectors")
            return pairs, dict(numbers["diagnostics"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"checkpoint: expected the eigenpairs of the {self._matrix}, got a file that is "
                f"altered ({error}). Remove the folder, or give another."
            ) from error

    def finish(
        self, pairs: EigenPairs, diagnostics: Mapping[str, Any], growth: Growth | None
    ) -> None:
        """Save its eigenpairs in place of all states."""
        tensors = {name: getattr(pairs, name) for name in _OF_PAIRS}
        if growth is not None:
            tensors["growth"] = growth.looked()
        numbers = {"statistics": dict(pairs.statistics), "diagnostics": dict(diagnostics)}
        self._save({"finished": True}, State(numbers, tensors))
        if self._session.path(self._matrix, self._number).exists():
            self._session.path(self._matrix, self._number + 1).unlink(missing_ok=True)

    def _save(self, header: Mapping[str, Any], state: State) -> None:
        self._number += 1
        path = self._session.path(self._matrix, self._number)
        self._session.write(path, {**header, "number": self._number}, state)

    def _newest(self) -> tuple[Mapping[str, Any], State | None]:
        """Read the newest state that all processes have; warn where a newer one is altered."""
        found: dict[int, tuple[Mapping[str, Any], State]] = {}
        problem = ""
        for path in (self._session.path(self._matrix, number) for number in (0, 1)):
            if not path.exists():
                continue
            try:
                header, tensors = storage.read(path)
                found[int(header["number"])] = header, State(header["numbers"], tensors)
            except FormatVersionError:
                raise
            except (StorageError, KeyError, TypeError, ValueError) as error:
                problem = str(error).rstrip(".")
        everywhere = self._session.group.gather_objects((set(found), problem))
        problem = next((text for _, text in everywhere if text), "")
        common = set.intersection(*(numbers for numbers, _ in everywhere))
        if problem:
            start = "the state before" if common else "the beginning"
            warnings.warn(
                f"checkpoint: expected whole files, got one that is not ({problem}). Resuming from "
                f"{start}.",
                CheckpointWarning,
                stacklevel=5,
            )
        return found[max(common)] if common else ({}, None)
