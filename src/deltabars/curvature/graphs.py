"""Small steps of rewriting a traced graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node


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
