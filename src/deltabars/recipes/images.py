"""Readers of image files as they are downloaded: MNIST's idx files, CIFAR-10's binary batches."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import BadValueError, DataError
from deltabars.storage.reading import ALWAYS, MOST_TIMES, length_of, open_plain

_MNIST_FILES = {"train": "train", "test": "t10k"}  # MNIST's own names of its parts
_CIFAR10_FILES = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
_CIFAR10_SHAPE = (3, 32, 32)
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label and its pixels

Reader = Callable[[Path, str, int | None], tuple[Tensor, Tensor]]


def read_mnist(
    folder: Path, part: str = "train", count: int | None = None
) -> tuple[Tensor, Tensor]:
    """Read MNIST's scans (n, 1, 28, 28) with pixels in [0, 1], and their classes (n,).

    The folder holds the idx files as they are downloaded, plain or gzipped; the part is `"train"`
    or `"test"`. All, or the first `count`, are read.
    """
    _check_part(part)
    parts = []
    for name in ("images-idx3", "labels-idx1"):
        path = Path(folder) / f"{_MNIST_FILES[part]}-{name}-ubyte"
        zipped = path.with_name(f"{path.name}.gz")
        if not path.is_file() and not zipped.is_file():
            raise DataError(
                f"MNIST: expected {path.name} or {zipped.name} in the folder {folder}, got neither."
            )
        parts.append(read_idx(path if path.is_file() else zipped, count))
    images, labels = parts
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        got = f"{tuple(images.shape)} and {tuple(labels.shape)} in {folder}"
        raise DataError(f"MNIST: expected n images of two dimensions and n labels, got {got}.")
    _check_classes("MNIST", labels, folder)
    return images[:, None].float().div_(255), labels.long()


def read_cifar10(
    folder: Path, part: str = "train", count: int | None = None
) -> tuple[Tensor, Tensor]:
    """Read CIFAR-10's images (n, 3, 32, 32), as `read_mnist`, from its unpacked binary batches."""
    _check_part(part)
    batches = []
    for name in _CIFAR10_FILES[part]:
        with _opened(Path(folder) / name, "CIFAR-10", "a binary batch") as file:
            content = np.fromfile(file, dtype=np.uint8)
        if not len(content) or len(content) % _CIFAR10_RECORD:
            got = f"got {len(content)} bytes in {folder}/{name}, not a whole number of them"
            raise DataError(f"CIFAR-10: expected records of {_CIFAR10_RECORD} bytes, {got}.")
        batches.append(torch.from_numpy(content.reshape(-1, _CIFAR10_RECORD)))
        _check_classes("CIFAR-10", batches[-1][:, 0], Path(folder) / name)
    records = _first(torch.cat(batches), count, folder)  # (n, 3073)
    images = records[:, 1:].reshape(-1, *_CIFAR10_SHAPE).float()
    return images.div_(255), records[:, 0].long()


def read_idx(path: Path, count: int | None = None) -> Tensor:
    """Read all or the first items (n, …) of an idx file of bytes, plain or gzipped, as uint8."""
    with _opened(path, "idx file", "one") as raw:
        length = length_of(raw)
        is_zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        most = max(ALWAYS, MOST_TIMES * length) if is_zipped else length
        with gzip.open(raw) if is_zipped else nullcontext(raw) as file:
            return _first(_items(file, path, most), count, path)


def _items(file: Any, path: Path, most: int) -> Tensor:
    """Read the items of a file of no more than so many bytes."""
    head = file.read(4)
    if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
        got = f"got {head.hex(' ') or 'an empty file'} in {path}"
        raise DataError(f"idx file: expected to begin with 00 00 08 and the dimensions, {got}.")
    lengths = file.read(4 * head[3])
    if len(lengths) < 4 * head[3]:
        raise DataError(f"idx file: expected {head[3]} dimensions, got {path} cut short.")
    shape = np.frombuffer(lengths, dtype=">u4").tolist()
    size = math.prod(shape)
    if size > most:
        fewer = f"fewer (or unpacks to more than {MOST_TIMES} times its length: use gunzip)"
        raise DataError(f"idx file: expected {size} bytes after the header, {path} has {fewer}.")
    items = np.empty(size, dtype=np.uint8)
    got = file.readinto(items)
    rest = file.read(1)
    if got < size or rest:
        much = f"got {'more' if rest else got} in {path}"
        raise DataError(f"idx file: expected {size} bytes after the header, {much}.")
    return torch.from_numpy(items.reshape(shape))


@contextmanager
def _opened(path: Path, what: str, one: str) -> Iterator[Any]:
    """Open a file; name it in every failure to read it."""
    try:
        with open_plain(path) as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{what}: expected {one} at {path}, got nothing there.") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{what}: expected a whole gzip file, got {path} cut short.") from error
    except OSError as error:
        raise DataError(f"{what}: expected one that can be read, got {path}: {error}.") from error


def _first(items: Tensor, count: int | None, path: Path) -> Tensor:
    if count is not None and not 1 <= count <= len(items):
        raise DataError(f"Images: expected {count} items or more, got {len(items)} in {path}.")
    return items[:count]


def _check_part(part: str) -> None:
    if part not in _MNIST_FILES:
        raise BadValueError(f"part: expected one of {tuple(_MNIST_FILES)}, got {part!r}.")


def _check_classes(name: str, labels: Tensor, path: Path) -> None:
    if bool((labels > 9).any()):
        raise DataError(f"{name}: expected classes from 0 to 9, got {int(labels.max())} in {path}.")
