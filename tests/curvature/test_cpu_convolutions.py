"""The forms that convolutions take on a CPU: patches where they are few, or channels last."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.layers import patches
from deltabars.curvature.linear_part import LinearPart
from deltabars.curvature.rewriting import channels_last, convolve, small_weight_gradient
from tests.architectures import L2
from tests.curvature.test_rewriting import CPU, functions
from tests.silence import PRECISION, checked, labels, randn, seeded

GEOMETRIES = {  # input channels, weight, and how it moves
    "grey": (1, (4, 1, 3, 3), {}),
    "colours": (3, (4, 3, 3, 3), {"padding": 1}),
    "stride": (2, (4, 2, 3, 2), {"stride": (2, 1)}),
    "dilation": (2, (4, 2, 2, 3), {"dilation": 2, "padding": (0, 2)}),
    "all of them": (1, (3, 1, 2, 2), {"stride": 2, "padding": 3, "dilation": (1, 2)}),
    "same": (1, (4, 1, 3, 3), {"padding": "same"}),
    "one by one": (3, (5, 3, 1, 1), {}),
    "as many as may be": (2, (2, 2, 4, 4), {}),
    "groups": (4, (4, 2, 2, 2), {"groups": 2}),
    "too many columns": (2, (2, 2, 4, 5), {"padding": 2}),
}
AS_THEY_ARE = {"groups", "too many columns"}


def linear_in_the_weight(images, shape, options):
    """A convolution and the gradient by its weight, as a function of weights and signals."""

    def both(images, weight, bias, signal):
        result, pull = torch.func.vjp(lambda w: F.conv2d(images, w, bias, **options), weight)
        return result, *pull(signal)

    weight, bias = randn(*shape, seed=1), randn(shape[0], seed=2)
    signal = randn(*F.conv2d(images, weight, **options).shape, seed=3)
    tangents = [weight, bias, signal]
    part = LinearPart(both, [images], [value.clone() for value in tangents], CPU)
    return part, both, tangents


@pytest.mark.parametrize("kind", list(GEOMETRIES))
def test_few_columns_are_multiplied_with_patches(kind):
    channels, shape, options = GEOMETRIES[kind]
    images = randn(3, channels, 8, 7)
    part, both, tangents = linear_in_the_weight(images, shape, options)
    prepared = part.prepare([images])
    found = part.apply(prepared, tangents)
    for result, exact in zip(found, both(images, *tangents), strict=True):
        torch.testing.assert_close(result, exact, **PRECISION)
    several = [torch.stack([value, -2 * value]) for value in tangents]
    together = torch.func.vmap(lambda *t: part.apply(prepared, list(t)))(*several)
    for result, exact in zip(together, found, strict=True):
        torch.testing.assert_close(result[0], exact, **PRECISION)
    called = functions(part)
    if kind in AS_THEY_ARE:
        assert not called & {patches, convolve, small_weight_gradient}
        assert channels_last in called
    else:
        assert {patches, convolve, small_weight_gradient} <= called
        before = {node.target for node in part._before.graph.nodes}
        assert patches in before  # once, for all tangents


def test_no_patches_of_what_depends_on_tangents():
    """They would be cut again for each of them."""
    weight, images = randn(4, 1, 3, 3), randn(3, 1, 8, 7)
    signal = randn(3, 4, 6, 5, seed=1)

    def both(weight, images, signal):
        result, pull = torch.func.vjp(F.conv2d, images, weight)
        return result, *pull(signal)

    part = LinearPart(both, [weight], [images.clone(), signal.clone()], CPU)
    assert channels_last in functions(part)
    assert not functions(part) & {patches, convolve, small_weight_gradient}
    found = part.apply(part.prepare([weight]), [images, signal])
    for result, exact in zip(found, both(weight, images, signal), strict=True):
        torch.testing.assert_close(result, exact, **PRECISION)


def test_of_a_network_the_pictures_alone_are_cut():
    """Behind the first layer everything depends on the tangents, or its patches are many."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Tanh(), nn.Flatten(),
            nn.Linear(12, 3),
        )
    )  # fmt: skip
    inputs = randn(7, 1, 5, 5)
    operator = HessianOperator(Problem(model, (inputs, labels()), l2=L2))
    operator.matmat(randn(1, operator.shape[0]))
    (part,) = operator._parts.values()
    cuts = [
        node for half in (part._before, part._after) for node in half.graph.nodes
        if node.target == patches
    ]  # fmt: skip
    assert cuts
    assert all(node.graph is part._before.graph for node in cuts)
    assert {tuple(node.args[1]) for node in cuts} == {(2, 2)}
    assert channels_last in functions(part)
    checked(model, inputs)


def test_channels_come_last_in_memory():
    images = randn(2, 3, 4, 5)
    assert torch.equal(channels_last(images), images)
    assert channels_last(images).is_contiguous(memory_format=torch.channels_last)
