"""Checkpoints of a fit: a folder in which it is kept, so that one that was stopped can go on."""

from __future__ import annotations

import errno
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltabars.errors import BadValueError, CheckpointWarning, StorageError
from deltabars.locking import locked
from deltabars.ranks import Ranks
from deltabars.sessions import Session
from deltabars.snapshots import Snapshots
from deltabars.writing import check_parent

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
def opened(checkpoint: Checkpoint | None, ranks: Ranks) -> Iterator[Session | None]:
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
        if ranks.is_first:
            try:
                snapshots = _snapshots(Path(given.path), stack)
            except StorageError as error:
                if getattr(error.__cause__, "errno", None) not in _NO_ROOM:
                    raise
                problem = str(error).rstrip(".")
        problem = ranks.agreed(problem)
        if problem is None:
            yield Session(snapshots, given.seconds, ranks)
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
