"""One process at a time in a folder.

The system takes a lock back when its process ends, however it does. A lock belongs to an open file,
which the processes that are forked meanwhile would share, and keep: so they close it at once.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from deltabars.errors import CheckpointInUseError, StorageError
from deltabars.runtime.distributed import Group

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


T = TypeVar("T")

_READINGS, _NAP = 50, 0.01  # of a folder that is being replaced, and seconds between them
_FORMER = "former"
_DRAFTS = re.compile(r"\..*\.deltabars-\d+")


@contextmanager
def drafts_of(path: Path) -> Iterator[Path]:
    """A hidden folder beside a path, for what is to take its place; afterwards it is removed.

    It is locked. So those of other writers who are at work can be told from those that killed ones
    have left, which are removed.
    """
    folders = (path.with_name(_draft_name(path, number)) for number in itertools.count())
    for folder in folders:
        is_new = True
        try:
            folder.mkdir()
        except FileExistsError:
            is_new = False
        lock = claimed(folder)
        if lock is not None and (is_new or lock != NO_LOCK):
            break
    _clear(folder, path)
    try:
        for other in itertools.takewhile(os.path.lexists, folders):
            _remove_left(other, path)
        yield folder
    finally:
        _clear(folder, path)
        with suppress(OSError):
            folder.rmdir()
        release(lock)


def remove_left(folder: Path) -> None:
    """Remove what killed writers have left in a folder, whatever the file was that they wrote."""
    for path in folder.iterdir():
        if is_draft(path.name):
            _remove_left(path, None)


def is_draft(name: str) -> bool:
    """Whether a folder of drafts has such a name."""
    return _DRAFTS.fullmatch(name) is not None


def take_place(draft: Path, path: Path) -> None:
    """Put a folder from `drafts_of` a path where another one may be, which is removed."""
    former = draft.parent / _FORMER / path.name
    if os.path.lexists(path):
        former.parent.mkdir()
        os.replace(path, former)
    os.replace(draft, path)


def read_settled(path: Path, read: Callable[[], T]) -> T:
    """What `read` gives of a folder; once more where another process has replaced it meanwhile."""
    for left in reversed(range(_READINGS)):
        before = _stamp(path)
        try:
            found = read()
        except StorageError:
            away = before is None and os.path.lexists(path.with_name(_draft_name(path, 0)))
            if not left or (_stamp(path) == before and not away):
                raise
        else:
            if not left or _stamp(path) == before:
                return found
        time.sleep(_NAP)
    raise AssertionError("the last reading returns or raises")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _draft_name(path: Path, number: int) -> str:
    return f".{path.name[-50:]}.deltabars-{number}"


def _remove_left(folder: Path, path: Path | None) -> None:
    lock = claimed(folder)
    if lock is not None and lock != NO_LOCK:
        _clear(folder, path)
        with suppress(OSError):
            folder.rmdir()
        release(lock)


def _clear(folder: Path, path: Path | None) -> None:
    """Empty a folder of drafts; what was in the place of a path, which is not there, goes back."""
    if path is not None and not os.path.lexists(path):
        with suppress(OSError):
            os.replace(folder / _FORMER / path.name, path)
    with suppress(OSError):
        for left in folder.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def write_whole(path: Path, writer: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: to a draft beside it, which then takes its place.

    Args:
        path: the file.
        writer: writes to the path that it is given, which ends as `path` does.

    Raises:
        StorageError: the file cannot be written.
    """
    if "\0" in str(path):
        raise StorageError(f"Cannot write {str(path)!r}: no file can have a zero byte in its name.")
    try:
        with drafts_of(path) as folder:
            draft = folder / path.name
            draft.touch(exist_ok=False)
            mode = draft.stat().st_mode  # as the umask has it, which not all libraries heed
            writer(draft)
            os.chmod(draft, mode)
            with draft.open("rb") as file:
                # Or a power cut may leave the new name with nothing behind it.
                os.fsync(file.fileno())
            os.replace(draft, path)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}.") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(path, lambda draft: draft.write_text(text + "\n", encoding="utf-8"))


def check_can_write(path: Path, option: str) -> None:
    """Refuse at once what could not be written at the end.

    Raises:
        StorageError: the folder does not exist or cannot be written to, or the path is a folder.
    """
    if path.is_dir():
        raise StorageError(f"{option}: expected the name of a file, got the folder {path}.")
    check_parent(path, option)


def check_parent(path: Path, option: str) -> None:
    """Refuse a path in a folder that does not exist or that cannot be written to."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise StorageError(f"{option}: expected a folder that exists, got {folder}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{option}: expected a folder that can be written to, got {folder}.")


def write_whole_folder(
    path: Path, writer: Callable[[Path], object], group: Group, *, replace: bool
) -> None:
    """Write a folder whole or not at all: beside its place, which it then takes from what is there.

    Args:
        path: the folder, in one that all ranks see.
        writer: writes into the new folder that it is given; called by all ranks.
        ranks: who writes.
        replace: whether what is there may be replaced.

    Raises:
        StorageError: it cannot be written.
    """
    folder = path.absolute()
    with group.together(), ExitStack() as stack:
        try:
            drafts = stack.enter_context(drafts_of(folder)) if group.is_first else None
            draft = group.agreed(drafts) / folder.name
            if group.is_first:
                draft.mkdir()
            group.agreed(None)  # it is there
            writer(draft)
            group.gather(None)  # all parts of it are
            if group.is_first and replace:
                # After those who are adding to what is there.
                with turn(folder) if folder.is_dir() else nullcontext():
                    take_place(draft, folder)
            elif group.is_first:
                os.replace(draft, folder)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in its name
            reason = error.strerror if isinstance(error, OSError) else None
            raise StorageError(f"Cannot write {folder}: {reason or error}.") from error
        except StorageError as error:
            raise StorageError(str(error).replace(str(draft), str(folder))) from error
        group.agreed(None)  # the folder is in its place
