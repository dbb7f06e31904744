"""Cheaper forms for some operations of a traced graph; what they compute is the same.

* Zeros that automatic differentiation adds are left out.
* A mask on both sides of a pooling is applied to the pooled tensor, which is the smaller one.
* The gradient of a pooling whose windows do not overlap is one scatter.
* On a GPU the gradients of a convolution are taken as a convolution with the flipped weights and
  as matrix products with the patches: in float32 cuDNN's own ways are several times slower there,
  and its transforms cost digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.patches import patches

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
    _each(graph, aten.max_pool2d_with_indices_backward.default, _pooling_gradient)
    _each(graph, aten.threshold_backward.default, _mask_before_unpooling)
    _each(graph, aten.gather.default, _mask_after_gathering)
    graph.eliminate_dead_code()  # so that a use of a result is one that counts
    _each(graph, aten.gather.default, _bias_after_gathering)
    _each(graph, aten.sum.dim_IntList, _sum_before_unpooling)
    if device.type == "cuda":
        _each(graph, aten.convolution_backward.default, _convolution_gradients)
    graph.eliminate_dead_code()
    graph.lint()


def unpool(pooled: Tensor, indices: Tensor, height: int, width: int) -> Tensor:
    """Put the values of (B, C, h, w) back where they were taken from in (B, C, height, width)."""
    empty = pooled.new_zeros(*pooled.shape[:-2], height * width)
    spread = empty.scatter(-1, indices.flatten(-2), pooled.flatten(-2))
    return spread.unflatten(-1, (height, width))


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


def _each(graph: Graph, target: Any, change: Callable[[Graph, Node], None]) -> None:
    for node in list(graph.find_nodes(op="call_function", target=target)):
        with graph.inserting_before(node):
            change(graph, node)


def _replace(node: Node, new: Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _is(value: Any, target: Any) -> bool:
    return isinstance(value, Node) and value.target == target


def _kind(node: Node) -> tuple[tuple[int, ...], torch.dtype]:
    seen = node.meta["tensor_meta"] if "tensor_meta" in node.meta else node.meta["val"]
    return tuple(seen.shape), seen.dtype


def _shape(node: Node) -> tuple[int, ...]:
    return _kind(node)[0]


def _leave_out_names(graph: Graph) -> None:
    """Leave out second names of a tensor; and views hold for any strides from here on."""
    for node in list(graph.nodes):
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _VIEWS:
            node.target = aten.reshape.default


def _leave_out_zeros(graph: Graph) -> None:
    zeros: set[Any] = set()
    for node in list(graph.nodes):
        first, second = (*node.args, None, None)[:2]
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            kept = second if first in zeros and node.target == aten.add.Tensor else first
            left_out = second if kept is first else first
            if left_out in zeros and isinstance(kept, Node) and _kind(kept) == _kind(node):
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


def _pooling_gradient(graph: Graph, node: Node) -> None:
    pooled, source, kernel, stride, padding, dilation, _, indices = _arguments(node)
    overlaps = list(stride or kernel) != list(kernel)
    if not overlaps and not any(padding) and all(step == 1 for step in dilation):
        size = _shape(source)[-2:]
        _replace(node, graph.call_function(unpool, (pooled, indices, *size)))


def _mask_before_unpooling(graph: Graph, node: Node) -> None:
    """Mask ∘ unpool = unpool ∘ (the mask at the places that are filled)."""
    spread, active, threshold = _arguments(node)
    if not _is(spread, unpool):
        return
    pooled, indices, *size = spread.args
    there = graph.call_function(_pick, (active, indices))
    masked = graph.call_function(aten.threshold_backward.default, (pooled, there, threshold))
    _replace(node, graph.call_function(unpool, (masked, indices, *size)))


def _mask_after_gathering(graph: Graph, node: Node) -> None:
    """Gather ∘ mask = (the mask at the gathered places) ∘ gather."""
    view, dim, indices = _arguments(node)[:3]
    if not _is(view, aten.reshape.default):
        return
    mask = view.args[0]
    if not _is(mask, aten.threshold_backward.default):
        return
    whole, active, threshold = mask.args
    parts = [
        graph.call_function(
            aten.gather.default,
            (graph.call_function(aten.reshape.default, (part, view.args[1])), dim, indices),
        )
        for part in (whole, active)
    ]
    _replace(node, graph.call_function(aten.threshold_backward.default, (*parts, threshold)))


def _bias_after_gathering(graph: Graph, node: Node) -> None:
    """A bias that is the same at all places can be added to what was gathered from them."""
    view, dim = _arguments(node)[:2]
    if not _is(view, aten.reshape.default):
        return
    source = view.args[0]
    if dim != -1 or len(view.args[1]) != 3 or _shape(source)[:2] != tuple(view.args[1][:2]):
        return
    is_sum = _is(source, aten.add.Tensor) and len(source.users) == 1
    for term in source.args if is_sum else (source,):
        alone = _is(term, aten.convolution.default) and len(term.users) == 1
        if not alone or term.args[2] is None:
            continue
        bias = term.args[2]
        term.args = (*term.args[:2], None, *term.args[3:])
        with graph.inserting_after(node):
            column = graph.call_function(aten.unsqueeze.default, (bias, -1))
        with graph.inserting_after(column):
            total = graph.call_function(aten.add.Tensor, (node, column))
        total.meta = dict(node.meta)
        node.replace_all_uses_with(total)
        total.args = (node, column)


def _sum_before_unpooling(graph: Graph, node: Node) -> None:
    """The sum over all places is that over the places that are filled."""
    spread, dims = _arguments(node)[:2]
    if _is(spread, unpool) and list(dims) == [0, 2, 3]:
        node.args = (spread.args[0], *node.args[1:])


def _pick(values: Tensor, indices: Tensor) -> Tensor:
    """The values of (B, C, H, W) at flat positions (B, C, h, w)."""
    return values.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)


def _convolution_gradients(graph: Graph, node: Node) -> None:
    signal, source, weight, _, stride, padding, dilation, transposed, _, groups, _ = _arguments(
        node
    )
    shape = list(_shape(weight))
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
        _replace(use, new)


def _weight_gradient(graph: Graph, signal: Node, cut: Node, shape: list[int]) -> Node:
    outputs, inputs = shape[0], math.prod(shape[1:])
    positions = math.prod(_shape(signal)[2:])
    if 4 * outputs * inputs <= positions * (outputs + inputs):
        return graph.call_function(small_weight_gradient, (signal, cut, shape))
    rows = graph.call_function(positions_first, (signal,))
    return graph.call_function(weight_gradient, (rows, cut, shape))
