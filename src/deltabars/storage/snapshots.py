"""States on disk: numbered files, each of which refers to files of rows.

DIR/state-00000012.safetensors    all that is small, and which files hold the rows
DIR/rows-00000007.safetensors     rows that do not change, written once

A state counts only when it and all its rows are whole. The last two are kept; the files of rows
that neither refers to are removed.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from deltabars.eigen.resuming import Rows
from deltabars.errors import (
    CheckpointMismatchError,
    CheckpointWarning,
    CorruptFileError,
    FormatVersionError,
    StorageError,
)
from deltabars.storage import format as storage
from deltabars.storage.writing import remove_left

_NAME = re.compile(r"(state|rows)-(\d{8,16})\.safetensors")
_DRAFT = re.compile(rf"draft-[0-9a-f]+-{_NAME.pattern}")
_LARGEST = 256 << 20  # bytes of a file of rows: what is held while it is read


@dataclass(frozen=True)
class Snapshot:
    """A state as it was read: the header, the small tensors, and rows that are read when used."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    rows: Mapping[str, Rows]


class _File(NamedTuple):
    """A file of rows: its name, how many there are, and a mark that no other file has."""

    name: str
    length: int
    mark: str


@dataclass(frozen=True)
class _Listed:
    """Files of rows, in their order."""

    epoch: str
    files: tuple[_File, ...] = ()

    @property
    def count(self) -> int:
        return sum(file.length for file in self.files)

    def plus(self, file: _File) -> _Listed:
        return _Listed(self.epoch, (*self.files, file))


