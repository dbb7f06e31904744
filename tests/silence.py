"""Networks with units that no example switches on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SILENT = [0, 2]  # the units of the first layer that no example switches on
# Of sums of some thousand terms of O(1); a unit that is missed is off by far more.
PRECISION = {"rtol": 0, "atol": 1e-10}


def silence(layer: nn.Module, *units: int) -> nn.Module:
    """The layer, with biases that no input of O(1) makes up for."""
    with torch.no_grad():
        layer.bias[list(units)] = -100.0
    return layer


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def labels(count: int = 7) -> Tensor:
    return torch.arange(count) % 3


def seeded(build, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double().eval()


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
