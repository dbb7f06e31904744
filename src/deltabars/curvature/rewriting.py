"""Rewrite the traced graph of Hessian products: less work, the same numbers.

Three rules, kept for what they measured (one H200, the paper's network; see docs/performance.md):

* sums and products with zeros, and second names of tensors, are left out;
* the gradient of a max pooling is one scatter, and ReLU masks next to a pooling are applied to the
  pooled values, which are fewer;
* on a GPU gradients of convolutions are convolutions with flipped weights and matrix products of
  patches: cuDNN's choice in float32 is an FFT, which takes twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.layers import patches

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
    aten.index_select.default,
}  # fmt: skip
_ZERO_IN_EITHER = {aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.convolution.default}
_SAME = {aten.alias.default, aten.detach.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
# The stride (empty: the kernel's), the padding and the dilation of a pooling.
_DEFAULTS: tuple[list[int], ...] = ([], [0, 0], [1, 1])


def rewrite(graph: Graph, device: torch.device) -> None:
    """Rewrite a graph in place, for the device that it will run on."""
    _leave_out_names(graph)
    _leave_out_zeros(graph)
    _each(graph, aten.max_pool2d_with_indices_backward.default, _pooling_gradient)
    _each(graph, aten.threshold_backward.default, _mask_before_unpooling)
    _each(graph, aten.gather.default, _mask_after_gathering)
    if device.type == "cuda":
        _each(graph, aten.convolution_backward.default, _convolution_gradients)
    graph.eliminate_dead_code()
    graph.lint()


def kind(node: Node) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and type of a node's result, as they were when it was traced."""
    seen = node.meta["tensor_meta"] if "tensor_meta" in node.meta else node.meta["val"]
    return tuple(seen.shape), seen.dtype


def dependent(graph: Graph, on: Iterable[Node]) -> set[Node]:
    """Return some arguments of a graph, and every call that depends on them."""
    varying = set(on)
    for node in graph.nodes:
        if node.op == "call_function" and not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return varying


def _each(
    graph: Graph, target: Any, change: Callable[[Graph, Node, tuple[Any, ...]], None]
) -> None:
    """Let `change` rewrite every call of a function; it inserts before the call."""
    for node in list(graph.find_nodes(op="call_function", target=target)):
        with graph.inserting_before(node):
            change(graph, node, node.args)


def _calls(value: Any, target: Any) -> bool:
    return isinstance(value, Node) and value.target == target


def _replace(node: Node, new: Node) -> None:
    """Put a node in the place of another, of the same shape and type."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _leave_out_names(graph: Graph) -> None:
    """Leave out second names of a tensor; let views hold for any strides from here on."""
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
            zero = second if kept is first else first
            if zero in zeros and isinstance(kept, Node) and kind(kept) == kind(node):
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


def unpool(pooled: Tensor, indices: Tensor, size: tuple[int, int]) -> Tensor:
    """Put values (B, C, h, w) back where a max pooling took them from, in (B, C, *size)."""
    filled = pooled.new_zeros(*pooled.shape[:-2], size[0] * size[1])
    flat, values = indices.flatten(-2), pooled.flatten(-2)
    if torch._C._functorch.is_batchedtensor(pooled):  # vmap has no rule for the one in place
        return filled.scatter(-1, flat, values).unflatten(-1, size)
    with _in_any_order():  # no position is written twice
        filled.scatter_(-1, flat, values)
    return filled.unflatten(-1, size)


@contextmanager
def _in_any_order() -> Iterator[None]:
    """Let torch write in any order, also where deterministic algorithms are asked for."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


def _pick(values: Tensor, indices: Tensor) -> Tensor:
    """Return the values of (B, C, H, W) at flat positions (B, C, h, w)."""
    return values.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)


def _pooling_gradient(graph: Graph, node: Node, arguments: tuple[Any, ...]) -> None:
    pooled, source, kernel, *rest, _, indices = arguments
    stride, padding, dilation = (*rest, *_DEFAULTS[len(rest) :])[:3]
    overlap = list(stride or kernel) != list(kernel) or any(d != 1 for d in dilation)
    if len(kind(source)[0]) == 4 and len(kernel) == 2 and not overlap and not any(padding):
        _replace(node, graph.call_function(unpool, (pooled, indices, kind(source)[0][-2:])))


def _mask_before_unpooling(graph: Graph, node: Node, arguments: tuple[Any, ...]) -> None:
    """Rewrite mask ∘ unpool as unpool ∘ (the mask at the positions that are filled)."""
    signal, active, threshold = arguments
    if not _calls(signal, unpool):
        return
    pooled, indices, size = signal.args
    there = graph.call_function(_pick, (active, indices))
    masked = graph.call_function(aten.threshold_backward.default, (pooled, there, threshold))
    _replace(node, graph.call_function(unpool, (masked, indices, size)))


def _mask_after_gathering(graph: Graph, node: Node, arguments: tuple[Any, ...]) -> None:
    """Rewrite gather ∘ mask as (the mask at the gathered positions) ∘ gather."""
    view, dim, indices = arguments[:3]
    if not _calls(view, aten.reshape.default):
        return
    mask, shape = view.args
    if not _calls(mask, aten.threshold_backward.default):
        return
    whole, active, threshold = mask.args
    parts = []
    for part in (whole, active):
        flat = graph.call_function(aten.reshape.default, (part, shape))
        parts.append(graph.call_function(aten.gather.default, (flat, dim, indices)))
        parts[-1].meta = dict(node.meta)
    _replace(node, graph.call_function(aten.threshold_backward.default, (*parts, threshold)))


def _convolution_gradients(graph: Graph, node: Node, arguments: tuple[Any, ...]) -> None:
    signal, source, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments
    shape = kind(weight)[0]
    if transposed or groups != 1 or len(shape) != 4:
        return
    window = (shape[2:], tuple(stride), tuple(padding), tuple(dilation))
    flips = window[1] == window[3] == (1, 1) and all(
        edge < size for edge, size in zip(window[2], window[0], strict=True)
    )
    for use in list(node.users):
        if use.args[1] == 0 and flips:
            new = graph.call_function(input_gradient, (signal, weight, window[2]))
        elif use.args[1] == 1:
            cut = _once(graph, patches, source, *window)
            new = graph.call_function(weight_gradient, (signal, cut, shape))
        else:
            continue
        _replace(use, new)


def _once(graph: Graph, target: Any, source: Node, *rest: Any) -> Node:
    """Return the call of a function on a node: the one that is there, or a new one after it."""
    for use in source.users:
        if use.target == target and use.args == (source, *rest):
            return use
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1] if source in placeholders else source):
        return graph.call_function(target, (source, *rest))


def input_gradient(signal: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """Transpose a convolution of stride 1: signal (B, O, h, w), weight (O, I, k, l) -> (B, I, H, W).

    It is the convolution with the flipped weights.
    """
    flipped = weight.flip(2, 3).transpose(0, 1)
    full = (weight.shape[2] - 1 - padding[0], weight.shape[3] - 1 - padding[1])
    return F.conv2d(signal, flipped, padding=full)


def weight_gradient(signal: Tensor, positions: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum signals (B, O, h, w) times patches (B, T, I) over examples and positions: `shape`."""
    outputs, inputs, count = shape[0], math.prod(shape[1:]), positions.shape[-2]
    if 4 * outputs * inputs <= count * (outputs + inputs):  # small beside the signals
        return torch.bmm(signal.flatten(2), positions).sum(0).view(shape)
    rows = signal.flatten(2).mT.reshape(-1, signal.shape[1])  # (B·T, O)
    return (rows.T @ positions.flatten(0, 1)).view(shape)
