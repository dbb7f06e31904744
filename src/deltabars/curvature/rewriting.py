"""Small steps of rewriting a traced graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.layers import patches


def each(graph: Graph, target: Any, change: Callable[[Graph, Node], None]) -> None:
    """Let `change` rewrite every call of a function; it inserts before the call."""
    for node in list(graph.find_nodes(op="call_function", target=target)):
        with graph.inserting_before(node):
            change(graph, node)


def once(graph: Graph, target: Any, source: Node, *rest: Any) -> Node:
    """The call of a function on a node: one that is there already, or a new one next to it."""
    for use in source.users:
        if use.target == target and use.args == (source, *rest):
            return use
    arguments = graph.find_nodes(op="placeholder")
    with graph.inserting_after(arguments[-1] if source in arguments else source):
        return graph.call_function(target, (source, *rest))


def replace(node: Node, new: Node) -> None:
    """Put a node in the place of another one, of the same shape and type."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a call, free of the union of types that fx gives them."""
    return node.args


def calls(value: Any, target: Any) -> bool:
    """Whether a value is the call of a function."""
    return isinstance(value, Node) and value.target == target


def kind(node: Node) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and type of a node's result, as they were when it was traced."""
    seen = node.meta["tensor_meta"] if "tensor_meta" in node.meta else node.meta["val"]
    return tuple(seen.shape), seen.dtype


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of a node's result."""
    return kind(node)[0]


def dependent(graph: Graph, on: Iterable[Node]) -> set[Node]:
    """Some arguments of a graph, and every call that depends on them."""
    varying = set(on)
    for node in graph.nodes:
        if node.op == "call_function" and not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
    return varying


aten = torch.ops.aten


@contextmanager
def in_any_order() -> Iterator[None]:
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


def rewrite_placings(graph: Graph) -> None:
    """Rewrite a graph in place: additions at places that are known to differ need no order."""
    each(graph, aten.index_add.default, _place_without_order)


def place(whole: Tensor, dim: int, places: Tensor, parts: Tensor) -> Tensor:
    """`whole` with `parts` added at places along a dimension that are all different."""
    with in_any_order():
        return whole.index_add(dim, places, parts)


def _place_without_order(graph: Graph, node: Node) -> None:
    whole, dim, places, parts = arguments(node)[:4]
    if node.kwargs or len(node.args) > 4 or places.op != "get_attr":
        return
    module = graph.owning_module
    known = getattr(module, str(places.target), None) if module is not None else None
    if isinstance(known, Tensor) and known.unique().numel() == known.numel():
        replace(node, graph.call_function(place, (whole, dim, places, parts)))


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


def rewrite(graph: Graph, tangents: Sequence[Node], device: torch.device) -> None:
    """Rewrite a graph in place, for the device that it will run on.

    The tangents are the arguments that change from call to call.
    """
    _leave_out_names(graph)
    _leave_out_zeros(graph)
    rewrite_poolings(graph)
    rewrite_convolutions(graph, tangents, device)
    rewrite_placings(graph)
    graph.eliminate_dead_code()
    graph.lint()


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
