"""Readers of image files as they are downloaded: MNIST's idx files, CIFAR-10's binary batches."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import BadValueError, DataError
from deltabars.storage.reading import check_unpacked, length_of, open_plain

PARTS = ("train", "test")
_MNIST_FILES = {"train": "train", "test": "t10k"}  # MNIST's own names of its parts
_CIFAR10_FILES = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
_GZIP = b"\x1f\x8b"
_BYTES = 8  # the code of unsigned bytes in an idx header
_CIFAR10_SHAPE = (3, 32, 32)
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label and its pixels

Reader = Callable[[Path, str, int | None], tuple[Tensor, Tensor]]


def read_mnist(
    folder: Path, part: str = "train", count: int | None = None
) -> tuple[Tensor, Tensor]:
    """MNIST's scans (n, 1, 28, 28) with pixels in [0, 1], and their classes (n,).

    Args:
        folder: holds the idx files as they are downloaded, plain or gzipped.
        part: `"train"` (60,000 scans) or `"test"` (10,000).
        count: how many, from the first on; all by default.

    Raises:
        DataError: a file is missing, truncated, or not what its name says.
    """
    _check_part(part)
    name = _MNIST_FILES[part]
    images = read_idx(_find(folder, f"{name}-images-idx3-ubyte"), count)
    labels = read_idx(_find(folder, f"{name}-labels-idx1-ubyte"), count)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"MNIST: expected n images of two dimensions and n labels, got shapes "
            f"{tuple(images.shape)} and {tuple(labels.shape)} in {folder}."
        )
    if bool((labels > 9).any()):
        raise DataError(
            f"MNIST: expected classes from 0 to 9, got {int(labels.max())} in {folder}."
        )
    return images[:, None].float().div_(255), labels.long()


def read_cifar10(
    folder: Path, part: str = "train", count: int | None = None
) -> tuple[Tensor, Tensor]:
    """CIFAR-10's images (n, 3, 32, 32) with pixels in [0, 1], and their classes (n,).

    Args:
        folder: holds the binary batches as they are unpacked: data_batch_1.bin … test_batch.bin.
        part: `"train"` (50,000 images) or `"test"` (10,000).
        count: how many, from the first on; all by default.

    Raises:
        DataError: a file is missing, is not a whole number of records, or holds other classes.
    """
    _check_part(part)
    batches = [_records(Path(folder) / name) for name in _CIFAR10_FILES[part]]
    records = torch.cat(batches)  # (n, 3073), uint8
    if count is not None and not 1 <= count <= len(records):
        raise DataError(
            f"CIFAR-10: expected {count} images or more, got {len(records)} in {folder}."
        )
    records = records[:count]
    images = records[:, 1:].reshape(-1, *_CIFAR10_SHAPE).float()
    return images.div_(255), records[:, 0].long()


def _records(path: Path) -> Tensor:
    try:
        with open_plain(path) as file:
            content = np.fromfile(file, dtype=np.uint8)
    except FileNotFoundError as error:
        raise DataError(
            f"CIFAR-10: expected a binary batch at {path}, got nothing there."
        ) from error
    except OSError as error:
        raise DataError(
            f"CIFAR-10: expected a file that can be read, got {path}: {error}."
        ) from error
    if not len(content) or len(content) % _CIFAR10_RECORD:
        raise DataError(
            f"CIFAR-10: expected records of {_CIFAR10_RECORD} bytes (a label and 32×32×3 pixels), "
            f"got {len(content)} bytes in {path}, which is no whole number of them."
        )
    records = torch.from_numpy(content.reshape(-1, _CIFAR10_RECORD))
    if int(records[:, 0].max()) > 9:
        raise DataError(
            f"CIFAR-10: expected classes from 0 to 9, got {int(records[:, 0].max())} in {path}."
        )
    return records


def _check_part(part: str) -> None:
    if part not in PARTS:
        raise BadValueError(f"part: expected one of {PARTS}, got {part!r}.")


def read_idx(path: Path, count: int | None = None) -> Tensor:
    """The items of an idx file of bytes, plain or gzipped: (n, …), uint8.

    Args:
        path: the file; whether it is gzipped is seen from its content.
        count: how many items, from the first on; all by default.

    Raises:
        DataError: the file is missing, truncated, too long, or not an idx file of bytes.
    """
    try:
        with open_plain(path) as raw:
            packed = length_of(raw)
            zipped = raw.read(2) == _GZIP
            raw.seek(0)
            if not zipped:
                return _items(raw, path, count, packed)
            with gzip.open(raw) as file:
                return _items(cast(BinaryIO, file), path, count, None, packed)
    except FileNotFoundError as error:
        raise DataError(f"idx file: expected one at {path}, got nothing there.") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"idx file: expected a whole gzip file, got {path} cut short.") from error
    except OSError as error:
        raise DataError(f"idx file: expected one that can be read, got {path}: {error}.") from error


def _items(
    file: BinaryIO, path: Path, count: int | None, length: int | None, packed: int = 0
) -> Tensor:
    """The items, of a file of that length, or of one that comes out of as many packed bytes."""
    head = file.read(4)
    if len(head) < 4 or head[:3] != bytes([0, 0, _BYTES]) or not 1 <= head[3] <= 4:
        raise DataError(
            f"idx file: expected the magic number of an idx file of bytes (00 00 08 and the "
            f"dimensions), got {head.hex(' ') or 'an empty file'} in {path}."
        )
    lengths = file.read(4 * head[3])
    if len(lengths) < 4 * head[3]:
        raise DataError(f"idx file: expected {head[3]} dimensions, got {path} cut short.")
    shape = [int(length) for length in np.frombuffer(lengths, dtype=">u4")]
    if count is not None:
        if not 1 <= count <= shape[0]:
            raise DataError(f"idx file: expected {count} items or more, got {shape[0]} in {path}.")
        shape[0] = count
    size = math.prod(shape)
    if length is None:
        try:
            check_unpacked(size, packed)
        except ValueError as error:
            raise DataError(
                f"idx file: expected one that can be unpacked in memory, got {path}: {error}. "
                "Unpack it with gunzip."
            ) from error
    there = size if length is None else length - len(head) - len(lengths)
    items = np.empty(min(size, there), dtype=np.uint8)
    got = file.readinto(items)  # type: ignore[attr-defined]
    rest = file.read(1) if count is None else b""
    if got < size or rest:
        raise DataError(
            f"idx file: expected {size} bytes after the header, got {'more' if rest else got} in "
            f"{path}."
        )
    return torch.from_numpy(items.reshape(shape))


def _find(folder: Path, name: str) -> Path:
    for path in (Path(folder) / name, Path(folder) / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"MNIST: expected {name} or {name}.gz in the folder {folder}, got neither.")
