"""Rewritten graphs compute what they did before: what a GPU would run, and graphs that look alike.

What a graph is rewritten for is the device that a linear part is made for; the rewritten one runs
anywhere, so the forms for a GPU are tested on the CPU, in float64.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.linear_part import LinearPart
from tests.architectures import ARCHITECTURES, L2, Architecture, Wired, sample_of

GPU = torch.device("cuda")
PRECISION = {"rtol": 0, "atol": 1e-10}  # of sums of some thousand terms of O(1), in float64
BACKWARD = torch.ops.aten.convolution_backward.default


@pytest.fixture
def for_a_gpu(monkeypatch):
    """Rewrite graphs as for a GPU."""
    monkeypatch.setattr(
        "deltabars.curvature.hessian.LinearPart",
        lambda function, fixed, tangents, device: LinearPart(function, fixed, tangents, GPU),
    )


GEOMETRIES = [  # kernel, stride, padding, dilation, channels
    *product([1, 3, (3, 2)], [1, 2], [0, (2, 1), 3], [1], [2]),
    *product([2, (1, 3)], [1, (2, 1)], [0, 3], [2, (1, 2)], [1]),
    (3, 1, 1, 1, 40),  # weights that are not small beside the signals
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "channels"), GEOMETRIES)
def test_gradients_of_convolutions(kernel, stride, padding, dilation, channels):
    """Against plain autograd, one signal and several; and by multiplications alone if it can be."""
    generator = torch.Generator().manual_seed(0)
    new = {"generator": generator, "dtype": torch.float64}
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    images = torch.randn(3, channels, 10, 9, **new)
    weight = torch.randn(4, channels, height, width, **new)
    options = {"stride": stride, "padding": padding, "dilation": dilation}

    def pull(images, weight, signal):
        return torch.func.vjp(partial(F.conv2d, **options), images, weight)[1](signal)

    signals = torch.randn(2, *F.conv2d(images, weight, **options).shape, **new)
    part = LinearPart(pull, [images, weight], [signals[0].clone()], GPU)
    prepared = part.prepare([images, weight])
    together = torch.func.vmap(lambda signal: part.apply(prepared, [signal]))(signals)
    for number, signal in enumerate(signals):
        leaves = [images.clone().requires_grad_(), weight.clone().requires_grad_()]
        exact = torch.autograd.grad(F.conv2d(*leaves, **options), leaves, signal)
        singly = part.apply(prepared, [signal])
        for one, all_, answer in zip(singly, together, exact, strict=True):
            torch.testing.assert_close(one, answer, **PRECISION)
            torch.testing.assert_close(all_[number], answer, **PRECISION)
    edges = (padding, padding) if isinstance(padding, int) else padding
    flips = stride == 1 and dilation == 1 and edges[0] < height and edges[1] < width
    called = {node.target for half in (part._before, part._after) for node in half.graph.nodes}
    assert (BACKWARD in called) != flips


@pytest.mark.parametrize(
    "kind", ["two poolings", "pool with gaps", "convolution with padding", "convolution in groups",
             "transposed convolution"],
)  # fmt: skip
def test_networks_by_the_graph_for_a_gpu(kind, for_a_gpu):
    sample = sample_of(ARCHITECTURES[kind])
    operator = HessianOperator(Problem(sample.model, sample.data, l2=L2))
    torch.testing.assert_close(operator.to_dense(), sample.oracle.hessian(), **PRECISION)


# Networks whose graphs look like what is rewritten, and are not; each is a function of
# convolutions `a` and `b` whose result goes through tanh and a head.


def weighted_sum(net, x):
    return torch.add(net.a(x), net.b(x), alpha=3)


def weighted_zeros(net, x):
    x = net.a(x)
    return torch.add(torch.zeros_like(x), x, alpha=3) - torch.sub(torch.zeros_like(x), x)


def broadcast_zeros(net, x):
    x = net.a(x)
    spread = x.new_zeros(len(x), 3, 4, 4) + x.mean((2, 3), keepdim=True)
    return spread * x + (x.new_zeros(()) - x)


def without_gradient(net, x):
    with torch.no_grad():
        still = net.b(x).tanh()
    return net.a(x) * still


ALIKE = [weighted_sum, weighted_zeros, broadcast_zeros, without_gradient]


@pytest.mark.parametrize("between", ALIKE, ids=lambda function: function.__name__)
def test_graphs_that_look_alike(between, for_a_gpu):
    def forward(net, x):
        return net.head(between(net, x).flatten(1).tanh())

    def build():
        return Wired(forward, a=nn.Conv2d(1, 3, 3), b=nn.Conv2d(1, 3, 3), head=nn.Linear(48, 3))

    sample = sample_of(Architecture(build, (1, 6, 6)))
    operator = HessianOperator(Problem(sample.model, sample.data, l2=L2))
    torch.testing.assert_close(operator.to_dense(), sample.oracle.hessian(), **PRECISION)
