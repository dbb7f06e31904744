"""Small networks of every kind, untrained, in float64, for what must hold at any point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.networks import Case, make_targets
from tests.oracles import Oracle

L2 = 0.1
COUNT = 7  # examples: in chunks of three the last one is ragged


class Wired(nn.Module):
    """Some layers, and a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module):
        super().__init__()
        self.wiring = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.wiring(self, *args, **kwargs)


@dataclass(frozen=True)
class Architecture:
    """A network, the shape of one input, and the number of tokens where inputs are such."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        if self.tokens:
            return torch.randint(0, self.tokens, (count, *self.shape), generator=generator)
        return torch.randn(count, *self.shape, generator=generator, dtype=torch.float64)


def sample_of(architecture: Architecture, likelihood="categorical", names=None) -> Case:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = architecture.build().double()
    inputs = architecture.inputs(COUNT, generator)
    with torch.no_grad():
        model.train()(inputs)  # gives batch-norm its running statistics
    targets = make_targets(likelihood, COUNT, generator)
    oracle = Oracle(model.eval(), inputs, targets, L2, names, likelihood)
    return Case(model, inputs, targets, L2, inputs, oracle)


@cache
def cached_sample(kind: str, likelihood: str = "categorical") -> Case:
    return sample_of(ARCHITECTURES[kind], likelihood)


@cache
def cached_hessian(kind: str, likelihood: str = "categorical") -> Tensor:
    return cached_sample(kind, likelihood).oracle.hessian()


def mlp(activation: nn.Module) -> Architecture:
    layers = [nn.Linear(4, 5), activation, nn.Linear(5, 4), activation, nn.Linear(4, 3)]
    return Architecture(lambda: nn.Sequential(*layers), (4,))


def pooled(*layers: nn.Module, features: int, size=(6, 7)) -> Architecture:
    """A convolution, the given layers, and a head."""
    return Architecture(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), *layers, nn.Flatten(), nn.Linear(features, 3)),
        (1, *size),
    )


def convolved(features: int, *args, size=(6, 5), **options) -> Architecture:
    """Two convolutions of two channels, the second as given, each with an activation; a head."""
    return Architecture(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 2, *args, **options), nn.Tanh(),
            nn.Flatten(), nn.Linear(features, 3),
        ),
        (1, *size),
    )  # fmt: skip


def _residual(self: nn.Module, x: Tensor) -> Tensor:
    x = self.stem(x).relu()
    x = x + self.second(self.first(x).relu())
    return self.head(F.max_pool2d(x.relu(), 2).flatten(1))


ARCHITECTURES: dict[str, Architecture] = {
    "relu": mlp(nn.ReLU()),
    "gelu": mlp(nn.GELU()),
    "relu, pool": pooled(nn.ReLU(), nn.MaxPool2d(2), features=8),
    "pool with overlaps": pooled(nn.ReLU(), nn.MaxPool2d(3, 2), features=8, size=(7, 7)),
    "pool with padding": pooled(nn.ReLU(), nn.MaxPool2d(2, padding=1), features=18),
    "pool with gaps": pooled(nn.ReLU(), nn.MaxPool2d(2, 3), features=8, size=(7, 7)),
    "pool with dilation": pooled(nn.ReLU(), nn.MaxPool2d(2, 2, dilation=2), features=4),
    "two poolings": Architecture(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3),
        ),
        (1, 8, 9),
    ),
    "convolution with padding": convolved(24, 3, padding=(1, 2), size=(4, 3)),
    "convolution with stride": convolved(8, 2, stride=2, size=(5, 6)),
    "convolution in groups": convolved(12, 3, groups=2),
    "convolution, same": convolved(12, 3, padding="same", size=(3, 4)),
    "convolution of a line": Architecture(
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 2, 2),
            nn.Flatten(), nn.Linear(4, 3),
        ),
        (2, 7),
    ),
    "transposed convolution": Architecture(
        lambda: nn.Sequential(
            nn.ConvTranspose2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        ),
        (1, 3, 3),
    ),
    "batch norm": Architecture(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(8, 3),
        ),
        (1, 5, 5),
    ),
    "residual": Architecture(
        lambda: Wired(
            _residual, stem=nn.Conv2d(1, 2, 2), first=nn.Conv2d(2, 2, 3, padding=1),
            second=nn.Conv2d(2, 2, 1), head=nn.Linear(8, 3),
        ),
        (1, 5, 5),
    ),
    "embedding": Architecture(
        lambda: Wired(
            lambda net, x: net.head(net.norm(net.table(x)).tanh().mean(1)),
            table=nn.Embedding(6, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 3),
        ),
        (5,),
        tokens=6,
    ),
}  # fmt: skip
