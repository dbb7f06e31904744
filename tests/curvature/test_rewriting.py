"""Rewritten graphs compute what they did before: what a GPU would run, and graphs that look alike.

What a graph is rewritten for is told by the device that a linear part is made for; the rewritten
one runs anywhere, so the forms for a GPU are tested on the CPU, in float64.
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
from deltabars.curvature.layers import patches
from deltabars.curvature.linear_part import LinearPart
from deltabars.curvature.rewriting import input_gradient, small_weight_gradient, weight_gradient
from tests.architectures import ARCHITECTURES, COUNT, L2, Architecture, Wired, sample_of

aten = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda")
PRECISION = {"rtol": 0, "atol": 1e-10}  # of sums of some thousand terms of O(1), in float64


def functions(part: LinearPart) -> set:
    """What the two halves of a linear part call."""
    return {node.target for half in (part._before, part._after) for node in half.graph.nodes}


def hessian_for(device, problem) -> torch.Tensor:
    """The Hessian by the graph that is rewritten for a device, on the CPU."""
    operator = HessianOperator(problem)
    (batch,) = problem.chunks()
    fixed = operator._fixed(batch)
    tangents = [value.clone() for value in problem.network.trained.values()]
    with problem.network.evaluation():
        part = LinearPart(partial(operator._derivative, batch.inputs), fixed, tangents, device)
    operator._parts[tuple(tensor.shape for tensor in fixed)] = part
    return operator.to_dense()


def gradients_for(device, images, weight, options) -> tuple[LinearPart, torch.Tensor, torch.Tensor]:
    """The gradients of a convolution by its input and its weight, as a linear part."""

    def pull(images, weight, signal):
        return torch.func.vjp(partial(F.conv2d, **options), images, weight)[1](signal)

    generator = torch.Generator().manual_seed(1)
    shape = F.conv2d(images, weight, **options).shape
    signals = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    part = LinearPart(pull, [images, weight], [signals[0].clone()], device)
    prepared = part.prepare([images, weight])
    singly = [part.apply(prepared, [signal]) for signal in signals]
    together = torch.func.vmap(lambda signal: part.apply(prepared, [signal]))(signals)
    for number in (0, 1):
        stacked = torch.stack([result[number] for result in singly])
        torch.testing.assert_close(together[number], stacked, **PRECISION)
    return part, signals, together


GEOMETRIES = [  # kernel, stride, padding, dilation, channels
    *product([1, 2, 3, 5, (3, 2), (1, 3)], [1, 2], [0, 1, (2, 1), 3], [1], [2]),
    *product([2, 3, (1, 3)], [1, (2, 1)], [0, 3], [2, (1, 2)], [1]),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "channels"), GEOMETRIES)
def test_gradients_of_convolutions(kernel, stride, padding, dilation, channels):
    """Against plain autograd; and no way of cuDNN's own is left that a matrix product can take."""
    generator = torch.Generator().manual_seed(0)
    new = {"generator": generator, "dtype": torch.float64}
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    images = torch.randn(3, channels, 10, 9, **new)
    weight = torch.randn(4, channels, height, width, **new)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    part, signals, (by_images, by_weight) = gradients_for(GPU, images, weight, options)
    for number, signal in enumerate(signals):
        leaves = [images.clone().requires_grad_(), weight.clone().requires_grad_()]
        exact = torch.autograd.grad(F.conv2d(*leaves, **options), leaves, signal)
        torch.testing.assert_close(by_images[number], exact[0], **PRECISION)
        torch.testing.assert_close(by_weight[number], exact[1], **PRECISION)
    called = functions(part)
    assert patches in called
    assert called & {weight_gradient, small_weight_gradient}
    edges = (padding, padding) if isinstance(padding, int) else padding
    flips = stride == 1 and dilation == 1 and edges[0] < height and edges[1] < width
    assert (input_gradient in called) == flips
    assert (aten.convolution_backward.default in called) != flips


@pytest.mark.parametrize(("channels", "form"), [(2, small_weight_gradient), (40, weight_gradient)])
def test_small_and_large_weights_take_their_own_forms(channels, form):
    images = torch.randn(2, channels, 5, 5, dtype=torch.float64)
    weight = torch.randn(channels, channels, 3, 3, dtype=torch.float64)
    on_gpu, _, results = gradients_for(GPU, images, weight, {"padding": 1})
    on_cpu, _, expected = gradients_for(CPU, images, weight, {"padding": 1})
    assert form in functions(on_gpu)
    assert not functions(on_cpu) & {patches, weight_gradient, small_weight_gradient, input_gradient}
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, **PRECISION)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("call", [F.conv_transpose2d, F.conv2d])
def test_other_convolutions_are_left_alone(call, groups):
    images = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    weight = torch.randn(4, 4 // groups, 2, 2, dtype=torch.float64)

    def pull(images, weight, signal):
        return torch.func.vjp(partial(call, groups=groups), images, weight)[1](signal)

    signal = torch.randn_like(call(images, weight, groups=groups))
    part = LinearPart(pull, [images, weight], [signal.clone()], GPU)
    results = part.apply(part.prepare([images, weight]), [signal])
    for result, exact in zip(results, pull(images, weight, signal), strict=True):
        torch.testing.assert_close(result, exact, **PRECISION)


WINDOWS = [
    ((3, 2), (1, 1), (0, 0), (1, 1)),
    ((2, 3), (2, 1), (3, 1), (1, 2)),
    ((1, 1), (3, 2), (0, 1), (1, 1)),
    ((5, 5), (1, 1), (2, 2), (2, 1)),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), WINDOWS)
