"""What is measured: the paper's network at trained weights, and images for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.plain import Data
from benchmarks.sizes import Size
from benchmarks.sources import Sources
from deltabars.errors import BadValueError, DataError
from deltabars.recipes.digits import load_digits
from deltabars.recipes.images import read_mnist
from deltabars.recipes.paper import L2, PaperNetwork, load_weights

_MARGIN = 4  # pixels around 20×20 ones, as MNIST has it
_FARTHEST = 3  # pixels that a copy is moved by, within the margin
_TRAINING_BATCH = 64


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network and its images, on the device.

    Attributes:
        images, labels: of training, (N, 1, 28, 28) and (N,).
        test_images, test_labels: unseen ones.
        accuracy: the share of training images that are classified rightly.
        source: where images and weights come from, in words.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    accuracy: float
    source: str

    def train(self, count: int) -> Data:
        """Return the first training examples.

        Raises:
            DataError: there are fewer.
        """
        return _first(self.images, self.labels, count)

    def test(self, count: int) -> Data:
        """The first test examples.

        Raises:
            DataError: there are fewer.
        """
        return _first(self.test_images, self.test_labels, count)


def make_subject(size: Size, sources: Sources) -> Subject:
    """Return the network and images: from the named files, or self-made and briefly trained.

    Raises:
        BadValueError: weights without the images they were trained on.
    """
    device = torch.device(size.device)
    if sources.weights is not None and sources.mnist is None:
        raise BadValueError(
            "--weights: expected together with --mnist, the images they were trained on, got it "
            "alone."
        )
    if sources.mnist is not None:
        images, labels = read_mnist(sources.mnist, "train", size.train_images)
        test_images, test_labels = read_mnist(sources.mnist, "test", size.test_images)
        source = "MNIST"
    else:
        images, labels, test_images, test_labels = upscaled_digits(
            size.train_images, size.test_images
        )
        source = "scikit-learn's digits, enlarged and shifted"
    images, labels = images.to(device), labels.to(device)
    test_images, test_labels = test_images.to(device), test_labels.to(device)
    if sources.weights is not None:
        model = load_weights(sources.weights).to(device)
        source += ", reference weights"
    else:
        model = fresh_network().to(device)
        train_briefly(model, (images, labels), size.training_steps)
        source += f", {size.training_steps} steps of Adam"
    accuracy = _accuracy(model, images, labels)
    return Subject(model, images, labels, test_images, test_labels, accuracy, source)


def upscaled_digits(train: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (n, 1, 28, 28) and classes, and those of a test, of scikit-learn's digits.

    The 8×8 scans are enlarged to 20×20 within a margin; copies shifted by up to three pixels each
    way make as many as are asked for, the unshifted ones first.
    """
    digits = load_digits()
    labels = digits.train_labels.repeat(_copies(train, digits.train_labels))[:train]
    test_labels = digits.test_labels.repeat(_copies(test, digits.test_labels))[:test]
    return (
        _shifted(digits.train_images, train), labels,
        _shifted(digits.test_images, test), test_labels,
    )  # fmt: skip


def wide_network(width: int, seed: int = 0) -> nn.Module:
    """Return a dense network of one hidden layer: P = 795·width + 10."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.Tanh(), nn.Linear(width, 10)
        )  # fmt: skip


def fresh_network() -> PaperNetwork:
    """With torch's own initialisation: the paper's takes far more steps to come down from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PaperNetwork()


def train_briefly(model: nn.Module, data: Data, steps: int, seed: int = 0) -> None:
    """Take some steps of Adam, ever smaller ones: enough for the spectrum of a trained network."""
    images, labels = data
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=L2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        places = torch.randint(len(labels), (_TRAINING_BATCH,), generator=generator)
        places = places.to(labels.device)
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(images[places]), labels[places])
        loss.backward()
        optimiser.step()
        schedule.step()
    optimiser.zero_grad()
    model.eval()


def _first(images: Tensor, labels: Tensor, count: int) -> Data:
    if count > len(labels):
        raise DataError(f"Images: expected {count} or more, got {len(labels)}.")
    return images[:count], labels[:count]


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        right = [
            (model(some).argmax(1) == truth).double()
            for some, truth in zip(images.split(1024), labels.split(1024), strict=True)
        ]
    return float(torch.cat(right).mean())


def _shifted(scans: Tensor, count: int) -> Tensor:
    large = functional.interpolate(scans, size=(20, 20), mode="bilinear", align_corners=False)
    large = functional.pad(large, [_MARGIN] * 4)
    steps = range(-_FARTHEST, _FARTHEST + 1)
    shifts = sorted(product(steps, steps), key=lambda step: (step[0] ** 2 + step[1] ** 2, step))
    needed = shifts[: _copies(count, scans)]
    if len(needed) * len(scans) < count:
        raise DataError(
            f"Images: expected up to {len(needed) * len(scans)} of the digits, got {count}. Name "
            "a folder with MNIST for more."
        )
    return torch.cat([large.roll(step, dims=(2, 3)) for step in needed])[:count]


def _copies(count: int, scans: Tensor) -> int:
    return -(-count // len(scans))
