"""Rewrites around poolings whose windows do not overlap; what they compute is the same.

* The gradient of such a pooling is one scatter.
* A mask, a sum or a bias beside it is taken of the pooled tensor, which is the smaller one.
* Rows and columns that no window covers have no gradient, and are left out of the gradients of the
  convolution before it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.graphs import arguments, calls, each, kind, replace, shape_of
from deltabars.curvature.ordering import in_any_order

aten = torch.ops.aten

Pair = tuple[int, int]

_COVERED = "covered"  # what is known of an unpooled tensor: the part that windows cover
# The kernel, the stride (empty: the kernel's), the padding and the dilation of a pooling.
_DEFAULTS: tuple[list[int], ...] = ([], [], [0, 0], [1, 1])


def rewrite_poolings(graph: Graph) -> None:
    """Rewrite a graph in place."""
    each(graph, aten.max_pool2d_with_indices_backward.default, _pooling_gradient)
    each(graph, aten.threshold_backward.default, _mask_before_unpooling)
    each(graph, aten.gather.default, _mask_after_gathering)
    graph.eliminate_dead_code()  # so that a use of a result is one that counts
    each(graph, aten.gather.default, _bias_after_gathering)
    each(graph, aten.gather.default, _gather_from_covered_part)
    each(graph, aten.sum.dim_IntList, _sum_before_unpooling)
    each(graph, unpool, _unpool_covered_part)
    each(graph, aten.convolution_backward.default, _convolution_of_covered_part)
    each(graph, aten.add.Tensor, _widen_the_sum)


def unpool(pooled: Tensor, indices: Tensor, size: Pair) -> Tensor:
    """Put the values of (B, C, h, w) back where they were taken from in (B, C, *size)."""
    filled = pooled.new_zeros(*pooled.shape[:-2], size[0] * size[1])
    places, values = indices.flatten(-2), pooled.flatten(-2)
    with in_any_order():  # no place is filled twice
        if torch._C._functorch.is_batchedtensor(pooled):  # vmap has no rule for the one in place
            filled = filled.scatter(-1, places, values)
        else:
            filled.scatter_(-1, places, values)
    return filled.unflatten(-1, size)


def renumber(indices: Tensor, width: int, narrow: int) -> Tensor:
    """Flat positions in rows of `width` as those in rows of `narrow`."""
    return indices // width * narrow + indices % width


def widen(part: Tensor, size: Pair) -> Tensor:
    """A larger (…, *size) with `part` in its upper left corner and zeros elsewhere."""
    return F.pad(part, (0, size[1] - part.shape[-1], 0, size[0] - part.shape[-2]))


def upper_left(whole: Tensor, size: Pair) -> Tensor:
    """The upper left part (…, *size) of a larger tensor."""
    return whole[..., : size[0], : size[1]].contiguous()


def _covered(source: Node, indices: Node, window: Sequence[Any]) -> Pair | None:
    """The part of a pooling's source that its windows cover; None where they overlap."""
    kernel, stride, padding, dilation = (*window, *_DEFAULTS[len(window) :])[:4]
    if len(shape_of(source)) != 4 or len(kernel) != 2:
        return None
    if list(stride or kernel) != list(kernel) or any(padding) or any(d != 1 for d in dilation):
        return None
    sizes = zip(shape_of(source)[-2:], kernel, shape_of(indices)[-2:], strict=True)
    height, width = (min(size, reach * count) for size, reach, count in sizes)
    return height, width


def _pooling_gradient(graph: Graph, node: Node) -> None:
    pooled, source, *window, _, indices = arguments(node)
    node.meta[_COVERED] = _covered(source, indices, window)
    if node.meta[_COVERED] is not None:
        size = shape_of(source)[-2:]
        replace(node, graph.call_function(unpool, (pooled, indices, size)))


def _mask_before_unpooling(graph: Graph, node: Node) -> None:
    """Mask ∘ unpool = unpool ∘ (the mask at the places that are filled)."""
    signal, active, threshold = arguments(node)
    if not calls(signal, unpool):
        return
    pooled, indices, size = signal.args
    there = graph.call_function(_pick, (active, indices))
    masked = graph.call_function(aten.threshold_backward.default, (pooled, there, threshold))
    node.meta[_COVERED] = signal.meta[_COVERED]
    replace(node, graph.call_function(unpool, (masked, indices, size)))


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
    for part in parts:
        part.meta = dict(node.meta)
    replace(node, graph.call_function(aten.threshold_backward.default, (*parts, threshold)))


def _bias_after_gathering(graph: Graph, node: Node) -> None:
    """A bias that is the same at all places can be added to what was gathered from them."""
    view, dim = arguments(node)[:2]
    if dim != -1 or not calls(view, aten.reshape.default) or len(view.users) > 1:
        return
    source = view.args[0]
    lines = shape_of(node)[:-1]  # (B, C), where it is a gathering from the places of each channel
    if lines != shape_of(source)[:2] or list(view.args[1][:-1]) != list(lines):
        return
    is_sum = calls(source, aten.add.Tensor) and not source.kwargs and len(source.users) == 1
    terms = source.args if is_sum and source.args[0] is not source.args[1] else (source,)
    for term in terms:
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


