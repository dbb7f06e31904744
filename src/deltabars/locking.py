"""One process at a time in a folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltabars.errors import CheckpointInUseError, StorageError

_PATIENCE = 10.0  # seconds: workers of a killed process live on for five
_PAUSE = 0.1


@contextmanager
def locked(
    folder: Path,
    file: str = "deltabars.lock",
    what: str = "checkpoint",
    user: str = "fit",
    error: type[StorageError] = CheckpointInUseError,
) -> Iterator[None]:
    """Hold a folder's lock, which the system takes back when the process ends, however it does.

    Args:
        folder: that one process at a time may use.
        file: the lock's name in it.
        what, user, error: for messages: what the folder is, what uses it, and of which kind.

    Raises:
        CheckpointInUseError, or `error`: another process, or another thread of this one, holds it.
        StorageError: the folder cannot be written to.
    """
    try:
        handle = os.open(folder / file, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    except OSError as failure:
        raise StorageError(
            f"{what}: expected a folder that can be written to, got {folder} "
            f"({failure.strerror or failure})."
        ) from failure
    try:
        owner = _take(handle)
        if owner is not None:
            raise error(
                f"{what}: expected a folder that no other {user} uses, got {folder}, which "
                f"{owner} is using. Wait for it to end, or give another folder."
            )
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is at a folder: for changes that take a moment.

    Where the system has no locks of folders (Windows, some disks of a network), nobody waits.
    """
    handle = os.open(folder, os.O_RDONLY) if sys.platform != "win32" else None
    try:
        if handle is not None and sys.platform != "win32":
            import fcntl

            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _take(handle: int) -> str | None:
    """Take the lock; who has it, if it cannot be had."""
    if sys.platform == "win32":  # where files in use cannot be replaced anyway
        return None
    import fcntl

    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except OSError:
            owner = _owner(handle)
            if (owner is None or _is_alive(owner)) or time.monotonic() > until:
                return "another process" if owner is None else f"process {owner}"
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
