"""Checkpoints of a fit: a folder in which it is kept, so that one that was stopped can go on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltabars.errors import BadValueError, StorageError
from deltabars.locking import locked
from deltabars.ranks import Ranks
from deltabars.sessions import Session
from deltabars.snapshots import Snapshots
from deltabars.writing import check_parent

_SECONDS = 60.0


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
    if not ranks.is_first:
        yield Session(None, given.seconds, ranks)
        return
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
        yield Session(Snapshots(folder), given.seconds, ranks)
