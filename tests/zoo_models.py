"""Forward passes and modules that the zoo is made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

TOKENS = 6


def steps(net: nn.Module, x: Tensor) -> Tensor:
    h = None
    for step in x.unbind(1):
        h = net.core(step, h)
    return net.head(h)


def states(net: nn.Module, x: Tensor) -> Tensor:
    """Time first, a start that is computed, and the last states of both kinds."""
    start = net.start(x[:, 0]).tanh().unsqueeze(0)
    _, (h, c) = net.core(x.transpose(0, 1), (start, 2 * start))
    return net.head(h[-1] + c[-1])


def packed(net: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return net.head(net.core(packed)[1][-1])


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


def masked(net: nn.Module, x: Tensor) -> Tensor:
    padding = torch.zeros_like(x[..., 0], dtype=torch.bool)
    padding[:, -1] = x[:, -1, 0] > 0
    return net.head(net.core(x, src_key_padding_mask=padding)[:, 0])


def attended(net: nn.Module, x: Tensor) -> Tensor:
    return net.head(net.core(x, x, x, need_weights=False)[0].mean(1))


def looked_up(net: nn.Module, x: Tensor) -> Tensor:
    return net.head(net.table(x).tanh().mean(1))


def bagged(net: nn.Module, x: Tensor) -> Tensor:
    return net.head(net.table(x).tanh())


class Tied(nn.Module):
    """Scores every token with its own embedding, and takes three of them for classes."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 4)
        self.inner = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, TOKENS)
        self.decoder.weight = self.table.weight

    def forward(self, x):
        return self.decoder(self.inner(self.table(x).mean(1)).tanh())[:, :3]


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4, 3))
        self.mix = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        heads = torch.einsum("btd,hde->bhte", x, self.queries).tanh()
        mixed = torch.bmm(heads.mean(1), self.mix[0].expand(len(x), 3, 3))
        return self.scale * (mixed.mean(1) @ self.mix[1])


def weight_norm_by_hand(net: nn.Module, x: Tensor) -> Tensor:
    """Weight norm as a formula: torch's second derivatives of it are wrong (in 2.13)."""
    first, last = (dict(net.named_children())[name] for name in ("0", "2"))
    length, direction = first.parametrizations.weight.parameters()
    weight = direction * length / direction.square().sum(1, keepdim=True).sqrt()
    return last(F.linear(x, weight, first.bias).tanh())


def two_inputs(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return net.head(net.core(x, y).tanh())


def named_inputs(net: nn.Module, left: Tensor, right: Tensor) -> Any:
    return SimpleNamespace(logits=net.head((net.a(left) * net.b(right)).tanh()))


class Adapted(nn.Module):
    """A frozen dense layer and a low-rank addition to it."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.randn(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + 0.5 * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Cubed(torch.autograd.Function):
    """An operation that knows neither vmap nor forward derivatives."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, signal):
        return 3 * ctx.saved_tensors[0] ** 2 * signal
