"""Files that are written whole or not at all."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from deltabars.errors import StorageError
from deltabars.locking import NO_LOCK, claimed, release

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
