"""Folders, written whole or not at all, by one process or by all ranks together."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deltabars.errors import StorageError
from deltabars.ranks import Ranks


def write_whole_folder(
    path: Path, writer: Callable[[Path], object], ranks: Ranks, *, replace: bool
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
    own = ranks.agreed(secrets.token_hex(8))  # of this call alone
    draft, former = (
        folder.with_name(f".{folder.name[-50:]}.{own}.{kind}") for kind in ("draft", "former")
    )
    with ranks.together():
        try:
            if ranks.is_first:
                draft.mkdir()
            ranks.agreed(None)  # it is there
            writer(draft)
            ranks.gather(None)  # all parts of it are
            if ranks.is_first:
                if replace and os.path.lexists(folder):
                    os.replace(folder, former)
                os.replace(draft, folder)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in its name
            reason = error.strerror if isinstance(error, OSError) else None
            raise StorageError(f"Cannot write {folder}: {reason or error}.") from error
        except StorageError as error:
            raise StorageError(str(error).replace(str(draft), str(folder))) from error
        finally:
            if ranks.is_first:
                if os.path.lexists(former) and not os.path.lexists(folder):
                    os.replace(former, folder)
                shutil.rmtree(draft, ignore_errors=True)
                _remove(former)
        ranks.agreed(None)  # the folder is in its place


def _remove(path: Path) -> None:
    with suppress(OSError, ValueError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
