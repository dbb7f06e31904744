"""Files and folders that are written whole or not at all, and folders that one process uses.

A file is written to a draft beside it, which then takes its place. Drafts and folders are locked
with `flock`, which the system releases when a process ends, however it ends. So drafts that killed
processes have left can be recognised, and the next writer removes them.
"""

from __future__ import annotations

import os
import secrets
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

T = TypeVar("T")

_DRAFT = ".deltabars-"
_NEW = 60.0  # seconds: the owner of a younger draft may not have locked it yet
_READINGS, _NAP = 50, 0.01  # of a folder that is being replaced, and seconds between them
_READINGS_OF_NOTHING = 3
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_HELD: set[int] = set()


def _close_all() -> None:
    """Close locks in a forked process: they belong to open files, which it would share and keep."""
    while _HELD:
        os.close(_HELD.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags, 0o666)
    _HELD.add(handle)
    try:
        yield handle
    finally:
        if handle in _HELD:  # not so in a process that was forked meanwhile
            _HELD.remove(handle)
            os.close(handle)


def _lock(handle: int, *, wait: bool = False) -> bool:
    """Lock an open file; return whether it is ours, or the system has no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:  # some network disks have none
        return not isinstance(error, BlockingIOError)
    return True


@contextmanager
def locked(
    folder: Path,
    file: str = "deltabars.lock",
    what: str = "checkpoint",
    user: str = "fit",
    error: type[StorageError] = CheckpointInUseError,
) -> Iterator[None]:
    """Hold the lock `file` of a folder that one process, and one thread of it, may use at a time.

    `what` the folder is, what `user` it has, and the kind of `error` are for messages.
    """
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(_opened(folder / file, os.O_RDWR | os.O_CREAT | _NO_LINK))
        except OSError as failure:
            raise StorageError(
                f"{what}: expected a folder that can be written to, got {folder} "
                f"({failure.strerror or failure})."
            ) from failure
        if not _lock(handle):
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


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process changes a folder: for changes that take a moment."""
    with nullcontext(-1) if fcntl is None else _opened(folder, os.O_RDONLY) as handle:
        _lock(handle, wait=True)
        yield


def is_draft(name: str) -> bool:
    """Return whether a file or folder of this name is a draft."""
    return name.startswith(_DRAFT)


def remove_left(folder: Path) -> None:
    """Remove the drafts that killed processes have left in a folder."""
    with suppress(OSError):
        drafts = [folder / name for name in os.listdir(folder) if is_draft(name)]
        for path in drafts if fcntl is not None else ():
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime < _NEW:
                    continue
                with _opened(path, os.O_RDONLY | _NO_LINK) as handle:
                    if _lock(handle):
                        _remove_draft(path)


def _draft_of(path: Path) -> Path:
    return path.with_name(f"{_DRAFT}{secrets.token_hex(4)}-{path.name}")


def _remove_draft(draft: Path) -> None:
    """Remove a draft; what it had already replaced, half way through, goes back."""
    if not draft.is_dir():
        draft.unlink(missing_ok=True)
        return
    former = draft / "former"
    path = draft.with_name(draft.name[len(_DRAFT) + 9 :])
    if former.is_dir() and not os.path.lexists(path):
        os.replace(former, path)
    shutil.rmtree(draft, ignore_errors=True)


def write_whole(path: Path, writer: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: to a draft beside it, which then takes its place.

    The `writer` writes to the path that it is given, whose name ends as that of `path`.
    """
    if "\0" in str(path):
        raise StorageError(f"Cannot write {str(path)!r}: no file can have a zero byte in its name.")
    draft = _draft_of(path)
    try:
        with _opened(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL) as handle:
            try:
                _lock(handle)
                remove_left(path.parent)
                mode = os.fstat(handle).st_mode  # by the umask, which not all libraries heed
                writer(draft)
                os.chmod(draft, mode)
                with draft.open("rb") as file:
                    os.fsync(file.fileno())  # else a power cut may leave an empty file of the name
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}.") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(path, lambda draft: draft.write_text(text + "\n", encoding="utf-8"))


def write_whole_folder(
    path: Path, writer: Callable[[Path], object], group: Group, *, replace: bool
) -> None:
    """Write a folder whole or not at all: beside its place, which it then takes.

    All processes of the group call this; the `writer` writes into the new folder that it is given,
    on a disk that all of them see. `replace` allows to replace an existing folder.
    """
    folder = draft = path.absolute()
    try:
        with ExitStack() as stack:
            if group.is_first:
                draft = _draft_of(folder)
                draft.mkdir()
                stack.enter_context(turn(draft))
                stack.callback(_remove_draft, draft)
                remove_left(folder.parent)
                (draft / folder.name).mkdir()
            draft = group.broadcast_object(draft) / folder.name
            writer(draft)
            group.gather_objects(None)  # all parts of it are there
            if group.is_first:
                # After processes that are adding to what is there.
                with turn(folder) if folder.is_dir() else nullcontext():
                    if replace and os.path.lexists(folder):
                        os.replace(folder, draft.parent / "former")
                    os.replace(draft, folder)
            group.broadcast_object(None)  # the folder is in its place
    except (OSError, ValueError) as error:  # ValueError: a zero byte in its name
        reason = error.strerror if isinstance(error, OSError) else None
        raise StorageError(f"Cannot write {folder}: {reason or error}.") from error
    except StorageError as error:
        raise StorageError(str(error).replace(str(draft), str(folder))) from error


def read_settled(path: Path, read: Callable[[], T]) -> T:
    """Return what `read` gives of a folder; read again where it is replaced meanwhile."""
    for left in range(_READINGS, -1, -1):
        before = _stamp(path)
        # Between the removal of the old folder and the new one there is none.
        waiting = before is None and left > _READINGS - _READINGS_OF_NOTHING
        try:
            found = read()
            if not left or _stamp(path) == before:
                return found
        except StorageError:
            if not left or (_stamp(path) == before and not waiting):
                raise
        time.sleep(_NAP)
    raise AssertionError("the last reading returns or raises")


def _stamp(path: Path) -> object:
    with suppress(OSError, ValueError):
        found = path.stat()
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def check_can_write(path: Path, option: str) -> None:
    """Refuse at once, by a StorageError, a file that could not be written at the end."""
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
