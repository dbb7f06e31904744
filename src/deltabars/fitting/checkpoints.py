"""Checkpoints of a fit: a folder with one state file for each matrix and process.

DIR/opg.safetensors                                (one process)
DIR/opg-of-4-rank-2.safetensors, …                 (process 2 of 4 writes its own columns)

A file holds the state of a solver under way, or the eigenpairs that were found. It is written whole
beside its place (`opg.new.safetensors`), which it takes by a rename once all processes have theirs.
It is resumed by as many processes as have written it. An identity refuses a folder of another fit.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltabars.eigen.basis import Growth
from deltabars.eigen.checkpoint import OF_PAIRS, State, refuse_altered
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import (
    BadValueError,
    CheckpointMismatchError,
    CheckpointWarning,
    CorruptFileError,
    StorageError,
    warn,
)
from deltabars.likelihoods.base import told_apart
from deltabars.problem.problem import Problem
from deltabars.runtime.distributed import Group
from deltabars.runtime.memory import ran_out
from deltabars.storage import format as storage
from deltabars.storage.writing import check_parent, locked, remove_left

_FORMAT = 5  # of the states that solvers save
_SECONDS = 60.0
_MOST_OF_THE_TIME = 0.05  # that saving may take
_FILE = re.compile(r"(hessian|opg|ggn)(?:-of-(\d+)-rank-\d+)?(?:\.new)?\.safetensors")
_OLD = re.compile(r"state-\d{8,16}\.safetensors")  # of version 0.5
# They change last bits alone, or how far a fit comes in one call.
_MAY_CHANGE = {"batch_size", "max_seconds"}
_DIGESTS = ("probe", "params", "data", "weights")
_MOST_NAMED = 4
_SAME_LOSS = 1e-3  # relative: the same network on another device


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
def opened(checkpoint: Checkpoint, group: Group) -> Iterator[Session]:
    """Open a checkpoint folder, locked by the first process."""
    given = checkpoint if isinstance(checkpoint, CheckpointFolder) else CheckpointFolder(checkpoint)
    folder = Path(given.path)
    with ExitStack() as stack:
        if group.is_first:
            check_parent(folder, "checkpoint")
            with suppress(OSError):  # which the lock will report
                folder.mkdir(exist_ok=True)
            stack.enter_context(locked(folder))
            remove_left(folder)
        group.broadcast_object(None)  # the folder is there
        yield Session(folder, given.seconds, group)


class Session:
    """The work of one process on a fit with a checkpoint.

    Attributes:
        memory_budget: of the fit that is resumed, in bytes; None for a new one.
        headers: of the states of this process that can be read, by file.
    """

    def __init__(self, folder: Path, seconds: float, group: Group) -> None:
        self.group, self._folder, self._seconds = group, folder, seconds
        self._ending = "" if group.size == 1 else f"-of-{group.size}-rank-{group.rank}"
        self._identity: Mapping[str, Any] = {}
        self._cost, self._saved_at, self._has_warned = 0.0, time.monotonic(), False
        self.headers: dict[Path, Mapping[str, Any]] = {}
        budget = None
        for path in sorted(folder.iterdir()):
            if _OLD.fullmatch(path.name):
                raise CheckpointMismatchError(
                    f"checkpoint: expected one of this version, got {folder}, which version 0.5 "
                    "wrote. Finish that fit with 0.5, or give another folder."
                )
            match = _FILE.fullmatch(path.name)
            if match is None:
                continue
            if int(match[2] or 1) != group.size:
                raise CheckpointMismatchError(
                    f"checkpoint: expected states of {group.size} processes, got {path}, of "
                    f"{match[2] or 1}. Start as many, or give another folder."
                )
            if path in self.paths(match[1]):
                with suppress(CorruptFileError, KeyError):  # a warning follows when it is resumed
                    header = storage.read_header(path)
                    whole = all(type(header[n]) is int for n in ("number", "memory_budget"))
                    if whole and header["file"] == self.paths(match[1])[0].name:
                        budget, self.headers[path] = header["memory_budget"], header
        self.memory_budget: int | None = group.broadcast_object(budget)

    def begin(self, identity: Mapping[str, Any], memory_budget: int) -> None:
        """Refuse states of another fit, with the names of what differs."""
        self._identity = json.loads(json.dumps(identity))  # as it is read: lists for tuples
        self.memory_budget = memory_budget
        for path, header in self.headers.items():
            if header.get("identity") != self._identity:
                with suppress(CorruptFileError):  # altered: a warning follows when it is resumed
                    storage.read(path)
                    _check_same(header.get("identity") or {}, self._identity)
        self._saved_at = time.monotonic()

    def paths(self, matrix: str) -> tuple[Path, Path]:
        """Return the file of a state, and the new one that is to take its place."""
        stem = f"{matrix}{self._ending}"
        return self._folder / f"{stem}.safetensors", self._folder / f"{stem}.new.safetensors"

    def is_due(self) -> bool:
        """Return whether it is time to save."""
        pause = max(self._seconds, self._cost / _MOST_OF_THE_TIME if self._seconds else 0.0)
        due = time.monotonic() - self._saved_at >= pause
        return bool(self.group.broadcast_object(due))

    def write(self, matrix: str, header: Mapping[str, Any], state: State) -> None:
        """Write a state, in all processes or in none; warn once where that fails."""
        began, (path, new), problem = time.monotonic(), self.paths(matrix), ""
        content = {
            **header,
            "file": path.name,  # its content under another name is refused
            "identity": self._identity,
            "memory_budget": self.memory_budget,
            "numbers": dict(state.numbers),
        }
        try:
            storage.write(new, content, state.tensors)
        except Exception as error:
            if not isinstance(error, StorageError | OSError) and not ran_out(error):
                raise
            problem = str(error).rstrip(".")
        problem = self._any(problem)
        if not problem:
            os.replace(new, path)
        new.unlink(missing_ok=True)
        if problem and not self._has_warned:
            self._has_warned = True
            warn(
                f"checkpoint: expected to save the state of the fit, got an error ({problem}); the "
                "fit continues and tries again later. What was saved before is still there.",
                CheckpointWarning,
            )
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - began

    def newest(self, matrix: str) -> tuple[Mapping[str, Any], State | None]:
        """Read the newest state that all processes have; warn where there is none that is whole."""
        files = [path for path in self.paths(matrix) if path.exists()]
        mine = {self.headers[path]["number"]: path for path in files if path in self.headers}
        everywhere = self.group.gather_objects(set(mine))
        common, problem = set.intersection(*everywhere), ""
        found: tuple[Mapping[str, Any], State | None] = {}, None
        if any(path not in self.headers for path in files):
            problem = "it cannot be read, or has the name of another"
        elif common:
            try:
                header, tensors = storage.read(mine[max(common)])
                found = header, State(header["numbers"], tensors)
            except (StorageError, KeyError) as error:
                problem = str(error).rstrip(".")
        elif set.union(*everywhere) - {1}:  # the first one may have been cut short
            problem = "the processes have states of different moments"
        problem = self._any(problem)
        if problem:
            warn(
                f"checkpoint: expected whole files, got one of the {matrix} that is not "
                f"({problem}). Starting from the beginning.",
                CheckpointWarning,
            )
            return {}, None
        return found

    def _any(self, problem: str) -> str:
        """Return what one of the processes reports; empty where none does."""
        return next(filter(None, self.group.gather_objects(problem)), "")


class MatrixCheckpoint:
    """The checkpoint of one matrix's eigenpairs (see `eigen.checkpoint.Checkpoint`)."""

    def __init__(self, session: Session, matrix: str) -> None:
        self._session, self._matrix = session, matrix
        self._header, self._state = session.newest(matrix)
        self._number = self._header.get("number", 0)

    def load(self) -> State | None:
        """Return the state of its solver, where it was under way."""
        state, self._state = self._state, None
        return state

    def is_due(self) -> bool:
        """Return whether it is time to save."""
        return self._session.is_due()

    def save(self, state: State, *, finished: bool = False) -> None:
        """Save the state of its solver."""
        self._number += 1
        header = {"finished": finished, "number": self._number}
        self._session.write(self._matrix, header, state)

    def finished(
        self, device: torch.device, growth: Growth | None
    ) -> tuple[EigenPairs, dict[str, Any]] | None:
        """Return its eigenpairs and their diagnostics, where they were found."""
        if self._state is None or not self._header.get("finished"):
            return None
        tensors, numbers, self._state = self._state.tensors, self._state.numbers, None
        with refuse_altered():
            if growth is not None:
                growth.look_back(tensors["growth"])
            parts = {name: tensors[name].to(device) for name in OF_PAIRS}
            pairs = EigenPairs(statistics=numbers["statistics"], **parts)
            return pairs, dict(numbers["diagnostics"])

    def finish(
        self, pairs: EigenPairs, diagnostics: Mapping[str, Any], growth: Growth | None
    ) -> None:
        """Save its eigenpairs in place of all states."""
        tensors = {name: getattr(pairs, name) for name in OF_PAIRS}
        if growth is not None:
            tensors["growth"] = growth.looked()
        numbers = {"statistics": dict(pairs.statistics), "diagnostics": dict(diagnostics)}
        self.save(State(numbers, tensors), finished=True)


