"""Hessian products of networks with units that no example switches on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from tests.architectures import L2, Wired
from tests.oracles import Oracle

COUNT = 7
PRECISION = {"rtol": 0, "atol": 1e-10}  # sums of some thousand terms of O(1), in float64


def silent(layer: nn.Module, *units: int) -> nn.Module:
    """The layer, with biases of these units that no input of O(1) makes up for."""
    nn.init.constant_(layer.bias, 0.5)
    with torch.no_grad():
        layer.bias[list(units)] = -100.0
    return layer


def layers() -> dict[str, nn.Module]:
    """Two convolutions and two dense layers for images of 9×9, half of their units silent."""
    return {
        "a": silent(nn.Conv2d(1, 4, 2), 0, 2), "b": silent(nn.Conv2d(4, 3, 2), 1),
        "c": silent(nn.Linear(27, 6), 1, 4, 5), "d": nn.Linear(6, 3),
    }  # fmt: skip


def usual(net, x):
    x = F.max_pool2d(net.a(x).relu(), 2)
    return net.d(F.relu(net.c(net.b(x).relu().flatten(1))))


def by_means(net, x):
    x = F.avg_pool2d(F.relu(net.a(x)), 2)
    return net.d(net.c(torch.flatten(F.relu(net.b(x)), 1)).relu())


def pooled_before(net, x):
    x = F.max_pool2d(net.a(x), 2).relu()
    return net.d(F.relu(net.c(net.b(x).relu().flatten(1))))


def pooled_in_windows_that_overlap(net, x):
    x = F.max_pool2d(F.relu(net.a(x)), 3, stride=2, padding=1)[:, :, :4, :4]
    return net.d(F.relu(net.c(net.b(x).relu().flatten(1))))


def used_elsewhere(net, x):
    """Channels that are kept are wanted whole, before and after the ReLU."""
    x = net.a(x)
    x = F.max_pool2d(x.relu() + 0.1 * x.tanh().square() * x.relu(), 2)
    return net.d(F.relu(net.c(net.b(x).relu().reshape(len(x), 27))))


def check(model, shape):
    data = torch.randn(COUNT, *shape, dtype=torch.float64), torch.arange(COUNT) % 3
    problem = Problem(model.double().eval(), data, l2=L2)
    assert problem.reached is not None
    exact = Oracle(model, *data, L2).hessian()
    torch.testing.assert_close(HessianOperator(problem).to_dense(), exact, **PRECISION)


@pytest.mark.parametrize(
    "forward", [usual, by_means, pooled_before, pooled_in_windows_that_overlap, used_elsewhere]
)
def test_products_are_those_of_the_whole_network(forward):
    torch.manual_seed(0)
    check(Wired(forward, **layers()), (1, 9, 9))


def test_less_is_kept_and_computed():
    torch.manual_seed(0)
    data = torch.randn(COUNT, 1, 9, 9, dtype=torch.float64), torch.arange(COUNT) % 3
    kept = []
    for units in (layers(), {name: silent(layer) for name, layer in layers().items()}):
        model = Wired(usual, **units).double().eval()
        operator = HessianOperator(Problem(model, data, l2=L2))
        operator.matmat(torch.ones(1, operator.shape[0], dtype=torch.float64))
        kept.append(operator.kept_bytes)
    assert kept[0] < 0.6 * kept[1]


def twice(net, x):
    """A layer that is called on two inputs, of which each reaches other columns of its weight."""
    low, high = x.clone(), x.clone()
    low[:, 3:], high[:, :2] = 0.0, 0.0
    return net.last(F.relu(net.first(low)) + F.relu(net.first(high)))


def counted(net, x):
    """Outputs depend on the silent units, by a number that has no derivative."""
    hidden = net.first(x)
    return net.last(F.relu(hidden) * (1 + (hidden < -50).sum(1, keepdim=True)))


@pytest.mark.parametrize("forward", [twice, counted])
def test_unusual_models(forward):
    torch.manual_seed(0)
    check(Wired(forward, first=silent(nn.Linear(5, 4), 0, 2), last=nn.Linear(4, 3)), (5,))
