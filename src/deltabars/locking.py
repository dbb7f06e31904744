"""One process at a time in a folder.

The system takes a lock back when its process ends, however it does. A lock belongs to an open file,
which the processes that are forked meanwhile would share, and keep: so they close it at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deltabars.errors import CheckpointInUseError, StorageError

if sys.platform == "win32":  # where files in use cannot be replaced anyway
    fcntl: Any = None
else:
    import fcntl


@contextmanager
def locked(
    folder: Path,
    file: str = "deltabars.lock",
    what: str = "checkpoint",
    user: str = "fit",
    error: type[StorageError] = CheckpointInUseError,
) -> Iterator[None]:
    """Hold a folder's lock.

    Args:
        folder: that one process at a time may use.
        file: the lock's name in it.
        what, user, error: for messages: what the folder is, what uses it, and of which kind.

    Raises:
        CheckpointInUseError, or `error`: another process, or another thread of this one, holds it.
        StorageError: the folder cannot be written to.
    """
    try:
        handle = _opened(folder / file, os.O_RDWR | os.O_CREAT | _NO_LINK)
    except OSError as failure:
        raise StorageError(
            f"{what}: expected a folder that can be written to, got {folder} "
            f"({failure.strerror or failure})."
        ) from failure
    try:
        if not _taken(handle):
            text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            owner = f"process {text}" if text.isdecimal() else "another process"
            raise error(
                f"{what}: expected a folder that no other {user} uses, got {folder}, which "
                f"{owner} is using. Wait for it to end, or give another folder."
            )
        with suppress(OSError):  # on a full disk the holder's name is missing
            os.truncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        release(handle)


def claimed(folder: Path) -> int | None:
    """The lock of a folder itself, to be released; None where another writer has it.

    Where the system has no such locks it is `NO_LOCK`: nobody can know whether one has it.
    """
    if fcntl is None:
        return NO_LOCK
    try:
        handle = _opened(folder, os.O_RDONLY | _FOLDER | _NO_LINK)
    except OSError as error:
        is_other = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        return None if is_other else NO_LOCK
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), folder.stat()):
            return handle
        found = None
    except (BlockingIOError, FileNotFoundError):  # it may have been removed by whoever had it
        found = None
    except OSError:
        found = NO_LOCK
    release(handle)
    return found


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is at a folder: for changes that take a moment.

    Where the system has no locks of folders (Windows, some disks of a network), nobody waits.
    """
    if fcntl is None:
        yield
        return
    handle = _opened(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        release(handle)


def release(handle: int | None) -> None:
    """Give a lock back."""
    if handle is not None and handle in _HELD:  # not so in a process that was forked meanwhile
        _HELD.remove(handle)
        os.close(handle)


def _opened(path: Path, how: int) -> int:
    handle = os.open(path, how, 0o666)
    _HELD.add(handle)
    return handle


def _taken(handle: int) -> bool:
    """Whether the lock of an open file could be had; so it is where the system has none."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _close_all() -> None:
    for handle in _HELD:
        os.close(handle)
    _HELD.clear()


NO_LOCK = -1
_HELD: set[int] = set()
_NO_LINK, _FOLDER = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_DIRECTORY", 0)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
