"""Rows between the ranks, which have columns of them, and the first one, which reads and writes."""

from __future__ import annotations

import errno
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deltabars.eigen.pairs import EigenPairs
from deltabars.eigen.resuming import Rows, State, with_errors
from deltabars.errors import BadValueError, CheckpointWarning, CorruptFileError, StorageError
from deltabars.fitting.growth import ProbeGrowth
from deltabars.fitting.identity import check_same
from deltabars.runtime.distributed import Columns, Group
from deltabars.runtime.memory import ran_out
from deltabars.runtime.vectors import Space
from deltabars.storage.snapshots import Snapshot, Snapshots
from deltabars.storage.writing import check_parent, locked

_AT_ONCE = 64 << 20  # bytes of whole rows


def brought_together(rows: Rows, known: int, group: Group) -> Rows:
    """Rows with all of their columns, but for the first `known`; all ranks go through them at once.

    They can be gone through once, some at a time.
    """
    if group.size == 1 or rows.columns is None:
        return rows
    return Rows(rows.epoch, _gathered(rows, known, rows.columns, group), known)


def dealt_out(blocks: Iterable[Tensor], columns: Columns, group: Group) -> Iterable[Tensor]:
    """Blocks of whole rows that the first rank has, of which each rank gets its own columns."""
    if group.size == 1:
        return blocks
    return _dealt(blocks, columns.own, group)


