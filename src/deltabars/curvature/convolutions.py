"""Convolutions of a traced graph, in the forms that a device is fastest at.

* On a GPU the gradients are taken as a convolution with the flipped weights and as matrix products
  with the patches: in float32 cuDNN's own ways are several times slower there, and its transforms
  cost digits.
* On a CPU the channels come last in memory, as oneDNN likes them best.
* On both a convolution of so few channels that its patches are cheap to keep (of a grey image, say)
  is a matrix product with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.graphs import arguments, dependent, each, once, replace, shape_of
from deltabars.curvature.patches import patches

aten = torch.ops.aten

_FEW_COLUMNS = 32  # of a weight, as a matrix


def rewrite_convolutions(graph: Graph, tangents: Sequence[Node], device: torch.device) -> None:
    """Rewrite those that depend on the tangents, in place."""
    varying = dependent(graph, tangents)
    each(graph, aten.convolution.default, partial(_by_patches, varying))
    if device.type == "cuda":
        each(graph, aten.convolution_backward.default, _gradients_on_gpu)
    elif device.type == "cpu":
        each(graph, aten.convolution.default, partial(_with_channels_last, varying))
        each(graph, aten.convolution_backward.default, partial(_gradients_on_cpu, varying))


def input_gradient(signal: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """Σ over outputs of signal (B, O, h, w) times weight (O, I, k, l): (B, I, H, W).

    A convolution of stride 1 has the convolution with the flipped weights as its transpose.
    """
    flipped = weight.flip(2, 3).transpose(0, 1)
    full = (weight.shape[2] - 1 - padding[0], weight.shape[3] - 1 - padding[1])
    return F.conv2d(signal, flipped, padding=full)


def positions_first(signal: Tensor) -> Tensor:
    """A signal (B, O, h, w) as (B·T, O)."""
    return signal.flatten(2).mT.reshape(-1, signal.shape[1])


def weight_gradient(rows: Tensor, positions: Tensor, shape: list[int]) -> Tensor:
    """Σ over examples and positions of signals (B·T, O) times patches (B, T, I): `shape`."""
    return (rows.T @ positions.flatten(0, 1)).view(shape)


def small_weight_gradient(signal: Tensor, positions: Tensor, shape: list[int]) -> Tensor:
    """The same of signals (B, O, h, w), for weights that are small beside the signals."""
    return torch.bmm(signal.flatten(2), positions).sum(0).view(shape)


def convolve(weight: Tensor, positions: Tensor, size: Sequence[int]) -> Tensor:
    """The convolution with weights (O, I, k, l) from the patches (B, T, I·k·l): (B, O, *size)."""
    return (weight.flatten(1) @ positions.mT).unflatten(2, size)


def channels_last(images: Tensor) -> Tensor:
    """The same images, with the channels last in memory."""
    return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _gradients_on_gpu(graph: Graph, node: Node) -> None:
    signal, source, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments(node)
    shape = list(shape_of(weight))
    if transposed or groups != 1 or len(shape) != 4:
        return
    kernel, steps, edges, spacing = (
        tuple(sizes) for sizes in (shape[2:], stride, padding, dilation)
    )
    flips = steps == spacing == (1, 1) and all(e < k for e, k in zip(edges, kernel, strict=True))
    for use in list(node.users):
        if use.args[1] == 0 and flips:
            new = graph.call_function(input_gradient, (signal, weight, edges))
        elif use.args[1] == 1:
            cut = once(graph, patches, source, kernel, steps, edges, spacing)
            new = _weight_gradient(graph, signal, cut, shape)
        else:
            continue
        replace(use, new)


def _weight_gradient(graph: Graph, signal: Node, cut: Node, shape: list[int]) -> Node:
    outputs, inputs = shape[0], math.prod(shape[1:])
    positions = math.prod(shape_of(signal)[2:])
    if 4 * outputs * inputs <= positions * (outputs + inputs):
        return graph.call_function(small_weight_gradient, (signal, cut, shape))
    rows = graph.call_function(positions_first, (signal,))
    return graph.call_function(weight_gradient, (rows, cut, shape))


def _by_patches(varying: set[Node], graph: Graph, node: Node) -> None:
    """The convolution of something fixed and of few channels, from its patches."""
    source, weight, bias, stride, padding, dilation, transposed, _, groups = arguments(node)
    if node not in varying or source in varying or transposed or not _has_few(weight, groups):
        return
    cut = _patches(graph, source, weight, stride, padding, dilation)
    new = graph.call_function(convolve, (weight, cut, shape_of(node)[2:]))
    if bias is not None:
        column = graph.call_function(aten.reshape.default, (bias, [-1, 1, 1]))
        new = graph.call_function(aten.add.Tensor, (new, column))
    replace(node, new)


def _with_channels_last(varying: set[Node], graph: Graph, node: Node) -> None:
    if node in varying and len(shape_of(node)) == 4 and not arguments(node)[6]:
        node.args = (once(graph, channels_last, arguments(node)[0]), *node.args[1:])


def _gradients_on_cpu(varying: set[Node], graph: Graph, node: Node) -> None:
    signal, source, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments(node)
    if node not in varying or len(shape_of(weight)) != 4 or transposed:
        return
    uses = list(node.users)
    by_weight_alone = [use.args[1] for use in uses] == [1]
    if source in varying or not by_weight_alone or not _has_few(weight, groups):
        both = (once(graph, channels_last, images) for images in (signal, source))
        node.args = (*both, *node.args[2:])
        return
    cut = _patches(graph, source, weight, stride, padding, dilation)
    shape = list(shape_of(weight))
    replace(uses[0], graph.call_function(small_weight_gradient, (signal, cut, shape)))


def _has_few(weight: Node, groups: int) -> bool:
    """Whether a weight has so few columns, as a matrix, that patches are cheap to keep."""
    shape = shape_of(weight)
    return len(shape) == 4 and groups == 1 and math.prod(shape[1:]) <= _FEW_COLUMNS


def _patches(graph: Graph, source: Node, weight: Node, *window: Any) -> Node:
    sizes = (shape_of(weight)[2:], *(tuple(part) for part in window))
    return once(graph, patches, source, *sizes)
