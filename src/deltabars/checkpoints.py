"""Checkpoints of a fit: what is kept in a folder, so that a fit that was stopped can go on."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deltabars.eigen import EigenPairs
from deltabars.eigen.resuming import with_errors
from deltabars.eigen.states import Rows, State
from deltabars.errors import BadValueError, CheckpointWarning, CorruptFileError, StorageError
from deltabars.growing import ProbeGrowth
from deltabars.identity import check_same
from deltabars.locking import locked
from deltabars.memory import ran_out
from deltabars.snapshots import Snapshot, Snapshots
from deltabars.writing import check_parent

_SECONDS = 60.0
_MOST_OF_THE_TIME = 0.05  # that saving may take
_SMALL_PARTS = ("values", "residuals", "smallest", "smallest_residuals")
_KIND = "checkpoint"
_FINISHED, _RUNNING = "finished", "running"


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


Part = TypeVar("Part", Tensor, Rows)
Checkpoint = str | os.PathLike[str] | CheckpointFolder


@contextmanager
def opened(checkpoint: Checkpoint | None) -> Iterator[Session | None]:
    """The session of a fit in a folder, which is locked for as long; None without a folder."""
    if checkpoint is None:
        yield None
        return
    given = checkpoint
    if not isinstance(given, CheckpointFolder):
        given = CheckpointFolder(given)
    folder = Path(given.path)
    if not folder.is_dir():
        check_parent(folder, "checkpoint")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"checkpoint: expected a folder, got {folder} ({error.strerror or error})."
            ) from error
    with locked(folder):
        yield Session(Snapshots(folder), given.seconds)


class Session:
    """One process's work on a fit: what was there when it began, and what it saves.

    Attributes:
        memory_budget: of the fit that is gone on with, in bytes; None for a new one.
    """

    def __init__(self, snapshots: Snapshots, seconds: float) -> None:
        self._snapshots = snapshots
        self._seconds = seconds
        self._identity: Mapping[str, Any] = {}
        self._finished: dict[str, _Finished] = {}
        self._started: Snapshot | None = None
        self._cost = 0.0
        self._saved_at = time.monotonic()
        self._has_warned = False
        self.memory_budget: int | None = None
        for header in snapshots.headers():
            budget = header.get("memory_budget")
            self.memory_budget = budget if isinstance(budget, int) and budget > 0 else None
            break

    @property
    def written(self) -> int:
        """Bytes that were written."""
        return self._snapshots.written

    def begin(self, identity: Mapping[str, Any], memory_budget: int) -> None:
        """Take up the newest state, which must be of this fit.

        Raises:
            CheckpointMismatchError: it is of another; the message names what differs.
        """
        self._identity, self.memory_budget = identity, memory_budget
        self._started = self._snapshots.newest(self._check)
        if self._started is not None:
            self._finished = with_errors(_all_finished, self._started)
        self._saved_at = time.monotonic()

    def of(self, matrix: str) -> MatrixCheckpoint:
        """What is kept of one matrix's eigenpairs."""
        return MatrixCheckpoint(self, matrix)

    def end(self) -> None:
        """Keep the result alone."""
        self.save(None, last=True)

    def finished(self, matrix: str) -> _Finished | None:
        """The eigenpairs of a matrix, where they are done."""
        return self._finished.get(matrix)

    def finish(self, matrix: str, finished: _Finished) -> None:
        """Note and save the eigenpairs of a matrix."""
        self._finished[matrix] = finished
        self.save(None)

    def started(self, matrix: str) -> State | None:
        """The state of a solver that was at work on a matrix."""
        snapshot = self._started
        running = None if snapshot is None else snapshot.header.get(_RUNNING)
        if snapshot is None or not isinstance(running, dict) or running.get("matrix") != matrix:
            return None
        return State(
            running.get("numbers", {}),
            _below(f"{_RUNNING}.{matrix}", snapshot.tensors),
            _below(f"{_RUNNING}.{matrix}", snapshot.rows),
        )

    def is_due(self) -> bool:
        """Whether it is time to save."""
        pause = max(self._seconds, self._cost / _MOST_OF_THE_TIME if self._seconds else 0.0)
        return time.monotonic() - self._saved_at >= pause

    def save(self, running: tuple[str, State] | None, last: bool = False) -> None:
        """Write everything, and warn once where that cannot be done."""
        self._started = None
        header: dict[str, Any] = {
            "kind": _KIND,
            "identity": self._identity,
            "memory_budget": self.memory_budget,
            _FINISHED: {name: part.header for name, part in self._finished.items()},
        }
        tensors: dict[str, Tensor] = {}
        rows: dict[str, Rows] = {}
        for name, part in self._finished.items():
            tensors |= _above(f"{_FINISHED}.{name}", part.tensors)
            rows[f"{_FINISHED}.{name}"] = Rows("whole", [part.pairs.vectors])
        if running is not None:
            matrix, state = running
            header[_RUNNING] = {"matrix": matrix, "numbers": dict(state.numbers)}
            tensors |= _above(f"{_RUNNING}.{matrix}", state.tensors)
            rows |= _above(f"{_RUNNING}.{matrix}", state.rows)  # of one matrix, never of another
        began = time.monotonic()
        try:
            self._snapshots.write(header, tensors, rows, last)
        except (StorageError, OSError, RuntimeError, MemoryError) as error:
            if not isinstance(error, StorageError | OSError) and not ran_out(error):
                raise
            self._warn(error)
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - began

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"checkpoint: expected to save the state of the fit, got an error "
                f"({str(error).rstrip('.')}); the fit goes on, and tries again later, and what was "
                "saved before is still there.",
                CheckpointWarning,
                stacklevel=2,
            )

    def _check(self, header: Mapping[str, Any]) -> None:
        there = header.get("identity")
        if header.get("kind") != _KIND or not isinstance(there, dict):
            raise CorruptFileError("A file has the name of a state and is none.")
        check_same(there, self._identity)