def _gathered(rows: Rows, known: int, columns: Columns, group: Group) -> Iterator[Tensor]:
    skip = known - rows.start
    for block in rows.blocks:
        new, skip = block[skip:], max(0, skip - len(block))
        together = max(1, _AT_ONCE // max(1, columns.bounds[-1] * block.element_size()))
        for part in new.split(together) if len(new) else ():
            yield group.all_columns(part, columns)


def _dealt(blocks: Iterable[Tensor], own: slice, group: Group) -> Iterator[Tensor]:
    source = iter(blocks)
    while True:
        block = next(source, None) if group.is_first else None
        kind = group.agreed(None if block is None else (tuple(block.shape), block.dtype))
        if kind is None:
            return
        whole = torch.empty(kind[0], dtype=kind[1]) if block is None else block
        yield group.agree_(whole)[:, own].clone()


_MOST_OF_THE_TIME = 0.05  # that saving may take
_SMALL_PARTS = ("values", "residuals", "smallest", "smallest_residuals")
_KIND = "checkpoint"
_FINISHED, _RUNNING = "finished", "running"


Part = TypeVar("Part", Tensor, Rows)


class Session:
    """One process's work on a fit: what was there when it began, and what it saves.

    Several ranks call its methods together. The states are those of one process: they can be gone
    on with by any number of ranks.

    Attributes:
        memory_budget: of the fit that is gone on with, in bytes; None for a new one.
    """

    def __init__(self, snapshots: Snapshots | None, seconds: float, group: Group) -> None:
        self._snapshots, self._group = snapshots, group
        self._seconds = seconds
        self._identity: Mapping[str, Any] = {}
        self._finished: dict[str, _Finished] = {}
        self._started: Snapshot | None = None
        self._cost = 0.0
        self._saved_at = time.monotonic()
        self._has_warned = self._has_left = False
        self.memory_budget: int | None = None
        for header in () if snapshots is None else snapshots.headers():
            budget = header.get("memory_budget")
            same = header.get("ranks", 1) == group.size  # of others it would be another share
            if same and isinstance(budget, int) and budget > 0:
                self.memory_budget = budget
            break
        self.memory_budget = group.agreed(self.memory_budget)

    @property
    def written(self) -> int:
        """Bytes that were written."""
        return 0 if self._snapshots is None else self._snapshots.written

    def begin(self, identity: Mapping[str, Any], memory_budget: int) -> None:
        """Take up the newest state, which must be of this fit.

        Raises:
            CheckpointMismatchError: it is of another; the message names what differs.
        """
        self._identity, self.memory_budget = identity, memory_budget
        if self._snapshots is not None:
            self._started = self._snapshots.newest(self._check)
        if self._started is not None:
            self._finished = with_errors(_all_finished, self._started)
        self._finished = {
            name: self._finished.get(name, part)
            for name, part in self._group.agreed(
                {name: part.without_rows() for name, part in self._finished.items()}
            ).items()
        }
        self._saved_at = time.monotonic()

    def of(self, matrix: str) -> MatrixCheckpoint:
        """What is kept of one matrix's eigenpairs."""
        return MatrixCheckpoint(self, matrix)

    def end(self) -> None:
        """Keep the result alone."""
        self.save(None, last=True)

    def leave(self) -> None:
        """Save nothing more: a matrix ran out of time, and its state is what to resume from."""
        self._has_left = True

    def finished(self, matrix: str) -> _Finished | None:
        """The eigenpairs of a matrix, where they are done."""
        return self._finished.get(matrix)

    def finish(self, matrix: str, finished: _Finished) -> None:
        """Note and save the eigenpairs of a matrix."""
        self._finished[matrix] = finished
        self.save(None)

    def started(self, matrix: str, columns: Columns) -> State | None:
        """The state of a solver that was at work on a matrix, with these columns of its rows."""
        snapshot = self._started
        running = None if snapshot is None else snapshot.header.get(_RUNNING)
        rows: dict[str, Rows] = {}
        head = None
        if snapshot is not None and isinstance(running, dict) and running.get("matrix") == matrix:
            rows = _below(f"{_RUNNING}.{matrix}", snapshot.rows)
            tensors = _below(f"{_RUNNING}.{matrix}", snapshot.tensors)
            head = running.get("numbers", {}), tensors, {name: rows[name].epoch for name in rows}
        head = self._group.agreed(head)
        if head is None:
            return None
        numbers, tensors, epochs = head
        return State(
            numbers,
            tensors,
            {
                name: Rows(epoch, self._dealt(rows.get(name), columns))
                for name, epoch in epochs.items()
            },
        )

    def rows_of(self, finished: _Finished, columns: Columns) -> Iterable[Tensor]:
        """The eigenvectors of a matrix that was done, with these columns."""
        return self._dealt(finished.stored, columns)

    def _dealt(self, rows: Rows | None, columns: Columns) -> Iterable[Tensor]:
        return dealt_out(() if rows is None else rows.blocks, columns, self._group)

    def is_due(self) -> bool:
        """Whether it is time to save."""
        pause = max(self._seconds, self._cost / _MOST_OF_THE_TIME if self._seconds else 0.0)
        return bool(self._group.agreed(time.monotonic() - self._saved_at >= pause))

    def save(self, running: tuple[str, State] | None, last: bool = False) -> None:
        """Write everything, and warn once where that cannot be done."""
        if self._has_left:
            return
        self._started = None
        header: dict[str, Any] = {
            "kind": _KIND,
            "identity": self._identity,
            "memory_budget": self.memory_budget,
            "ranks": self._group.size,
            _FINISHED: {name: part.header for name, part in self._finished.items()},
        }
        tensors: dict[str, Tensor] = {}
        rows: dict[str, Rows] = {}
        for name, part in self._finished.items():
            tensors |= _above(f"{_FINISHED}.{name}", part.tensors)
            rows[f"{_FINISHED}.{name}"] = part.rows
        if running is not None:
            matrix, state = running
            header[_RUNNING] = {"matrix": matrix, "numbers": dict(state.numbers)}
            tensors |= _above(f"{_RUNNING}.{matrix}", state.tensors)
            rows |= _above(f"{_RUNNING}.{matrix}", state.rows)  # of one matrix, never of another
        began = time.monotonic()
        rows = self._whole(rows)
        try:
            if self._snapshots is not None:
                self._snapshots.write(header, tensors, rows, last)
        except (StorageError, OSError, RuntimeError, MemoryError) as error:
            # Memory that runs out amid a message leaves the ranks out of step.
            alone = self._group.size == 1
            if not isinstance(error, StorageError | OSError) and not (alone and ran_out(error)):
                raise
            self._warn(error)
        if self._group.size > 1:  # the others are waiting for what was not asked for
            for each in rows.values():
                for _ in each.blocks:
                    pass
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - began

    def _whole(self, rows: Mapping[str, Rows]) -> dict[str, Rows]:
        """Rows with all columns, but for those that are on disk."""
        known = None
        if self._snapshots is not None:
            known = {key: self._snapshots.known(key, part.epoch) for key, part in rows.items()}
        known = self._group.agreed(known)
        return {key: brought_together(part, known[key], self._group) for key, part in rows.items()}

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
    """The eigenpairs of a matrix, how they were found, and what their growth remembers.

    Attributes:
        header: `statistics` of the pairs, and `diagnostics`.
        tensors: their small parts, and `looked` where there is a growth.
        rows: their vectors, to be saved.
        stored: the same, to be read, where they come from a file.
    """

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    rows: Rows
    stored: Rows | None = None

    def without_rows(self) -> _Finished:
        """The same for a rank that does not read files."""
        return replace(self, stored=None)


@dataclass(frozen=True)
class MatrixCheckpoint:
    """What is kept of one matrix's eigenpairs (see `eigen.states.Checkpoint`)."""

    session: Session
    matrix: str

    def load(self, space: Space) -> State | None:
        """The state that its solver was left in."""
        return self.session.started(self.matrix, space.columns)

    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self.session.is_due()

    def save(self, state: State) -> None:
        """Save the state of its solver."""
        self.session.save((self.matrix, state))

    def finished(
        self, device: torch.device, growth: ProbeGrowth | None, space: Space
    ) -> tuple[EigenPairs, dict[str, Any]] | None:
        """Its eigenpairs and their diagnostics, where they are done; vectors (K, p) in a space."""
        found = self.session.finished(self.matrix)
        if found is None:
            return None
        if growth is not None and "looked" in found.tensors:
            growth.look_back(found.tensors["looked"])
        parts = {name: found.tensors[name].to(device) for name in _SMALL_PARTS}
        blocks = self.session.rows_of(found, space.columns)
        vectors = torch.cat([block.to(device) for block in blocks])
        if len(vectors) != len(parts["values"]):
            raise CorruptFileError("checkpoint: expected as many eigenvectors as eigenvalues.")
        pairs = EigenPairs(vectors=vectors, statistics=found.header["statistics"], **parts)
        return pairs, dict(found.header["diagnostics"])

    def finish(
        self,
        pairs: EigenPairs,
        diagnostics: Mapping[str, Any],
        growth: ProbeGrowth | None,
        space: Space,
    ) -> None:
        """Save its eigenpairs, with vectors (K, p) in a space."""
        tensors = {name: getattr(pairs, name) for name in _SMALL_PARTS}
        if growth is not None:
            tensors["looked"] = growth.looked()
        header = {"statistics": dict(pairs.statistics), "diagnostics": dict(diagnostics)}
        rows = Rows("whole", [pairs.vectors], columns=space.columns)
        self.session.finish(self.matrix, _Finished(header, tensors, rows))


def _all_finished(snapshot: Snapshot) -> dict[str, _Finished]:
    found = {}
    for name, header in snapshot.header[_FINISHED].items():
        small = _below(f"{_FINISHED}.{name}", snapshot.tensors)
        stored = snapshot.rows[f"{_FINISHED}.{name}"]
        there = Rows(stored.epoch, (), start=len(small["values"]))
        found[name] = _Finished(
            {kind: header[kind] for kind in ("statistics", "diagnostics")},
            {part: small[part] for part in (*_SMALL_PARTS, *({"looked"} & small.keys()))},
            there,
            stored,
        )
    return found


def _above(prefix: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def _below(prefix: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    start = f"{prefix}."
    return {name[len(start) :]: part for name, part in parts.items() if name.startswith(start)}


_SECONDS = 60.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    """The session of a fit in a folder, which is locked for as long; None without a folder.

    Of several ranks the first one reads and writes.
    """
    if checkpoint is None:
        yield None
        return
    given = checkpoint
    if not isinstance(given, CheckpointFolder):
        given = CheckpointFolder(given)
    with ExitStack() as stack:
        snapshots, problem = None, None
        if group.is_first:
            try:
                snapshots = _snapshots(Path(given.path), stack)
            except StorageError as error:
                if getattr(error.__cause__, "errno", None) not in _NO_ROOM:
                    raise
                problem = str(error).rstrip(".")
        problem = group.agreed(problem)
        if problem is None:
            yield Session(snapshots, given.seconds, group)
            return
        warnings.warn(
            f"{problem}; the fit goes on without a checkpoint.", CheckpointWarning, stacklevel=4
        )
        yield None


def _snapshots(folder: Path, stack: ExitStack) -> Snapshots:
    """The states in a folder, which is made if it does not exist, and locked."""
    if not folder.is_dir():
        check_parent(folder, "checkpoint")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"checkpoint: expected a folder, got {folder} ({error.strerror or error})."
            ) from error
    stack.enter_context(locked(folder))
    return Snapshots(folder)
