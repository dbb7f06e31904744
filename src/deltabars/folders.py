"""Folders, written whole or not at all, by one process or by all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

from deltabars.errors import StorageError
from deltabars.locking import turn
from deltabars.ranks import Ranks
from deltabars.writing import drafts_of, take_place


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
    with ranks.together(), ExitStack() as stack:
        try:
            drafts = stack.enter_context(drafts_of(folder)) if ranks.is_first else None
            draft = ranks.agreed(drafts) / folder.name
            if ranks.is_first:
                draft.mkdir()
            ranks.agreed(None)  # it is there
            writer(draft)
            ranks.gather(None)  # all parts of it are
            if ranks.is_first and replace:
                # After those who are adding to what is there.
                with turn(folder) if folder.is_dir() else nullcontext():
                    take_place(draft, folder)
            elif ranks.is_first:
                os.replace(draft, folder)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in its name
            reason = error.strerror if isinstance(error, OSError) else None
            raise StorageError(f"Cannot write {folder}: {reason or error}.") from error
        except StorageError as error:
            raise StorageError(str(error).replace(str(draft), str(folder))) from error
        ranks.agreed(None)  # the folder is in its place
