"""The paper's two networks, how they are trained, and their weights in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from deltabars.errors import ModelError
from deltabars.recipes.images import Reader, read_cifar10, read_mnist
from deltabars.storage.reading import read_arrays

L2 = 0.01
BATCH = 100


@dataclass(frozen=True)
class Recipe:
    """One of the paper's experiments (its section on classifiers, parameters and training).

    Attributes:
        name: of the data, as the command line has it.
        title: the same in print.
        read: reads `"train"` or `"test"` from a folder.
        channels, side: of the images.
        train_images, test_images: how many there are of them.
        class_names: what the classes are called.
        schedule: the learning rate from a step on: (step, rate) pairs.
        steps: after which training stops.
        rank: K of the paper.
    """

    name: str
    title: str
    read: Reader
    channels: int
    side: int
    train_images: int
    test_images: int
    class_names: tuple[str, ...]
    schedule: tuple[tuple[int, float], ...]
    steps: int
    rank: int


MNIST = Recipe(
    name="mnist",
    title="MNIST",
    read=read_mnist,
    channels=1,
    side=28,
    train_images=60_000,
    test_images=10_000,
    class_names=tuple("0123456789"),
    schedule=((0, 1e-3), (60_000, 1e-4), (70_000, 1e-5), (80_000, 1e-6)),
    steps=90_000,
    rank=1_500,
)
CIFAR10 = Recipe(
    name="cifar10",
    title="CIFAR-10",
    read=read_cifar10,
    channels=3,
    side=32,
    train_images=50_000,
    test_images=10_000,
    class_names=(
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ),
    schedule=((0, 1e-3), (55_000, 1e-4), (85_000, 1e-5), (95_000, 1e-6), (105_000, 1e-7)),
    steps=115_000,
    rank=2_500,
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in (MNIST, CIFAR10)}


class PaperNetwork(nn.Module):
    """Three convolutions, two poolings, two dense layers.

    P = 93,322 for scans of 28×28 (MNIST), 122,570 for colour images of 32×32 (CIFAR-10).
    """

    def __init__(self, channels: int = 1, side: int = 28) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.fc1 = nn.Linear(64 * last_side(side) ** 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The logits (B, 10) of images (B, channels, side, side)."""
        x = functional.max_pool2d(self.conv1(images).relu(), 2)
        x = functional.max_pool2d(self.conv2(x).relu(), 2)
        x = self.conv3(x).relu().flatten(1)
        return cast(Tensor, self.fc2(self.fc1(x).relu()))


def last_side(side: int) -> int:
    """The side of the last convolution's output: two poolings, three 3×3 without padding."""
    return ((side - 2) // 2 - 2) // 2 - 2


def blank_network(recipe: Recipe) -> PaperNetwork:
    """The network with weights that nobody has chosen, ready to predict."""
    with torch.random.fork_rng(devices=[]):  # torch draws some; the caller's numbers stay
        return PaperNetwork(recipe.channels, recipe.side).eval()


def paper_network(seed: int = 0, recipe: Recipe = MNIST) -> PaperNetwork:
    """The network before training: weights from N(0, 1), biases zero.

    They are drawn on the CPU, so that a seed means the same weights on every device.
    """
    network = blank_network(recipe).train()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(generator=generator)
    return network


def load_weights(path: Path, recipe: Recipe = MNIST) -> PaperNetwork:
    """The network with the weights of an .npz file, one array a parameter by its name.

    Single numbers in the file, such as the seconds that a training took, are left out.

    Raises:
        ModelError: the file is missing, is not such a file, or holds other arrays.
    """
    found_there = read_arrays(path, "Weights", ModelError)
    arrays = {name: value for name, value in found_there.items() if value.ndim}
    blank = blank_network(recipe).state_dict()
    expected = {name: tuple(value.shape) for name, value in blank.items()}
    found = {name: value.shape for name, value in arrays.items()}
    if expected != found:
        other = sorted(set(expected.items()) ^ set(found.items()))
        raise ModelError(
            f"Weights: expected arrays with the names and shapes of the paper's network, got "
            f"others in {path} (of {other[0][0]!r}, for one)."
        )
    for name, value in arrays.items():
        if value.dtype.kind != "f" or value.dtype.itemsize > 8 or not value.dtype.isnative:
            raise ModelError(
                f"Weights: expected real numbers of up to 64 bits, got {value.dtype} for {name!r} "
                f"in {path}."
            )
    return with_weights(recipe, arrays)


def with_weights(recipe: Recipe, arrays: Mapping[str, np.ndarray]) -> PaperNetwork:
    """The network with the given weights, ready to predict."""
    network = blank_network(recipe)
    network.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
    return network
