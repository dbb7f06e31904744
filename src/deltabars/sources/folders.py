"""A folder of pictures as a Dataset that reads them when they are asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from deltabars.errors import DataError, DataWarning, printable
from deltabars.sources.pictures import ENDINGS, Preparation
from deltabars.sources.source import Source, fingerprint_of

_BATCH_BYTES = 1 << 26
_LARGEST_BATCH = 1024


@dataclass(frozen=True, eq=False)
class Pictures(Dataset[Any]):
    """Pictures of one size: items are tensors, or pairs of a tensor and a class number."""

    files: Sequence[Path]
    labels: Tensor | None
    preparation: Preparation
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Any:
        """One picture, read from its file."""
        path = self.files[number]
        image = self.preparation.tensor(self.preparation.read(path))
        if tuple(image.shape) != self.shape:
            raise DataError(
                f"--data: expected pictures of one size, got {_size(self.shape)} first and "
                f"{_size(tuple(image.shape))} in {path}. Resize them with --size."
            )
        return image if self.labels is None else (image, self.labels[number])


def read_folder(folder: Path, preparation: Preparation) -> Source:
    """Pictures in sub-folders, which are the classes in sorted order, or in the folder itself.

    Sub-folders of a class count as parts of it. Links to files and classes that are links are
    followed; links to folders below are not. Hidden files are left out, and so are, with a
    warning that counts them, files that are no pictures by their names.

    Raises:
        DataError: there are no pictures, some are beside sub-folders, or the first is broken.
    """
    entries = _visible(folder)
    folders = sorted(entry.name for entry in entries if _is_folder(entry))
    classes = tuple(_printable(Path(name)) for name in folders)
    left_out: list[str] = []
    loose = _pictures([entry for entry in entries if not _is_folder(entry)], left_out)
    files: list[Path] = loose
    labels: Tensor | None = None
    if classes:
        if loose:
            raise DataError(
                f"--data: expected pictures in sub-folders (the classes) of {folder}, or beside "
                f"one another and no sub-folders, got both: {loose[0].name} beside {classes[0]}/."
            )
        inside = [sorted(_inside(folder / name, left_out)) for name in folders]
        files = [path for paths in inside for path in paths]
        counts = [len(paths) for paths in inside]
        labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor(counts))
        empty = [name for name, count in zip(classes, counts, strict=True) if not count]
        if files and empty:
            _warn(f"--data: {len(empty)} of {len(classes)} classes have no picture: {empty[0]}/.")
    if not files:
        raise DataError(
            f"--data: expected pictures ({', '.join(ENDINGS)}) in {folder} or in its sub-folders, "
            "got none."
        )
    if left_out:
        _warn(f"--data: {len(left_out)} files in {folder} were left out, such as {left_out[0]}.")
    shape = tuple(preparation.tensor(preparation.read(files[0])).shape)
    dataset = Pictures(files, labels, preparation, shape)
    numbers = 4 * shape[0] * shape[1] * shape[2]
    size = max(1, min(_LARGEST_BATCH, _BATCH_BYTES // numbers))

    def relabelled(numbers: Tensor) -> Source:
        assert labels is not None
        other = replace(dataset, labels=numbers[labels])
        loader = DataLoader(other, batch_size=size)
        return replace(source, data=loader, dataset=other, targets=other.labels)

    source = Source(
        data=DataLoader(dataset, batch_size=size),
        dataset=dataset,
        classes=classes or None,
        names=tuple(_printable(path.relative_to(folder)) for path in files),
        targets=labels,
        picture=lambda number: preparation.read(files[number]),
        fingerprint=_fingerprint(folder, files, preparation),
        relabel=relabelled,
    )
    return source


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"--data: expected a folder that can be read, got {folder}: {error.strerror}."
        ) from error
    return sorted(found, key=lambda entry: entry.name)


def _inside(folder: Path, left_out: list[str]) -> list[Path]:
    """The pictures in a class's folder and in the folders in it."""
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        entries = _visible(waiting.pop())
        found += _pictures([entry for entry in entries if not _is_folder(entry)], left_out)
        for entry in entries:
            if not _is_folder(entry):
                continue
            if entry.is_symlink():
                left_out.append(f"{_printable(Path(entry.path))} (a link to a folder)")
            else:
                waiting.append(Path(entry.path))
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _pictures(entries: list[os.DirEntry[str]], left_out: list[str]) -> list[Path]:
    found = []
    for entry in entries:
        if _is_file(entry) and entry.name.lower().endswith(ENDINGS):
            found.append(Path(entry.path))
        else:
            left_out.append(_printable(Path(entry.path)))
    return found


def _fingerprint(folder: Path, files: Sequence[Path], preparation: Preparation) -> str:
    """Of names, lengths and times of the files, which are not read for it."""
    try:
        states = [(path, path.stat()) for path in files]
    except OSError as error:
        raise DataError(
            f"--data: expected files that stay in {folder} while they are read, got "
            f"{error.strerror} of {error.filename}."
        ) from error
    return fingerprint_of(
        repr(preparation),
        *(
            os.fsencode(path.relative_to(folder)) + f":{s.st_size}:{s.st_mtime_ns}".encode()
            for path, s in states
        ),
    )


def _printable(path: Path) -> str:
    """A name that can be shown and written as UTF-8, whatever bytes are in it."""
    text = os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")
    return printable(text)


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}×{shape[2]}"


def _warn(message: str) -> None:
    warnings.warn(message, DataWarning, stacklevel=3)
