"""Handwritten digits: scikit-learn's 1,797 scans of 8×8 pixels, and a small network for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from deltabars.errors import MissingDependencyError
from deltabars.integrations.convergence import train_to_convergence as train_to_convergence

L2 = 0.01
_TRAINING_SHARE = 1297  # of 1,797 scans; the other 500 are for testing


@dataclass(frozen=True)
class Digits:
    """Training and test scans (n, 1, 8, 8) with pixels in [0, 1], and their classes (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int = 0) -> Digits:
    """Return the scans that come with scikit-learn, split by a permutation of that seed."""
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError as error:
        raise MissingDependencyError(
            "The digits come with scikit-learn: pip install 'deltabars[demo]'."
        ) from error
    scans = bundled()
    images = torch.from_numpy(scans.images).float()[:, None] / 16
    labels = torch.from_numpy(scans.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    first, rest = order[:_TRAINING_SHARE], order[_TRAINING_SHARE:]
    return Digits(images[first], labels[first], images[rest], labels[rest])


def digits_network(seed: int = 0) -> nn.Module:
    """Make two convolutions, a pooling and a dense layer: smooth, so that training converges."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 16, 3), nn.Tanh(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


def trained_digits(
    seed: int = 0, steps: int = 100
) -> tuple[Digits, nn.Module, tuple[Tensor, Tensor]]:
    """Return the digits, a network of theirs, trained once a process, and its training data."""
    digits, model = load_digits(seed), digits_network(seed)
    model.load_state_dict(_trained(seed, steps))
    return digits, model.eval(), (digits.train_images, digits.train_labels)


@cache
def _trained(seed: int, steps: int) -> dict[str, Tensor]:
    digits, model = load_digits(seed), digits_network(seed)
    train_to_convergence(model, digits.train_images, digits.train_labels, L2, steps=steps)
    return model.state_dict()
