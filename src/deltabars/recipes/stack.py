"""Many copies of the paper's network as one: the same layers, one batched product each.

A convolution is a product of 3×3 patches with a matrix, so that M networks with M sets of weights
take one `bmm` where M convolutions would be launched. Every operation is a copy, a product or
elementwise: nothing is summed in an order that changes from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from deltabars.recipes.paper import PaperNetwork, Recipe, blank_network

_KERNEL = 3
_ALIGNED = 4  # numbers: 16 bytes
_POOLED = (True, True, False)  # which of the convolutions a pooling follows
_PARTS = (1, 2, 4, 5, 10, 20, 25, 50, 100)  # that a sum over patches may be taken in
_ENOUGH = 128  # products at once
_PATCH_NUMBERS = 1 << 27  # of the largest layer's patches, in the predictions of one chunk


@dataclass(frozen=True)
class Stack:
    """M networks of one recipe.

    Attributes:
        recipe: of all of them.
        weights: one row a network, (M, P and some zeros): of each layer its matrix (inputs,
            outputs), then its biases. The inputs of a convolution are in the order (row, column,
            channel) of a patch. Matrices have rows of zeros up to a multiple of four, and so have
            rows of weights: tensor cores take nothing else.
    """

    recipe: Recipe
    weights: Tensor

    @classmethod
    def of(cls, recipe: Recipe, networks: Sequence[PaperNetwork]) -> Stack:
        """The networks side by side."""
        return cls(recipe, torch.stack([_flatten(network) for network in networks]))

    def __len__(self) -> int:
        return self.weights.shape[0]

    def network(self, place: int) -> PaperNetwork:
        """One of the networks, on the CPU."""
        network = blank_network(self.recipe).to(self.weights.dtype)
        parts = self.weights[place].detach().cpu().split(_sizes(self.recipe))
        with torch.no_grad():
            for layer, part, bias in zip(_layers(network), parts[::2], parts[1::2], strict=True):
                outputs = len(layer.weight)
                matrix = part.view(-1, outputs)[: layer.weight[0].numel()]
                layer.weight.copy_(_from_matrix(matrix, layer, network))
                _bias(layer).copy_(bias[:outputs])
        return network

    def logits(self, images: Tensor) -> Tensor:
        """The logits (M, B, 10) of images (M or 1, B, side, side, channels)."""
        count, batch = len(self), images.shape[1]
        parts = iter(self.weights.split(_sizes(self.recipe), dim=1))
        x = images.expand(count, -1, -1, -1, -1)
        for pooled in _POOLED:
            x = _convolve(x, next(parts), pooled)
            x = (x + next(parts)[:, None, None, None]).relu()
        x = x.reshape(count, batch, -1)
        x = _dense(x, next(parts), next(parts)).relu()
        return _dense(x, next(parts), next(parts))

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """The class probabilities (M, n, 10) of images (n, channels, side, side)."""
        largest = 9 * 32 * (self.recipe.side // 2) ** 2 * len(self)
        chunks = images.split(max(1, _PATCH_NUMBERS // largest))
        parts = [self.logits(channels_last(chunk)[None]).softmax(-1) for chunk in chunks]
        return torch.cat(parts, dim=1)


def channels_last(images: Tensor) -> Tensor:
    """Images (n, channels, side, side) as (n, side, side, channels)."""
    return images.permute(0, 2, 3, 1).contiguous()


def _layers(network: PaperNetwork) -> list[nn.Conv2d | nn.Linear]:
    return cast(list[nn.Conv2d | nn.Linear], list(network.children()))


def _bias(layer: nn.Conv2d | nn.Linear) -> Tensor:
    assert layer.bias is not None
    return layer.bias


@cache
def _sizes(recipe: Recipe) -> list[int]:
    """The numbers of each layer's matrix and biases in a row of weights, padding included."""
    layers = _layers(blank_network(recipe))
    shapes = [(layer.weight[0].numel(), len(layer.weight)) for layer in layers]
    sizes = [(_padded(inputs) * outputs, _padded(outputs)) for inputs, outputs in shapes]
    return [size for pair in sizes for size in pair]


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _flatten(network: PaperNetwork) -> Tensor:
    parts = []
    for layer in _layers(network):
        matrix = _to_matrix(layer.weight.detach(), layer, network)
        inputs, outputs = matrix.shape
        rows = matrix.new_zeros(_padded(inputs), outputs)
        rows[:inputs] = matrix
        biases = matrix.new_zeros(_padded(outputs))
        biases[:outputs] = _bias(layer).detach()
        parts += [rows.flatten(), biases]
    return torch.cat(parts)


def _to_matrix(weight: Tensor, layer: nn.Module, network: PaperNetwork) -> Tensor:
    """(outputs, channels, …) as (pixels·channels, outputs)."""
    pixels = _pixels(layer, network)
    return weight.reshape(len(weight), -1, pixels).permute(2, 1, 0).reshape(-1, len(weight))


