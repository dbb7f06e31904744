"""Cheaper forms for some operations of a traced graph; what they compute is the same.

* Zeros that automatic differentiation adds are left out.
* Around a pooling, what can be done to the pooled tensor is (see `pooling`).
* On a GPU the gradients of a convolution are taken as a convolution with the flipped weights and
  as matrix products with the patches: in float32 cuDNN's own ways are several times slower there,
  and its transforms cost digits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.graphs import arguments, each, kind, replace, shape_of
from deltabars.curvature.patches import patches
from deltabars.curvature.pooling import rewrite_poolings

aten = torch.ops.aten

_ZEROS = {
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default,
    aten._efficientzerotensor.default,
}  # fmt: skip
# Linear in the first argument, so that zeros stay zeros.
_KEEP_ZEROS = {
    aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.squeeze.dim, aten.unsqueeze.default, aten.slice.Tensor,
    aten.select.int, aten.sum.dim_IntList, aten.neg.default, aten.gather.default,
    aten.threshold_backward.default, aten.div.Tensor, aten.mul.Tensor, aten.mul.Scalar,
    aten.mm.default, aten.bmm.default, aten.clone.default, aten._to_copy.default,
}  # fmt: skip
_ZERO_IN_EITHER = {aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.convolution.default}
_SAME = {aten.alias.default, aten.detach.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}


def rewrite(graph: Graph, device: torch.device) -> None:
    """Rewrite a graph in place, for the device that it will run on."""
    _leave_out_names(graph)
    _leave_out_zeros(graph)
    rewrite_poolings(graph)
    if device.type == "cuda":
        each(graph, aten.convolution_backward.default, _convolution_gradients)
    graph.eliminate_dead_code()
    graph.lint()


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


def _leave_out_names(graph: Graph) -> None:
    """Leave out second names of a tensor; and views hold for any strides from here on."""
    for node in list(graph.nodes):
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target == aten.copy.default and kind(node.args[1]) == kind(node):
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
        elif node.target in _VIEWS:
            node.target = aten.reshape.default


def _leave_out_zeros(graph: Graph) -> None:
    zeros: set[Any] = set()
    for node in list(graph.nodes):
        first, second = (*node.args, None, None)[:2]
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            kept = second if first in zeros and node.target == aten.add.Tensor else first
            left_out = second if kept is first else first
            if left_out in zeros and isinstance(kept, Node) and kind(kept) == kind(node):
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
                continue
        stays = (node.target in _KEEP_ZEROS and first in zeros) or (
            node.target in _ZERO_IN_EITHER and (first in zeros or second in zeros)
        )
        if node.target == aten.convolution.default:
            stays = stays and (node.args[2] is None or node.args[2] in zeros)
        if node.target in _ZEROS or stays:
            zeros.add(node)


def _convolution_gradients(graph: Graph, node: Node) -> None:
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
            cut = graph.call_function(patches, (source, kernel, steps, edges, spacing))
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
