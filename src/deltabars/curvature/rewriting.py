"""Cheaper forms for some operations of a traced graph; what they compute is the same.

* Zeros that automatic differentiation adds are left out.
* Around a pooling, what can be done to the pooled tensor is (see `pooling`).
* Convolutions take the forms that the device is fastest at (see `convolutions`).
* What is written to places that all differ needs no order (see `ordering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from deltabars.curvature.convolutions import rewrite_convolutions
from deltabars.curvature.graphs import kind
from deltabars.curvature.ordering import rewrite_placings
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
