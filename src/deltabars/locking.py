"""One process at a time in a folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltabars.errors import CheckpointInUseError, StorageError

_FILE = "deltabars.lock"
_PATIENCE = 10.0  # seconds: workers of a killed process live on for five
_PAUSE = 0.1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which the system takes back when the process ends, however it does.

    Raises:
        CheckpointInUseError: another process, or another thread of this one, holds it.
        StorageError: the folder cannot be written to.
    """
    try:
        handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    except OSError as error:
        raise StorageError(
            f"checkpoint: expected a folder that can be written to, got {folder} "
            f"({error.strerror or error})."
        ) from error
    try:
        _take(handle, folder)
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    if sys.platform == "win32":  # where files in use cannot be replaced anyway
        return
    import fcntl

    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            owner = _owner(handle)
            if (owner is None or _is_alive(owner)) or time.monotonic() > until:
                who = f"process {owner}" if owner is not None else "another process"
                raise CheckpointInUseError(
                    f"checkpoint: expected a folder that no other fit uses, got {folder}, which "
                    f"{who} is using. Wait for it to end, or give another folder."
                ) from error
        time.sleep(_PAUSE)


def _owner(handle: int) -> int | None:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
