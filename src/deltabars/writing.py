"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deltabars.errors import StorageError


def write_whole(
    path: Path, writer: Callable[[Path], object], *, draft_prefix: str = "draft-"
) -> None:
    """Write a file whole or not at all: to a draft beside it, which then takes its place.

    Args:
        path: the file.
        writer: writes to the path that it is given, which ends as `path` does.
        draft_prefix: how the draft's name begins.

    Raises:
        StorageError: the file cannot be written.
    """
    if "\0" in str(path):
        raise StorageError(f"Cannot write {str(path)!r}: no file can have a zero byte in its name.")
    # Of a name that no other process or thread has, and that nobody can have put a link at.
    draft = path.with_name(f"{draft_prefix}{secrets.token_hex(8)}-{path.name[-50:]}")
    try:
        draft.touch(exist_ok=False)
        writer(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut may leave the new name with nothing behind it
        os.replace(draft, path)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, draft_prefix: str = "draft-") -> None:
    """Write a text file whole or not at all."""
    write_whole(
        path,
        lambda draft: draft.write_text(text + "\n", encoding="utf-8"),
        draft_prefix=draft_prefix,
    )


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
