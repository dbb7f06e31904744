"""Silent units in every wiring: products are those of the plain network, whatever is left out.

Each network has a first layer `a` whose units `SILENT` are never switched on. Whether they may be
left out is told by the wiring: not where anything but a ReLU sees them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.architectures import Wired
from tests.silence import SILENT, check_first, randn, seeded, silence


class Own(torch.autograd.Function):
    """A ReLU whose derivative is not quite zero where it passes nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.relu()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, signal):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, signal, 1e-4 * signal)

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, tangent, 1e-4 * tangent)


# Of `a`, dense (4, 5), and `b`, dense (5, 5); the result goes to a head.


def plain(net, x):
    return F.relu(net.b(F.relu(net.a(x))))


def in_place(net, x):
    return F.relu(net.b(F.relu(net.a(x), inplace=True)), inplace=True)


def statements(net, x):
    x = net.a(x)
    x.relu_()
    x = net.b(x)
    torch.relu_(x)
    return x


def methods(net, x):
    return torch.relu(net.b(net.a(x).relu()))


def twice(net, x):
    return net.b(net.a(x).relu().relu()).relu()


def dropped_out(net, x):
    return net.b(F.dropout(F.relu(F.dropout(net.a(x), training=False)), training=False)).relu()


def keywords(net, x):
    x = F.linear(x, net.a.weight, bias=net.a.bias).relu()
    return F.linear(x, weight=net.b.weight, bias=net.b.bias).relu()


def only_keywords(net, x):
    return net.b(F.linear(x, weight=net.a.weight, bias=net.a.bias).relu())


def shape_looked_at(net, x):
    x = net.a(x)
    assert x.size(1) == 5
    assert x.dim() == 2
    assert x.is_floating_point()
    return net.b(F.relu(x)).relu()


def used_before(net, x):
    x = net.a(x)
    return net.b(x.relu()).relu() + x


def added_in_place(net, x):
    out = net.a(x)
    identity = net.b(out.relu())
    identity += out
    return identity.relu()


def added_to_in_place(net, x):
    out = net.a(x)
    out += x.sum(1, keepdim=True)
    return net.b(out.relu()).relu()


def residual(net, x):
    x = net.a(x).relu()
    out = net.b(x)
    out += x
    return out.relu()


def multiplied(net, x):
    x = net.a(x).relu()
    return net.b(x).relu() * (1 + x)


def joined_and_averaged(net, x):
    x = net.a(x).relu()
    y = net.b(x).relu()
    return torch.cat([x, y], 1)[:, 3:8] * x.mean(1, keepdim=True)


def layer_upon_layer(net, x):
    return net.b(net.a(x)).relu()


def tied(net, x):
    x = net.a(x).relu()
    x = F.linear(x, net.b.weight, net.b.bias).relu()
    return F.linear(x, net.b.weight).relu()


def bias_elsewhere(net, x):
    return net.b(net.a(x).relu()).relu() * net.a.bias.tanh()


def weight_elsewhere(net, x):
    return net.b(net.a(x).relu()).relu() + x @ net.a.weight.T


def without_bias(net, x):
    x = F.linear(x.abs(), -net.a.weight.abs()).relu()  # which silences all of them
    return net.b(x + 1).tanh()


def three_axes(net, x):
    x = net.a(x[:, None].repeat(1, 2, 1) * x.new_tensor([[1.0], [2.0]])).relu()
    return net.b(x).relu().sum(1)


def rows_of_sets(net, x):
    x = torch.stack([x, 2 * x], 1).view(-1, 4)
    return net.b(net.a(x).relu()).relu().view(-1, 2, 5).sum(1)


def without_gradient(net, x):
    with torch.no_grad():
        still = net.a(x)
        still.relu_()
    return net.b(still).relu()


def partly_without_gradient(net, x):
    x = net.a(x)
    with torch.no_grad():
        mask = (x > -200).to(x)
    return net.b(x.relu()).relu() * mask


def own_function(net, x):
    return net.b(Own.apply(net.a(x))).relu()


def own_function_beside(net, x):
    x = net.a(x)
    return net.b(x.relu() + 1e-4 * Own.apply(x)).relu()


def own_function_behind(net, x):
    return net.b(Own.apply(net.a(x).relu() + 1)).relu()


def untraceable(net, x):
    x = net.a(x).relu()
    mark = F.one_hot((x.sum(1) > 0).long(), 5).to(x)
    return net.b(x).relu() * (1 + mark)


def softplus(net, x):
    return net.b(F.softplus(net.a(x))).relu()


def leaky(net, x):
    return net.b(F.leaky_relu(net.a(x), inplace=True)).relu()


def gelu_and_tanh(net, x):
    return net.b(F.gelu(net.a(x) + 99)).tanh()


def bits(net, x):
    """Another type in the same bits is no flattening."""
    odd = (x.view(torch.int64) & 1).to(x)
    return net.b(net.a(x + 0.1 * odd).relu()).relu()


def compared(net, x):
    """What is asked of two tensors together may be about their values."""
    before = net.a(x)
    return net.b(before if torch.equal(before, x.new_zeros(7, 5)) else before.relu()).relu()


DENSE = {
    plain: True, in_place: True, statements: True, methods: True, twice: True, dropped_out: True,
    keywords: True, only_keywords: False, shape_looked_at: True, used_before: False,
    added_in_place: False, added_to_in_place: False, residual: True, multiplied: True,
    joined_and_averaged: True, layer_upon_layer: False, tied: True, bias_elsewhere: True,
    weight_elsewhere: False, without_bias: False, three_axes: False, rows_of_sets: True,
    without_gradient: False, partly_without_gradient: False, own_function: False,
    own_function_beside: False, untraceable: True, softplus: False, leaky: False,
    gelu_and_tanh: False, bits: True, own_function_behind: True, compared: False,
}  # fmt: skip


@pytest.mark.parametrize("between", list(DENSE), ids=lambda f: f.__name__)
def test_dense_layers(between):
    model = seeded(
        lambda: Wired(
            lambda net, x: net.head(between(net, x)), a=silence(nn.Linear(4, 5), *SILENT),
            b=silence(nn.Linear(5, 5), 1), head=nn.Linear(5, 3),
        )
    )  # fmt: skip
    check_first(model, randn(7, 4), DENSE[between])
