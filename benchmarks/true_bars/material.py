"""The data of the subjects: training, test, validation and foreign inputs."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deltabars.errors import DataError
from deltabars.recipes.digits import load_digits

IMAGES = 20_000  # N, of all but the paper's network
HELD_OUT = 1_000  # test, validation and foreign inputs, at most
_TEST_SCANS = 250  # of 500; the others are for validation
_TEST_PATIENTS, _VALIDATION_PATIENTS = 88, 22  # of 442
_SIDE = 32  # of CIFAR-10's images


@dataclass(frozen=True, eq=False)
class Material:
    """What a subject is trained, tested and validated on; on the CPU.

    Validation examples are neither trained nor tested on. Foreign inputs belong to none of the
    classes, or lie far from the training inputs.
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    validation_inputs: Tensor
    validation_targets: Tensor
    foreign_inputs: Tensor

    def __len__(self) -> int:
        """N, the number of training examples."""
        return len(self.train_inputs)


def digits(folder: Path) -> Material:
    """scikit-learn's scans of digits; foreign ones are turned by 90°. The folder is not read."""
    scans = load_digits()
    held, labels = scans.test_images, scans.test_labels
    return Material(
        scans.train_images, scans.train_labels,
        held[:_TEST_SCANS], labels[:_TEST_SCANS],
        held[_TEST_SCANS:], labels[_TEST_SCANS:],
        turned(held[:_TEST_SCANS]),
    )  # fmt: skip


def mnist(folder: Path, count: int | None = None) -> Material:
    """MNIST's first `count` images, or all; foreign ones are of clothes where the folder has any.

    Otherwise foreign images are test images turned by 90°.
    """
    return _greys(folder, "mnist", "fashion", count)


def fashion(folder: Path) -> Material:
    """Fashion-MNIST's first 20,000 images; foreign ones are MNIST's."""
    return _greys(folder, "fashion", "mnist", IMAGES)


def cifar10(folder: Path) -> Material:
    """CIFAR-10's first 20,000 images, every channel with mean 0 and variance 1 over them.

    Foreign ones are Fashion-MNIST's in CIFAR-10's size, or else test images turned by 90°.
    """
    arrays = _arrays(folder, "cifar10")
    train, test, validation = (
        _pixels(_tiles(arrays[f"{part}_images"], len(arrays[f"{part}_labels"])))
        for part in ("train", "test", "validation")
    )
    mean, std = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    foreign = turned(test)
    if (folder / "fashion.npz").is_file():
        grey = _pixels(_arrays(folder, "fashion")["test_images"])
        foreign = functional.interpolate(grey, (_SIDE, _SIDE), mode="bilinear").expand(
            -1, 3, -1, -1
        )
    inputs = [(part - mean) / std for part in (train, test, validation, foreign)]
    return Material(
        inputs[0], _classes(arrays, "train"),
        inputs[1], _classes(arrays, "test"),
        inputs[2], _classes(arrays, "validation"),
        inputs[3],
    )  # fmt: skip


def diabetes(folder: Path) -> Material:
    """scikit-learn's table of patients, standardised; foreign ones are three times as far out.

    The folder is not read.
    """
    from sklearn.datasets import load_diabetes

    table = load_diabetes()
    inputs = torch.from_numpy(table.data).float()
    targets = torch.from_numpy(table.target).float()[:, None]
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    counts = [
        _TEST_PATIENTS,
        _VALIDATION_PATIENTS,
        len(order) - _TEST_PATIENTS - _VALIDATION_PATIENTS,
    ]
    test, validation, train = order.split(counts)
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    targets = (targets - targets[train].mean(0)) / targets[train].std(0)
    return Material(
        inputs[train], targets[train],
        inputs[test], targets[test],
        inputs[validation], targets[validation],
        3 * inputs[test],
    )  # fmt: skip


def r8(folder: Path) -> Material:
    """Reuters R8 as token ids (n, 128), 0 for padding; foreign ones are of 20 Newsgroups."""
    arrays = _arrays(folder, "r8")
    generator = torch.Generator().manual_seed(0)
    tokens = {
        part: torch.from_numpy(arrays[f"{part}_tokens"].astype(np.int64))
        for part in ("train", "test", "foreign")
    }
    order = torch.randperm(len(tokens["test"]), generator=generator)
    test, validation, _ = order.split([HELD_OUT, HELD_OUT, len(order) - 2 * HELD_OUT])
    foreign = torch.randperm(len(tokens["foreign"]), generator=generator)[:HELD_OUT]
    labels = _classes(arrays, "test")
    return Material(
        tokens["train"], _classes(arrays, "train"),
        tokens["test"][test], labels[test],
        tokens["test"][validation], labels[validation],
        tokens["foreign"][foreign],
    )  # fmt: skip


def frequent(folder: Path, words: int) -> Material:
    """R8 in its most frequent words alone; others are left out of the texts."""
    texts = r8(folder)
    parts = {
        name: torch.where(getattr(texts, name) > words, 0, getattr(texts, name))
        for name in ("train_inputs", "test_inputs", "validation_inputs", "foreign_inputs")
    }
    return replace(texts, **parts)


def few(load: Callable[[Path], Material], count: int, folder: Path) -> Material:
    """Load other data, with the first `count` training examples alone."""
    found = load(folder)
    inputs, targets = found.train_inputs[:count], found.train_targets[:count]
    return replace(found, train_inputs=inputs, train_targets=targets)


def turned(images: Tensor) -> Tensor:
    """Turn images (n, channels, side, side) by 90°."""
    return images.rot90(1, (2, 3)).contiguous()


def _greys(folder: Path, name: str, other: str, count: int | None) -> Material:
    arrays = _arrays(folder, name)
    test = _pixels(arrays["test_images"])
    has_other = (folder / f"{other}.npz").is_file()
    return Material(
        _pixels(arrays["train_images"][:count]), _classes(arrays, "train")[:count],
        test, _classes(arrays, "test"),
        _pixels(arrays["validation_images"]), _classes(arrays, "validation"),
        _pixels(_arrays(folder, other)["test_images"]) if has_other else turned(test),
    )  # fmt: skip


def _arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    path = Path(folder) / f"{name}.npz"
    if not path.is_file():
        raise DataError(
            f"Subjects: expected {path.name} in {folder}, got nothing there. "
            "`python -m benchmarks.true_bars.prepare` makes it."
        )
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def _tiles(content: np.ndarray, count: int) -> np.ndarray:
    """Return the images (count, 3, side, side) of a picture of tiles, a JPEG's bytes."""
    try:
        from PIL import Image

        picture = np.asarray(Image.open(io.BytesIO(content.tobytes())))
    except ImportError:
        from torchvision.io import decode_jpeg

        picture = decode_jpeg(torch.from_numpy(content)).permute(1, 2, 0).numpy()
    rows, across = picture.shape[0] // _SIDE, picture.shape[1] // _SIDE
    grid = picture.reshape(rows, _SIDE, across, _SIDE, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid.reshape(-1, 3, _SIDE, _SIDE)[:count])


def _pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).float().div_(255)


def _classes(arrays: dict[str, np.ndarray], part: str) -> Tensor:
    return torch.from_numpy(arrays[f"{part}_labels"]).long()
