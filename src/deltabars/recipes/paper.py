"""The paper's MNIST network, its reference weights, and MNIST's files."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from deltabars.errors import BadValueError, DataError, ModelError

L2 = 0.01
PARTS = ("train", "t10k")  # MNIST's own names of its training and test files
_GZIP = b"\x1f\x8b"
_BYTES = 8  # the code of unsigned bytes in an idx header


class PaperNetwork(nn.Module):
    """Three convolutions, two poolings, two dense layers, for scans of 28×28: P = 93,322."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.fc1 = nn.Linear(576, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits (B, 10) of scans (B, 1, 28, 28)."""
        x = functional.max_pool2d(self.conv1(images).relu(), 2)
        x = functional.max_pool2d(self.conv2(x).relu(), 2)
        x = self.conv3(x).relu().flatten(1)
        return cast(Tensor, self.fc2(self.fc1(x).relu()))


def paper_network(seed: int = 0) -> PaperNetwork:
    """The network before training, with random weights of that seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PaperNetwork()


def load_weights(path: Path) -> PaperNetwork:
    """The network with the weights of an .npz file, one array a parameter by its name.

    Raises:
        ModelError: the file is missing, is not such a file, or holds other arrays.
    """
    network = PaperNetwork()
    arrays = read_arrays(path, "Weights", ModelError)
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    found = {name: value.shape for name, value in arrays.items()}
    if expected != found:
        other = sorted(set(expected.items()) ^ set(found.items()))
        raise ModelError(
            f"Weights: expected arrays with the names and shapes of the paper's network, got "
            f"others in {path} (of {other[0][0]!r}, for one)."
        )
    network.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
    return network.eval()


def read_arrays(
    path: Path, what: str, kind: type[BadValueError] = DataError
) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; a missing or broken file is an error of that kind."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return {name: arrays[name] for name in arrays}
    except FileNotFoundError as error:
        raise kind(f"{what}: expected an .npz file, got {path}, which does not exist.") from error
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise kind(
            f"{what}: expected an .npz file, got {path}, which is truncated or is none."
        ) from error


def read_mnist(
    folder: Path, part: str = "train", count: int | None = None
) -> tuple[Tensor, Tensor]:
    """MNIST's scans (n, 1, 28, 28) with pixels in [0, 1], and their classes (n,).

    Args:
        folder: holds the idx files as they are downloaded, plain or gzipped.
        part: `"train"` (60,000 scans) or `"t10k"` (10,000).
        count: how many, from the first on; all by default.

    Raises:
        DataError: a file is missing, truncated, or not what its name says.
    """
    if part not in PARTS:
        raise BadValueError(f"part: expected one of {PARTS}, got {part!r}.")
    images = read_idx(_find(folder, f"{part}-images-idx3-ubyte"), count)
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"), count)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"MNIST: expected n images of two dimensions and n labels, got shapes "
            f"{tuple(images.shape)} and {tuple(labels.shape)} in {folder}."
        )
    return images[:, None].float() / 255, labels.long()


def read_idx(path: Path, count: int | None = None) -> Tensor:
    """The items of an idx file of bytes, plain or gzipped: (n, …), uint8.

    Args:
        path: the file; whether it is gzipped is seen from its content.
        count: how many items, from the first on; all by default.

    Raises:
        DataError: the file is missing, truncated, too long, or not an idx file of bytes.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP
            raw.seek(0)
            if not zipped:
                return _items(raw, path, count)
            with gzip.open(raw) as file:
                return _items(cast(BinaryIO, file), path, count)
    except FileNotFoundError as error:
        raise DataError(f"idx file: expected one at {path}, got nothing there.") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"idx file: expected a whole gzip file, got {path} cut short.") from error
    except OSError as error:
        raise DataError(f"idx file: expected one that can be read, got {path}: {error}.") from error


def _items(file: BinaryIO, path: Path, count: int | None) -> Tensor:
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
    size = int(np.prod(shape))
    items = file.read(size)
    rest = file.read(1) if count is None else b""
    if len(items) < size or rest:
        raise DataError(
            f"idx file: expected {size} bytes after the header, got "
            f"{'more' if rest else len(items)} in {path}."
        )
    return torch.from_numpy(np.frombuffer(items, dtype=np.uint8).reshape(shape).copy())


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"MNIST: expected {name} or {name}.gz in the folder {folder}, got neither.")