def _from_matrix(matrix: Tensor, layer: nn.Conv2d | nn.Linear, network: PaperNetwork) -> Tensor:
    pixels = _pixels(layer, network)
    parts = matrix.view(pixels, -1, matrix.shape[1]).permute(2, 1, 0)
    return parts.reshape(layer.weight.shape)


def _pixels(layer: nn.Module, network: PaperNetwork) -> int:
    """Of how many pixels the inputs of a layer are the channels."""
    if isinstance(layer, nn.Conv2d):
        return _KERNEL**2
    return network.fc1.in_features // network.conv3.out_channels if layer is network.fc1 else 1


def _dense(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    matrix = weights.view(len(weights), x.shape[-1], -1)
    return torch.baddbmm(biases[:, None, : matrix.shape[-1]], x, matrix)


def _convolve(x: Tensor, weights: Tensor, pooled: bool) -> Tensor:
    """A 3×3 convolution of x (M, B, h, w, C), and the pooling after it; biases come later.

    A pooling of 2 drops the last row and column of an odd size: they are not computed.
    """
    count, batch, side = x.shape[:3]
    outputs = side - (_KERNEL - 1)
    if pooled:
        outputs -= outputs % 2
    patches = _PATCHES(x, outputs)  # (M, B·outputs², 9·C and some zeros)
    matrix = weights.view(count, patches.shape[-1], -1)
    result = _PRODUCT(patches, matrix).view(count, batch, outputs, outputs, -1)
    return _POOL(result) if pooled else result


class _Patches(torch.autograd.Function):
    """The 3×3 patches of images (M, B, h, w, C) as rows (M, B·outputs², 9·C and some zeros)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outputs: int) -> Tensor:
        ctx.shape, ctx.outputs = x.shape, outputs
        windows = x.unfold(2, _KERNEL, 1).unfold(3, _KERNEL, 1)[:, :, :outputs, :outputs]
        rows = windows.permute(0, 1, 2, 3, 5, 6, 4)  # (M, B, i, j, row, column, C)
        size = _KERNEL**2 * x.shape[-1]
        if size % _ALIGNED == 0:
            return rows.reshape(x.shape[0], -1, size)
        result = x.new_zeros(*rows.shape[:4], _padded(size))
        result[..., :size].view_as(rows).copy_(rows)
        return result.flatten(1, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        n = ctx.outputs
        gradient = gradients[0][..., : _KERNEL**2 * ctx.shape[-1]]
        parts = gradient.view(*ctx.shape[:2], n, n, _KERNEL, _KERNEL, ctx.shape[-1])
        result = parts.new_zeros(ctx.shape)
        for row in range(_KERNEL):
            for column in range(_KERNEL):
                result[:, :, row : row + n, column : column + n] += parts[:, :, :, :, row, column]
        return result, None


class _Product(torch.autograd.Function):
    """Patches (M, R, inputs) times matrices (M, inputs, outputs).

    The gradient of a matrix is a sum over all R patches with a small result: for a few matrices it
    is summed in parts, for a GPU to have enough to do at once. (For a single one, as it is.)
    """

    @staticmethod
    def forward(ctx: Any, patches: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(patches, matrix)
        return torch.bmm(patches, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        patches, matrix = ctx.saved_tensors
        gradient, (count, rows) = gradients[0], patches.shape[:2]
        parts = next((n for n in _PARTS if n * count >= _ENOUGH and rows % n == 0), 1)
        left = patches.reshape(count * parts, rows // parts, -1)
        right = gradient.reshape(count * parts, rows // parts, -1)
        of_matrix = torch.bmm(left.mT, right).view(count, parts, *matrix.shape[1:]).sum(1)
        of_patches = torch.bmm(gradient, matrix.mT) if ctx.needs_input_grad[0] else None
        return of_patches, of_matrix


class _Pool(torch.autograd.Function):
    """The largest of each 2×2 of images (M, B, h, w, C); of equals the first, as max_pool2d."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = x.unflatten(3, (-1, 2)).unbind(4)
        rows = torch.maximum(left, right)  # (M, B, h, w/2, C)
        top, bottom = rows.unflatten(2, (-1, 2)).unbind(3)
        ctx.save_for_backward(right > left, bottom > top)
        return torch.maximum(top, bottom)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        takes_right, takes_bottom = ctx.saved_tensors
        rows = _deal(gradients[0], takes_bottom, 3).flatten(2, 3)
        return _deal(rows, takes_right, 4).flatten(3, 4)


def _deal(gradient: Tensor, takes_second: Tensor, dim: int) -> Tensor:
    """Each gradient to the one of two that was taken, and zero to the other, along a new dim."""
    result = gradient.new_empty(*gradient.shape[:dim], 2, *gradient.shape[dim:])
    first, second = result.unbind(dim)
    torch.mul(gradient, takes_second, out=second)
    torch.sub(gradient, second, out=first)
    return result


_PATCHES: Callable[[Tensor, int], Tensor] = _Patches.apply
_PRODUCT: Callable[[Tensor, Tensor], Tensor] = _Product.apply
_POOL: Callable[[Tensor], Tensor] = _Pool.apply
