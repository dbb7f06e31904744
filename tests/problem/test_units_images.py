"""Silent channels of convolutions in every wiring (see test_units)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.architectures import Wired
from tests.silence import SILENT, check_first, randn, seeded, silence

# Of `a`, a convolution of three channels (1, 5, 5) -> (3, 4, 4), and `b`, dense (12, 4).


def flattened(net, x):
    return net.b(F.max_pool2d(net.a(x).relu(), 2).flatten(1)).relu()


def pooled_before(net, x):
    return net.b(torch.flatten(F.relu(F.max_pool2d(net.a(x), 2)), 1)).relu()


def pooled_in_two_ways(net, x):
    x = net.a(x)
    means, largest = F.avg_pool2d(x, 2).relu(), F.max_pool2d(x, 2).relu()
    return net.b(means.flatten(1)).relu() * net.b(largest.flatten(1)).relu()


def pooled_and_seen(net, x):
    x = F.max_pool2d(net.a(x), 2)
    return net.b(x.relu().flatten(1)) + x.mean((2, 3))[:, :1]


def averaged(net, x):
    x = F.adaptive_avg_pool2d(F.avg_pool2d(net.a(x), 2, 1).relu(), 2)
    return net.b(x.reshape(len(x), -1)).relu()


def viewed(net, x):
    x = F.max_pool2d(net.a(x).relu(), 2)
    return net.b(x.view(x.size(0), -1)).relu()


def viewed_by_size(net, x):
    return net.b(F.max_pool2d(net.a(x).relu(), 2).view(-1, 12)).relu()


def viewed_otherwise(net, x):
    x = F.max_pool2d(net.a(x).relu(), 2)
    return net.b(x.view(-1, 6, 2).mT.reshape(-1, 12)).relu()


def normalised(net, x):
    return net.b(F.max_pool2d(net.norm(net.a(x)).relu(), 2).flatten(1)).relu()


def normalised_after(net, x):
    return net.b(F.max_pool2d(net.norm(net.a(x).relu()), 2).flatten(1)).relu()


def changed_after(net, x):
    x = F.max_pool2d(net.a(x).relu(), 2)
    x.add_(1)
    return net.b(x.flatten(1)).relu()


def changed_through_a_view(net, x):
    x = F.max_pool2d(net.a(x).relu(), 2)
    x.view(-1).add_(1e-5)
    return net.b(x.flatten(1)).relu()


def indices(net, x):
    x, where = F.max_pool2d(net.a(x).relu(), 2, return_indices=True)
    return net.b((x * (1 + where)).flatten(1)).relu()


def convolved_again(net, x):
    x = net.c(F.max_pool2d(net.a(x).relu(), 2)).relu()
    return net.b(torch.cat([x, x], 1)[:, :3].reshape(-1, 12)).relu()


def in_groups(net, x):
    x = net.grouped(F.max_pool2d(net.a(x).relu(), 2)).relu()
    return net.b(x.flatten(1)).relu()


def along_lines(net, x):
    x = net.line(F.max_pool2d(net.a(x).relu(), 2).flatten(2)).relu()
    return net.b(x.flatten(1)).relu()


IMAGES = {
    flattened: True, pooled_before: True, pooled_in_two_ways: True, pooled_and_seen: False,
    averaged: True, viewed: True, viewed_by_size: True, viewed_otherwise: True, normalised: True,
    normalised_after: True, changed_after: False, changed_through_a_view: False, indices: True,
    convolved_again: True, in_groups: True, along_lines: True,
}  # fmt: skip


@pytest.mark.parametrize("between", list(IMAGES), ids=lambda f: f.__name__)
def test_convolutions(between):
    extra = {
        "normalised": lambda: {"norm": nn.BatchNorm2d(3)},
        "normalised_after": lambda: {"norm": nn.BatchNorm2d(3)},
        "convolved_again": lambda: {"c": silence(nn.Conv2d(3, 2, 1), 1)},
        "in_groups": lambda: {"grouped": silence(nn.Conv2d(3, 3, 1, groups=3), 1)},
        "along_lines": lambda: {"line": silence(nn.Conv1d(3, 3, 1), 1)},
    }.get(between.__name__, dict)
    model = seeded(
        lambda: Wired(
            lambda net, x: net.head(between(net, x)), a=silence(nn.Conv2d(1, 3, 2), *SILENT),
            b=silence(nn.Linear(12, 4), 1), head=nn.Linear(4, 3), **extra(),
        )
    )  # fmt: skip
    check_first(model, randn(7, 1, 5, 5), IMAGES[between])
