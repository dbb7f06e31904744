"""What the graph of a forward pass says: which parameters are in it, and if examples stay apart.

Cotangents of the outputs pass through a chain of operations on their way to a layer. Where each of
these works on every example by itself, row b of what arrives belongs to example b. For operations
that are known that is read off their dimensions, at some microseconds each; where one is not known,
or does otherwise, what arrives has to be looked at.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

# Operations by their names in the graph. Those that keep examples apart, where the first dimension
# counts examples in what they take and in what they give:
_APART = {
    "Abs", "AdaptiveAvgPool2D", "AdaptiveMaxPool2D", "Add", "Addmm", "AvgPool2D", "Bmm", "Celu",
    "Clamp", "Clone", "Convolution", "Cos", "Div", "Elu", "Erf", "Exp", "Expand", "Expm1", "Gelu",
    "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "Linear", "Log", "LogSigmoid",
    "MaskedFill", "MaxPool2DWithIndices", "Mish", "Mm", "Mul", "NativeBatchNorm", "NativeGroupNorm",
    "NativeLayerNorm", "Neg", "Pow", "PreluKernel", "Relu", "Rsqrt", "Rsub",
    "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu", "Sigmoid", "Silu", "Sin", "Softplus", "Sqrt", "Sub",
    "Tanh", "Threshold", "ToCopy", "Where",
}  # fmt: skip
# likewise, where they go along other dimensions than the first;
_ALONG = {
    "Amax", "Amin", "Cat", "Glu", "LinalgVectorNorm", "LogSoftmax", "Logsumexp", "Mean", "Select",
    "Slice", "Softmax", "Split", "Stack", "Sum", "Transpose", "Unbind", "Var",
}  # fmt: skip
# and where the numbers of an example stay next to each other.
_RESHAPES = {"ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View"}
# Operations with inputs that all examples share, and the number of the one that they do not.
_NOT_SHARED = {"Addmm": 1} | dict.fromkeys(
    ("Convolution", "Linear", "Mm", "NativeBatchNorm", "NativeGroupNorm", "NativeLayerNorm",
     "PreluKernel"), 0
)  # fmt: skip


@dataclass(frozen=True)
class Route:
    """How outputs (B, C) come about.

    Attributes:
        leaves: the identities of the tensors that they are derived from.
        keeps_apart: whether cotangents of an example are known to arrive in its own row.
    """

    leaves: frozenset[int]
    keeps_apart: bool

    @classmethod
    def of(cls, outputs: Tensor, places: Collection[Node]) -> Route:
        """Read the graph of outputs, between them and the results of some of its nodes."""
        leaves, leading, apart = set(), set(places), True
        for node in _in_order(outputs.grad_fn):
            if node.name() == "torch::autograd::AccumulateGrad":
                leaves.add(id(node.variable))
            ways = [n for n, (after, _) in enumerate(node.next_functions) if after in leading]
            if ways:
                leading.add(node)
                apart = apart and (len(outputs) == 1 or _keeps_apart(node, ways, len(outputs)))
        return cls(frozenset(leaves), apart)


def _in_order(last: Node | None) -> list[Any]:
    """All nodes that lead to one, each of them after those before it."""
    found: list[Any] = []
    seen: set[Node] = set()
    waiting = [] if last is None else [(last, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(after, False) for after, _ in node.next_functions if after is not None]
    return found


def _keeps_apart(node: Any, ways: list[int], batch: int) -> bool:
    """Whether an operation does, with regard to some of its inputs."""
    name, _, overload = node.name().rpartition("Backward")
    if not overload.isdigit():  # an operation of one's own, by any name
        return False
    if name in _NOT_SHARED and ways != [_NOT_SHARED[name]]:
        return False
    given = [tuple(one.shape) for one in node._input_metadata]
    for way in ways:
        after, number = node.next_functions[way]
        shapes = [*given, tuple(after._input_metadata[number].shape)]
        if any(not shape or shape[0] % batch for shape in shapes):
            return False
        if name in _RESHAPES:
            continue
        if len({shape[0] for shape in shapes}) > 1:
            return False
        if not (_is_inside(node, shapes) if name in _ALONG else name in _APART):
            return False
        if name not in _ALONG and len(set(map(len, shapes))) > 1:  # another is spread over all
            return False
        if len(getattr(node, "_saved_normalized_shape", ())) >= len(shapes[0]):
            return False
    return not getattr(node, "_saved_training", False)


def _is_inside(node: Any, shapes: list[tuple[int, ...]]) -> bool:
    """Whether an operation along dimensions leaves out the first one, counted from either end."""
    dims: list[int] = []
    for name in ("_saved_dim", "_saved_dim0", "_saved_dim1"):
        found = getattr(node, name, None)
        dims += [found] if isinstance(found, int) else found or ()
    least = -min(map(len, shapes))
    signed = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]
    return bool(dims) and all(dim > 0 or least < dim < 0 for dim in signed)
