"""The paper's two experiments: their data and sizes, their network, and its weights in files."""

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
class Size:
    """What a reproduction computes."""

    name: str  # "paper" or "small"
    train_images: int  # the first ones of the files
    test_images: int
    sigma: float  # of the initial weights
    schedule: tuple[tuple[int, float], ...]  # the learning rate from a step on: (step, rate)
    steps: int  # of training
    rank: int  # K
    initialisations: int  # networks in the spread of the spectra, the main one included
    hessians: int  # of how many of them the spectrum of H is computed as well
    hessian_rank: int | None  # how many eigenvalues of it, of all but the main network; or `rank`
    bootstrap: int  # replicates with fixed and as many with varying initial weights
    samples: int  # networks drawn by the sampler

    @property
    def ranks(self) -> list[int]:
        """Return the K of figures over K: fifteen steps and two small ones; five if K < 150."""
        count = 15 if self.rank >= 150 else 5
        steps = {-(-self.rank * step // count) for step in range(1, count + 1)} | {25, 50}
        return sorted(rank for rank in steps if rank <= self.rank)


@dataclass(frozen=True)
class Recipe:
    """One of the paper's experiments (its section on classifiers, parameters and training)."""

    name: str  # of the data, on the command line
    title: str  # of the data, in print
    read: Reader  # of `"train"` or `"test"` from a folder
    channels: int  # of the images
    side: int
    class_names: tuple[str, ...]
    size: Size  # what the paper computes, but four of its sixteen Hessians


# From initial weights with σ = 1 the cost is still in the hundreds after 1,500 steps. With smaller
# ones a few hundred steps suffice.
SMALL = Size(
    name="small", train_images=600, test_images=200,
    sigma=0.06, schedule=((0, 3e-3), (200, 3e-4), (270, 3e-5)), steps=300, rank=20,
    initialisations=2, hessians=2, hessian_rank=None, bootstrap=2, samples=20,
)  # fmt: skip
MNIST = Recipe(
    name="mnist", title="MNIST", read=read_mnist, channels=1, side=28,
    class_names=tuple("0123456789"),
    size=Size(
        name="paper", train_images=60_000, test_images=10_000,
        sigma=1.0, schedule=((0, 1e-3), (60_000, 1e-4), (70_000, 1e-5), (80_000, 1e-6)),
        steps=90_000, rank=1_500,
        initialisations=16, hessians=4, hessian_rank=None, bootstrap=16, samples=100,
    ),
)  # fmt: skip
CIFAR10 = Recipe(
    name="cifar10", title="CIFAR-10", read=read_cifar10, channels=3, side=32,
    class_names=(
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    ),
    size=Size(
        name="paper", train_images=50_000, test_images=10_000,
        sigma=1.0,
        schedule=((0, 1e-3), (55_000, 1e-4), (85_000, 1e-5), (95_000, 1e-6), (105_000, 1e-7)),
        steps=115_000, rank=2_500,
        initialisations=1, hessians=1, hessian_rank=None, bootstrap=0, samples=100,
    ),
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
        last = ((side - 2) // 2 - 2) // 2 - 2  # of the third convolution's output
        self.fc1 = nn.Linear(64 * last**2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, 10) of images (B, channels, side, side)."""
        x = functional.max_pool2d(self.conv1(images).relu(), 2)
        x = functional.max_pool2d(self.conv2(x).relu(), 2)
        x = self.conv3(x).relu().flatten(1)
        return cast(Tensor, self.fc2(self.fc1(x).relu()))


def blank_network(recipe: Recipe) -> PaperNetwork:
    """Return the network with arbitrary weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):  # torch initialises it: keep the caller's numbers
        return PaperNetwork(recipe.channels, recipe.side).eval()


def paper_network(seed: int = 0, recipe: Recipe = MNIST) -> PaperNetwork:
    """Return the network before training: weights from N(0, 1), drawn on the CPU; biases zero."""
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
    """Return the network with the weights of an .npz file: an array for each parameter, by name.

    Scalars in the file, such as the seconds of a training, are ignored.
    """
    arrays = read_arrays(path, "Weights", ModelError)
    arrays = {name: value for name, value in arrays.items() if value.ndim}
    blank = blank_network(recipe).state_dict()
    expected = {(name, tuple(value.shape), True) for name, value in blank.items()}
    found = {(name, value.shape, _is_real(value.dtype)) for name, value in arrays.items()}
    if expected != found:
        raise ModelError(
            f"Weights: expected real arrays with the names and shapes of the paper's network, got "
            f"others in {path} (of {min(expected ^ found)[0]!r}, for one)."
        )
    return with_weights(recipe, arrays)


def _is_real(dtype: np.dtype) -> bool:
    return dtype.kind == "f" and dtype.itemsize <= 8 and bool(dtype.isnative)


def with_weights(recipe: Recipe, arrays: Mapping[str, np.ndarray]) -> PaperNetwork:
    """Return the network with the given weights, in eval mode."""
    network = blank_network(recipe)
    network.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
    return network
