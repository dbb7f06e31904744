"""Operations whose order does not matter, where torch would put them in order at a cost.

With deterministic algorithms asked for, torch sorts the places that a scatter or an `index_add` on
a GPU writes to, since two writes to one place would depend on their order. Where no place is
written twice, every order gives the same bits, and the sorting is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import Graph, Node

from deltabars.curvature.graphs import arguments, each, replace

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