def _unpool_covered_part(graph: Graph, node: Node) -> None:
    pooled, indices, size = arguments(node)
    covered = node.meta[_COVERED]
    if size == covered:
        return
    there = graph.call_function(renumber, (indices, size[1], covered[1]))
    part = graph.call_function(unpool, (pooled, there, covered))
    part.meta = _like(node, covered)
    replace(node, graph.call_function(widen, (part, size)))


def _seen(
    weight: Node, stride: Sequence[int], dilation: Sequence[int], part: Sequence[int]
) -> Pair:
    """What a convolution without padding looks at to compute an upper left part."""
    sizes = zip(part, stride, dilation, shape_of(weight)[-2:], strict=True)
    height, width = ((n - 1) * step + gap * (reach - 1) + 1 for n, step, gap, reach in sizes)
    return height, width


def _gather_from_covered_part(graph: Graph, node: Node) -> None:
    """Convolutions that a pooling is taken of are only computed where its windows cover them."""
    view, dim, places = arguments(node)[:3]
    if (
        dim != -1
        or not calls(view, aten.reshape.default)
        or not calls(places, aten.reshape.default)
    ):
        return
    source, indices = view.args[0], places.args[0]
    if not calls(indices, operator.getitem):
        return
    pooling = indices.args[0]
    if not calls(pooling, aten.max_pool2d_with_indices.default):
        return
    shape = shape_of(source)
    covered = _covered(pooling.args[0], indices, pooling.args[1:5])
    if covered is None or covered == shape[-2:] or shape[-2:] != shape_of(pooling.args[0])[-2:]:
        return
    is_sum = calls(source, aten.add.Tensor) and not source.kwargs
    terms = source.args if is_sum else (source,)
    if not all(_is_plain_convolution(term) for term in terms):
        return
    if list(view.args[1]) != [*shape[:2], shape[2] * shape[3]] or shape_of(places)[:2] != shape[:2]:
        return
    parts = [_convolve_part(graph, term, covered) for term in terms]
    total = graph.call_function(aten.add.Tensor, tuple(parts)) if len(parts) > 1 else parts[0]
    flat = graph.call_function(aten.reshape.default, (total, [*shape[:2], covered[0] * covered[1]]))
    there = graph.call_function(renumber, (places, shape[3], covered[1]))
    replace(node, graph.call_function(aten.gather.default, (flat, dim, there)))


def _is_plain_convolution(term: Any) -> bool:
    """Whether a term is a convolution (not a transposed one) without padding."""
    return calls(term, aten.convolution.default) and not term.args[6] and not any(term.args[4])


def _convolve_part(graph: Graph, term: Node, part: Pair) -> Node:
    """The upper left part of a convolution."""
    source, weight, bias, stride, *rest = arguments(term)
    seen = _seen(weight, stride, rest[1], part)
    below = graph.call_function(upper_left, (source, seen))
    below.meta = _like(source, seen)
    result = graph.call_function(aten.convolution.default, (below, weight, bias, stride, *rest))
    result.meta = _like(term, part)
    return result


def _convolution_of_covered_part(graph: Graph, node: Node) -> None:
    """Gradients of a convolution whose output is only looked at where windows cover it."""
    signal, source, weight, _, stride, padding, dilation, transposed, *_ = arguments(node)
    if not calls(signal, widen) or transposed or any(padding):
        return
    part = signal.args[0]
    seen = _seen(weight, stride, dilation, shape_of(part)[-2:])
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
                new = graph.call_function(widen, (new, shape_of(source)[-2:]))
        replace(use, new)


def _widen_the_sum(graph: Graph, node: Node) -> None:
    """The sum of two widened parts is the widened sum."""
    first, second = arguments(node)[:2]
    if not calls(first, widen) or not calls(second, widen) or node.kwargs:
        return
    parts = first.args[0], second.args[0]
    if first.args[1] == second.args[1] and shape_of(parts[0]) == shape_of(parts[1]):
        total = graph.call_function(aten.add.Tensor, parts)
        total.meta = dict(parts[0].meta)
        replace(node, graph.call_function(widen, (total, first.args[1])))


def _like(node: Node, size: Pair) -> dict[str, Any]:
    """What is known of a tensor that differs from another one in its last two sizes alone."""
    shape, dtype = kind(node)
    return {"val": torch.empty(*shape[:-2], *size, dtype=dtype, device="meta")}


def _pick(values: Tensor, indices: Tensor) -> Tensor:
    """The values of (B, C, H, W) at flat positions (B, C, h, w)."""
    return values.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)