def identity_of(record: Mapping[str, Any], problem: Problem, probe: int | None) -> dict[str, Any]:
    """Return what a checkpoint has to share with a fit: what changes more than last bits."""
    options = {k: v for k, v in record["options"].items() if k not in _MAY_CHANGE}
    return {
        "format": _FORMAT,
        **options,
        "probe": None if probe is None else f"{probe:016x}",
        "likelihood": told_apart(problem.likelihood),
        "dtype": record["dtype"],
        # None on a CPU, where it changes nothing.
        "deterministic": options["deterministic"] if problem.device.type == "cuda" else None,
        "examples": problem.num_examples,
        "data": record["data"]["fingerprint"],
        "weights": record["weights"],
        # With other code than before, the same weights may be another network.
        "mean_loss": problem.mean_loss,
    }


def _check_same(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse the identity of another fit, with the names of what differs."""
    different = []
    for name in dict.fromkeys([*here, *there]):
        was, now = there.get(name), here.get(name)
        if name == "mean_loss" and isinstance(was, float) and isinstance(now, float):
            same = math.isclose(was, now, rel_tol=_SAME_LOSS, abs_tol=1e-6)
        else:  # from one device to another costs last bits in any case
            same = was == now or (name == "deterministic" and None in (was, now))
        both = name in _DIGESTS and was and now
        if not same:
            different.append(f"other {name}" if both else f"{name} was {was!r} and is {now!r}")
    if different:
        more = f"; and {len(different) - _MOST_NAMED} more" if len(different) > _MOST_NAMED else ""
        raise CheckpointMismatchError(
            "checkpoint: expected one of this fit, got one of another: "
            f"{'; '.join(different[:_MOST_NAMED])}{more}. Give the options that fit was started "
            "with, or another folder."
        )
