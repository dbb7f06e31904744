"""Rewrites around poolings whose windows do not overlap; what they compute is the same.

* The gradient of such a pooling is one scatter.
* A mask, a sum or a bias beside it is taken of the pooled tensor, which is the smaller one.
* Rows and columns that no window covers have no gradient, and are left out of the gradients of the
  convolution before it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.graphs import arguments, calls, each, kind, replace, shape_of

aten = torch.ops.aten

Pair = tuple[int, int]


def rewrite_poolings(graph: Graph) -> None:
    """Rewrite a graph in place."""
    each(graph, aten.max_pool2d_with_indices_backward.default, _pooling_gradient)
    each(graph, aten.threshold_backward.default, _mask_before_unpooling)
    each(graph, aten.gather.default, _mask_after_gathering)
    graph.eliminate_dead_code()  # so that a use of a result is one that counts
    each(graph, aten.gather.default, _bias_after_gathering)
    each(graph, aten.sum.dim_IntList, _sum_before_unpooling)
    each(graph, aten.convolution_backward.default, _convolution_of_covered_part)


def unpool(pooled: Tensor, indices: Tensor, size: Pair, covered: Pair) -> Tensor:
    """Put the values of (B, C, h, w) back where they were taken from in (B, C, *size).

    The windows cover the upper left part `covered` of it; what is beyond is zero.
    """
    return widen(spread(pooled, indices, size[1], covered), size)


def spread(pooled: Tensor, indices: Tensor, width: int, covered: Pair) -> Tensor:
    """The part of `unpool` that the windows cover, (B, C, *covered)."""
    if width != covered[1]:
        indices = indices // width * covered[1] + indices % width
    empty = pooled.new_zeros(*pooled.shape[:-2], covered[0] * covered[1])
    filled = empty.scatter(-1, indices.flatten(-2), pooled.flatten(-2))
    return filled.unflatten(-1, covered)


def widen(part: Tensor, size: Pair) -> Tensor:
    """The upper left part of a larger (…, *size), which is zero beyond it."""
    rows, columns = size[0] - part.shape[-2], size[1] - part.shape[-1]
    return F.pad(part, (0, columns, 0, rows)) if rows or columns else part


def upper_left(whole: Tensor, size: Pair) -> Tensor:
    """The upper left part (…, *size) of a larger tensor."""
    return whole[..., : size[0], : size[1]].contiguous()


def _pooling_gradient(graph: Graph, node: Node) -> None:
    pooled, source, kernel, stride, padding, dilation, _, indices = arguments(node)
    overlaps = list(stride or kernel) != list(kernel)
    if overlaps or any(padding) or any(step != 1 for step in dilation):
        return
    size = shape_of(source)[-2:]
    windows = shape_of(indices)[-2:]
    covered = tuple(min(n, k * w) for n, k, w in zip(size, kernel, windows, strict=True))
    replace(node, graph.call_function(unpool, (pooled, indices, size, covered)))


def _mask_before_unpooling(graph: Graph, node: Node) -> None:
    """Mask ∘ unpool = unpool ∘ (the mask at the places that are filled)."""
    signal, active, threshold = arguments(node)
    if not calls(signal, unpool):
        return
    pooled, indices, *sizes = signal.args
    there = graph.call_function(_pick, (active, indices))
    masked = graph.call_function(aten.threshold_backward.default, (pooled, there, threshold))
    replace(node, graph.call_function(unpool, (masked, indices, *sizes)))


def _mask_after_gathering(graph: Graph, node: Node) -> None:
    """Gather ∘ mask = (the mask at the gathered places) ∘ gather."""
    view, dim, indices = arguments(node)[:3]
    if not calls(view, aten.reshape.default):
        return
    mask = view.args[0]
    if not calls(mask, aten.threshold_backward.default):
        return
    whole, active, threshold = mask.args
    parts = [
        graph.call_function(
            aten.gather.default,
            (graph.call_function(aten.reshape.default, (part, view.args[1])), dim, indices),
        )
        for part in (whole, active)
    ]
    replace(node, graph.call_function(aten.threshold_backward.default, (*parts, threshold)))


def _bias_after_gathering(graph: Graph, node: Node) -> None:
    """A bias that is the same at all places can be added to what was gathered from them."""
    view, dim = arguments(node)[:2]
    if not calls(view, aten.reshape.default):
        return
    source = view.args[0]
    if dim != -1 or len(view.args[1]) != 3 or shape_of(source)[:2] != tuple(view.args[1][:2]):
        return
    is_sum = calls(source, aten.add.Tensor) and len(source.users) == 1
    for term in source.args if is_sum else (source,):
        alone = calls(term, aten.convolution.default) and len(term.users) == 1
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
    signal, dims = arguments(node)[:2]
    if calls(signal, unpool) and list(dims) == [0, 2, 3]:
        node.args = (signal.args[0], *node.args[1:])


def _convolution_of_covered_part(graph: Graph, node: Node) -> None:
    """Gradients of a convolution whose output is only looked at where windows cover it."""
    signal, source, weight, _, stride, padding, dilation, transposed, *_ = arguments(node)
    if not calls(signal, unpool) or transposed or any(padding):
        return
    pooled, indices, size, covered = signal.args
    if size == covered:
        return
    whole = shape_of(source)[-2:]
    seen = tuple(
        (count - 1) * step + gap * (reach - 1) + 1
        for count, step, gap, reach in zip(
            covered, stride, dilation, shape_of(weight)[-2:], strict=True
        )
    )
    part = graph.call_function(spread, (pooled, indices, size[1], covered))
    part.meta = _like(signal, covered)
    below = graph.call_function(upper_left, (source, seen))
    below.meta = _like(source, seen)
    gradients = graph.call_function(
        aten.convolution_backward.default, (part, below, *node.args[2:])
    )
    for use in list(node.users):
        with graph.inserting_before(use):
            new = graph.call_function(operator.getitem, (gradients, use.args[1]))
            if use.args[1] == 0:
                new.meta = _like(source, seen)
                new = graph.call_function(widen, (new, whole))
        replace(use, new)


def _like(node: Node, size: Pair) -> dict[str, Any]:
    """What is known of a tensor that differs from another one in its last two sizes alone."""
    shape, dtype = kind(node)
    return {"val": torch.empty(*shape[:-2], *size, dtype=dtype, device="meta")}


def _pick(values: Tensor, indices: Tensor) -> Tensor:
    """The values of (B, C, H, W) at flat positions (B, C, h, w)."""
    return values.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)