@dataclass(frozen=True)
class _Finished:
    """The eigenpairs of a matrix, how they were found, and what their growth remembers."""

    pairs: EigenPairs
    diagnostics: Mapping[str, Any]
    looked: Tensor | None

    @property
    def header(self) -> dict[str, Any]:
        return {
            "statistics": dict(self.pairs.statistics),
            "diagnostics": dict(self.diagnostics),
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        parts = {name: getattr(self.pairs, name) for name in _SMALL_PARTS}
        return parts if self.looked is None else {**parts, "looked": self.looked}


@dataclass(frozen=True)
class MatrixCheckpoint:
    """What is kept of one matrix's eigenpairs (see `eigen.states.Checkpoint`)."""

    session: Session
    matrix: str

    def load(self) -> State | None:
        """The state that its solver was left in."""
        return self.session.started(self.matrix)

    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self.session.is_due()

    def save(self, state: State) -> None:
        """Save the state of its solver."""
        self.session.save((self.matrix, state))

    def finished(
        self, device: torch.device, growth: ProbeGrowth | None
    ) -> tuple[EigenPairs, dict[str, Any]] | None:
        """Its eigenpairs and their diagnostics, where they are done."""
        found = self.session.finished(self.matrix)
        if found is None:
            return None
        if growth is not None and found.looked is not None:
            growth.look_back(found.looked)
        return found.pairs.to(device), dict(found.diagnostics)

    def finish(
        self, pairs: EigenPairs, diagnostics: Mapping[str, Any], growth: ProbeGrowth | None
    ) -> None:
        """Save its eigenpairs."""
        looked = None if growth is None else growth.looked()
        self.session.finish(self.matrix, _Finished(pairs, diagnostics, looked))


def _all_finished(snapshot: Snapshot) -> dict[str, _Finished]:
    found = {}
    for name, header in snapshot.header[_FINISHED].items():
        small = _below(f"{_FINISHED}.{name}", snapshot.tensors)
        rows = snapshot.rows[f"{_FINISHED}.{name}"]
        vectors = torch.cat(list(rows.blocks))
        parts = {part: small[part] for part in _SMALL_PARTS}
        if vectors.shape[0] != len(parts["values"]):
            raise ValueError("another number of pairs")
        pairs = EigenPairs(vectors=vectors, statistics=header["statistics"], **parts)
        found[name] = _Finished(pairs, header["diagnostics"], small.get("looked"))
    return found


def _above(prefix: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def _below(prefix: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    start = f"{prefix}."
    return {name[len(start) :]: part for name, part in parts.items() if name.startswith(start)}
