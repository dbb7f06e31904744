"""Networks with units that no example switches on, and what the matrices of such are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from tests.architectures import L2
from tests.oracles import Oracle

COUNT = 7
SILENT = [0, 2]  # the units of the first layer that no example switches on
# Sums of some thousand terms of O(1), in float64; a unit that is missed is off by far more.
PRECISION = {"rtol": 0, "atol": 1e-10}


def silence(layer: nn.Module, *units: int) -> nn.Module:
    """The layer, with biases that no input of O(1) makes up for."""
    with torch.no_grad():
        layer.bias[list(units)] = -100.0
    return layer


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def labels(count: int = COUNT) -> Tensor:
    return torch.arange(count) % 3


def seeded(build, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double().eval()


def conv_net() -> nn.Module:
    """Some units are silent in each layer but the last; each other one is on for some example."""
    layers = [nn.Conv2d(1, 4, 2), nn.Conv2d(4, 3, 2), nn.Linear(12, 6)]
    for layer, units in zip(layers, ([0, 2], [1], [1, 4, 5]), strict=True):
        nn.init.constant_(layer.bias, 0.5)
        silence(layer, *units)
    first, second, third = layers
    return nn.Sequential(
        first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.Flatten(), third, nn.ReLU(),
        nn.Linear(6, 3),
    )  # fmt: skip


def left_out(problem: Problem, name: str, rows) -> list[int]:
    """Which of some rows of a parameter no example is said to reach."""
    if problem.reached is None:
        return []
    shape = problem.network.trained[name].shape
    reached = torch.zeros(problem.num_parameters, dtype=torch.bool)
    reached[problem.reached] = True
    part = reached[problem.parameters.slices[name]].view(shape[0], -1)
    return [row for row in rows if not bool(part[row].any())]


def check_products(problem: Problem, *oracles: Oracle) -> None:
    """H and G are those of plain autograd, and so are their products among what is reached."""
    total = sum(oracle.count for oracle in oracles)
    for operator, kind in ((HessianOperator(problem), "hessian"), (OPGOperator(problem), "opg")):
        exact = sum(oracle.matrix(kind) * (oracle.count / total) for oracle in oracles)
        torch.testing.assert_close(operator.to_dense(), exact, **PRECISION)
        if operator.reached is not None:
            block = exact[operator.reached][:, operator.reached]
            rows = randn(3, len(block))
            torch.testing.assert_close(operator.reached_matmat(rows), rows @ block, **PRECISION)


def checked(model: nn.Module, inputs: Tensor, targets: Tensor | None = None, **options) -> Problem:
    """A problem whose products have been checked."""
    targets = labels(len(inputs)) if targets is None else targets
    problem = Problem(model, (inputs, targets), l2=L2, **options)
    check_products(problem, Oracle(model, inputs, targets, L2))
    return problem


def check_first(model: nn.Module, inputs: Tensor, expected: bool) -> None:
    """Products are right, and the silent units of the first layer are left out, or not."""
    problem = checked(model, inputs)
    assert left_out(problem, "a.weight", SILENT) == (SILENT if expected else [])
