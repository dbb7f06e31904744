"""Small networks, in float64, trained to an optimum of their cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from tests.oracles import LOSSES, Oracle


class SharedWeights(nn.Module):
    """One matrix used twice, and once more under another name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.Softplus(), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(12, 3),
    )  # fmt: skip


def rectified() -> nn.Module:
    """Kinks: its Hessian is not positive definite, however long it is trained."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


NETWORKS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),  # convex: no eigenvalue below l2
    "dense": (dense, (4,)),
    "convolutional": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)
        ),
        (1, 6, 6),
    ),
    "batch_norm": (batch_norm, (1, 6, 6)),
    "shared": (SharedWeights, (4,)),
    "rectified": (rectified, (1, 6, 6)),
}


@dataclass
class Case:
    """A trained network, its data, inputs to predict, and the oracle that knows the answers."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    l2: float
    unseen: Tensor
    oracle: Oracle

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets


def make_targets(likelihood: str, count: int, generator: torch.Generator) -> Tensor:
    if likelihood == "categorical":
        return torch.randint(0, 3, (count,), generator=generator)
    if likelihood == "bernoulli":
        return torch.randint(0, 2, (count, 3), generator=generator)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def make_case(kind="dense", count=29, l2=0.05, seed=0, likelihood="categorical") -> Case:
    """A network of that kind at an optimum of mean loss + (l2/2)·‖w‖² (full-batch L-BFGS).

    The training is done once in a process; the network is a new one each time.
    """
    model, inputs, targets, unseen = untrained(kind, count, seed, likelihood)
    model.load_state_dict(_trained(kind, count, l2, seed, likelihood))
    oracle = Oracle(model.eval(), inputs, targets, l2, likelihood=likelihood)
    return Case(model, inputs, targets, l2, unseen, oracle)


def untrained(kind, count, seed, likelihood) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A new network of that kind, inputs and targets for it, and inputs to predict."""
    build, shape = NETWORKS[kind]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().double()
    new = {"generator": generator, "dtype": torch.float64}
    inputs, unseen = torch.randn(count, *shape, **new), torch.randn(7, *shape, **new)
    return model, inputs, make_targets(likelihood, count, generator), unseen


@cache
def _trained(kind, count, l2, seed, likelihood) -> dict[str, Tensor]:
    model, inputs, targets, _ = untrained(kind, count, seed, likelihood)
    with torch.no_grad():
        model.train()(inputs)  # gives batch-norm its running statistics
    train(model.eval(), inputs, targets, l2, likelihood)
    return model.state_dict()


def train(model, inputs, targets, l2, likelihood="categorical", steps=400) -> None:
    minimise(model, lambda: LOSSES[likelihood](model(inputs), targets).mean(), l2, steps)


def minimise(model, loss, l2, steps=400) -> None:
    """Bring the weights to an optimum of loss() + (l2/2)·‖w‖²."""
    weights = list(model.parameters())
    optimiser = torch.optim.LBFGS(
        weights, max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimiser.zero_grad()
        cost = loss() + 0.5 * l2 * sum(w.square().sum() for w in weights)
        cost.backward()
        return cost

    optimiser.step(closure)
    for weight in weights:
        weight.grad = None