def test_patches_are_what_a_convolution_multiplies(kernel, stride, padding, dilation, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here, where patches are cut in another way")
    images = torch.randn(2, 3, 11, 10, dtype=torch.float64)
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64)
    exact = F.conv2d(images, weight, None, stride, padding, dilation)
    cut = patches(images.to(device), kernel, stride, padding, dilation).cpu()  # (B, T, I)
    result = (cut @ weight.flatten(1).T).mT.unflatten(2, exact.shape[2:])
    torch.testing.assert_close(result, exact, **PRECISION)


@pytest.mark.parametrize(
    "kind", ["two poolings", "pool with rows left over", "convolution with wide padding"]
)
def test_networks_by_the_graph_for_a_gpu(kind):
    sample = sample_of(ARCHITECTURES[kind])
    dense = hessian_for(GPU, Problem(sample.model, sample.data, l2=L2))
    torch.testing.assert_close(dense, sample.oracle.hessian(), **PRECISION)


# Networks whose graphs look like what is rewritten, and are not; each is a function of a
# convolution `a` (and of `b`), and its result goes through tanh and a head.

PLACES = torch.tensor([0, 3, 5, 6])


def pick(x, channels, dim=-1):
    """Some places of each of the first channels."""
    return x.flatten(2).gather(dim, PLACES.expand(len(x), channels, 4))


def summed_with_itself(net, x):
    x = net.a(x)
    return F.max_pool2d(x + x, 2)


def largest_and_mean(net, x):
    x = net.a(x).flatten(2)
    return torch.cat([x.max(-1).values, x.mean(-1)], 1)


def largest_and_least(net, x):
    x = net.a(x).flatten(2)
    return torch.cat([x.max(-1).values, x.min(-1).values], 1)


def few_channels(net, x):
    return torch.cat([pick(net.a(x), 1), pick(net.b(x), 2), pick(net.a(x), 3, dim=2)], 1)


def weighted_sum(net, x):
    return pick(torch.add(net.a(x), net.b(x), alpha=3), 3)


def weighted_zeros(net, x):
    x = net.a(x)
    return torch.add(torch.zeros_like(x), x, alpha=3) - torch.sub(torch.zeros_like(x), x)


def broadcast_zeros(net, x):
    x = net.a(x)
    spread = x.new_zeros(len(x), 3, 4, 4) + x.mean((2, 3), keepdim=True)
    return spread * x + (x.new_zeros(()) - x)


def flat_gather(net, x):
    x = net.a(x)
    index = torch.tensor([0, 17, 30, 47]).expand(len(x), 4)
    return torch.cat([x.flatten(1).gather(1, index), x.relu().flatten(1).gather(-1, index)], 1)


def rectified_gather(net, x):
    x = net.a(x).relu()
    rows = torch.tensor([[2, 0, 1]]).expand(len(x), 3).reshape(-1, 3, 1, 1)
    return torch.cat([x.gather(1, rows).flatten(1), x.gather(3, rows).flatten(1)], 1)


def pooled_twice(net, x):
    return F.max_pool2d(F.max_pool2d(net.a(x), 2).relu(), 2).relu()


def pooled_in_two_ways(net, x):
    x = net.a(x).relu()
    return torch.cat([F.max_pool2d(x, 2).flatten(1), F.max_pool2d(x, 3).flatten(1)], 1)


def unpooled(net, x):
    small, indices = F.max_pool2d(net.a(x).relu(), 2, return_indices=True)
    return F.max_unpool2d(small, indices, 2) * net.b(x)


def indices_themselves(net, x):
    small, indices = F.max_pool2d(net.a(x), 2, return_indices=True)
    there = net.b(x).flatten(2).gather(-1, indices.flatten(2))
    return small.flatten(2) * there * (1 + indices.flatten(2))


def weights_used_twice(net, x):
    return F.max_pool2d(net.a(x).relu(), 2) * F.max_pool2d(net.a(-x), 2).relu()


def bias_used_elsewhere(net, x):
    shift = net.b(x).mean((2, 3), keepdim=True)
    return F.max_pool2d(net.a(x), 2) * net.a.bias.view(3, 1, 1) + shift


def pooled_beside_itself(net, x):
    x = net.a(x)
    return F.max_pool2d(x, 3).flatten(1).repeat(1, 2) * x.flatten(2).amax(-1).repeat(1, 2)


def largest_of_a_sum(net, x):
    return (net.a(x) + net.b(x).mean((2, 3), keepdim=True)).flatten(2).max(-1).values


def without_gradient(net, x):
    with torch.no_grad():
        still = net.b(x).tanh()
    return net.a(x) * still


ALIKE = [
    summed_with_itself, largest_and_mean, largest_and_least, few_channels, weighted_sum,
    weighted_zeros, broadcast_zeros, flat_gather, rectified_gather, pooled_twice,
    pooled_in_two_ways, unpooled, indices_themselves, weights_used_twice, bias_used_elsewhere,
    pooled_beside_itself, largest_of_a_sum, without_gradient,
]  # fmt: skip


@pytest.mark.parametrize("between", ALIKE, ids=lambda function: function.__name__)
def test_graphs_that_look_alike(between):
    def forward(net, x):
        return net.head(between(net, x).flatten(1).tanh())

    def build():
        a, b = nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 3)
        features = between(Wired(between, a=a, b=b), torch.randn(2, 1, 6, 6)).flatten(1).shape[1]
        return Wired(forward, a=a, b=b, head=nn.Linear(features, 3))

    sample = sample_of(Architecture(build, (1, 6, 6)))
    problem = Problem(sample.model, sample.data, l2=L2)
    assert problem.num_examples == COUNT
    torch.testing.assert_close(hessian_for(GPU, problem), sample.oracle.hessian(), **PRECISION)