class Snapshots:
    """The states in a folder that no other process uses.

    Attributes:
        written: bytes that were written so far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listed: dict[str, _Listed] = {}  # by key: rows that are on disk
        self._states: dict[str, set[str]] = {}  # those to be kept: their files of rows
        self._number = max((number for _, number, _ in self._files()), default=0)
        self.written = 0
        remove_left(folder)
        for path in folder.iterdir():  # of versions up to 0.5
            if _DRAFT.fullmatch(path.name):
                _remove(path)

    def headers(self) -> Iterator[Mapping[str, Any]]:
        """The headers of the states, newest first, as far as they can be read. Nothing else is."""
        for path in self._newest_first():
            with suppress(StorageError):
                yield storage.read_header(path)

    def newest(self, check: Callable[[Mapping[str, Any]], None]) -> Snapshot | None:
        """The newest state that is whole, with a warning where one is not; None without any.

        Args:
            check: refuses the header of a state that is not to be used.

        Raises:
            FormatVersionError: a state was written by a newer version; and what `check` raises.
        """
        problems: list[str] = []
        found: Snapshot | None = None
        for path in self._newest_first():
            try:
                found = self._read(path, check)
                break
            except (CheckpointMismatchError, FormatVersionError):
                raise
            except StorageError as error:
                problems.append(str(error).rstrip("."))
        if problems:
            instead = "the state before" if found is not None else "the beginning"
            warnings.warn(
                f"checkpoint: expected whole files, got one that is not ({problems[0]}). Going on "
                f"from {instead}.",
                CheckpointWarning,
                stacklevel=5,
            )
        return found

    def write(
        self,
        header: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        rows: Mapping[str, Rows],
        last: bool = False,
    ) -> None:
        """Write a state; of its rows, those that are not on disk yet.

        Args:
            last: keep no state before it, unless all its rows are those of this one.

        Raises:
            StorageError: it cannot be written; the states before stay as they are.
        """
        self._listed = {key: part for key, part in self._listed.items() if key in rows}
        for key, part in rows.items():
            self._append(key, part)
        listed = dict(self._listed)
        content = {
            **header,
            "rows": {key: [part.epoch, *part.files] for key, part in listed.items()},
        }
        name = self._write("state", content, tensors)
        files = {file.name for part in listed.values() for file in part.files}
        before = dict(list(self._states.items())[-1:])
        if last:
            before = {kept: its for kept, its in before.items() if its <= files}
        self._states = {**before, name: files}
        self._remove_others()

    def known(self, key: str, epoch: str) -> int:
        """How many rows of a key and an epoch are on disk."""
        listed = self._listed.get(key)
        return 0 if listed is None or listed.epoch != epoch else listed.count

    def _append(self, key: str, rows: Rows) -> None:
        listed = self._listed.get(key)
        if listed is None or listed.epoch != rows.epoch:
            listed = self._listed[key] = _Listed(rows.epoch)
        for pieces in _gathered(rows.blocks, listed.count - rows.start):
            count = sum(len(piece) for piece in pieces)
            parts = {f"{place:06d}": piece for place, piece in enumerate(pieces)}
            mark = uuid.uuid4().hex
            name = self._write("rows", {"mark": mark, "count": count}, parts)
            listed = self._listed[key] = listed.plus(_File(name, count, mark))

    def _write(self, kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        self._number += 1
        name = f"{kind}-{self._number:08d}.safetensors"
        storage.write(self._folder / name, header, tensors)
        self.written += (self._folder / name).stat().st_size
        return name

    def _read(self, path: Path, check: Callable[[Mapping[str, Any]], None]) -> Snapshot:
        header, tensors = storage.read(path)
        check(header)
        try:
            listed = {
                str(key): _Listed(
                    str(epoch),
                    tuple(_File(str(name), int(n), str(mark)) for name, n, mark in files),
                )
                for key, (epoch, *files) in header["rows"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFileError(f"{path} is altered: its header lacks {error}.") from error
        for part in listed.values():
            for file in part.files:  # all of them, before any is used
                _read_rows(self._folder, file)
        self._listed = listed
        self._states = {path.name: {file.name for part in listed.values() for file in part.files}}
        rows = {
            key: Rows(part.epoch, _Stored(self._folder, part.files)) for key, part in listed.items()
        }
        return Snapshot(header, tensors, rows)

    def _files(self) -> Iterator[tuple[str, int, Path]]:
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None:
                yield match[1], int(match[2]), path

    def _newest_first(self) -> list[Path]:
        states = [(number, path) for kind, number, path in self._files() if kind == "state"]
        return [path for _, path in sorted(states, reverse=True)]

    def _remove_others(self) -> None:
        wanted = {*self._states, *(file for files in self._states.values() for file in files)}
        # States before rows, so that none is ever left without its own.
        for _, _, path in sorted(self._files(), key=lambda file: file[0] != "state"):
            if path.name not in wanted:
                _remove(path)


@dataclass(frozen=True)
class _Stored:
    """Rows on disk, one file in memory at a time."""

    folder: Path
    files: tuple[_File, ...]

    def __iter__(self) -> Iterator[Tensor]:
        for file in self.files:
            yield from _read_rows(self.folder, file)


def _read_rows(folder: Path, file: _File) -> list[Tensor]:
    match = _NAME.fullmatch(file.name)
    if match is None or match[1] != "rows":
        raise CorruptFileError(
            f"{folder} is altered: {file.name!r} is not the name of a file of rows."
        )
    path = folder / file.name
    header, tensors = storage.read(path)
    rows = [tensors[place] for place in sorted(tensors)]
    whole = all(part.ndim == 2 for part in rows) and file.length == sum(map(len, rows))
    if header.get("mark") != file.mark or not whole:
        raise CorruptFileError(f"{path} is altered: it holds rows of another state.")
    return rows


def _gathered(blocks: Iterable[Tensor], skip: int) -> Iterator[list[Tensor]]:
    """The rows after the first `skip`, in groups that a file may hold."""
    group: list[Tensor] = []
    size = 0
    for block in blocks:
        new, skip = block[skip:], max(0, skip - len(block))
        if not len(new):
            continue
        together = max(1, _LARGEST // max(1, new[0].nbytes))
        for part in new.split(together):
            if group and size + part.nbytes > _LARGEST:
                yield group
                group, size = [], 0
            group, size = [*group, part], size + part.nbytes
    if group:
        yield group


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
