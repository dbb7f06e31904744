"""The part of a computation that is linear in some of its arguments, to be applied many times.

A Hessian product is the derivative of the gradient along a vector. At a fixed point and for fixed
examples all of it but the vector is known beforehand: the forward pass, the gradient, the masks and
the positions that maxima were taken at. So the computation is traced once into a graph of tensor
operations, which is cut in two: what does not depend on the vector is computed once for each chunk
of examples (`prepare`); what does is all that a product has to compute (`apply`). Before that the
graph is rewritten: less work, the same numbers.
"""

from __future__ import annotations

import linecache
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import eager_transforms
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from deltabars.curvature.layers import patches
from deltabars.runtime.precision import Turns

Tensors = tuple[Tensor, ...]
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
_CONVOLUTION_BACKWARD = aten.convolution_backward.default
_VIEWS = {aten.view.default, aten._unsafe_view.default}

_PATIENCE = 60.0  # seconds to wait for forward derivatives in the user's threads
_NAP = 1e-3
_TURNS = Turns()
_NESTING: Any = eager_transforms
_LEVEL: Any = forward_ad


class LinearPart:
    """Cut in two a function(*fixed, *tangents) -> tensors that is linear in the tangents.

    The graph holds for arguments of the shapes that it was traced with, whatever their values;
    functions of which that is not true are refused.

    Args:
        function: of tensors alone; without branches on their values.
        fixed, tangents: example arguments; those that stay from product to product come first.
        device: what the graph is rewritten for.

    Raises:
        RuntimeError: torch cannot trace the function, or shapes in it depend on values.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        fixed: Sequence[Tensor],
        tangents: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        # Each value is noted as a fake tensor. Of itself make_fx sets up a mode for every one of
        # them, which takes as long as all the rest of a trace.
        noted = TracingContext(FakeTensorMode(allow_fallback_kernels=True))

        def filled(*arguments: Tensor) -> Tensors:
            with cast(Any, _FilledZeros)():
                return function(*arguments)

        with forward_derivatives(), tracing(noted):
            traced = make_fx(torch.func.functionalize(filled))(*fixed, *tangents)
        _check_shapes_are_fixed(traced.graph)
        rewrite(traced.graph, device)
        self._before, self._after = _cut(traced, len(fixed))
        for module in (traced, self._before, self._after):
            _forget_source(module)

    def prepare(self, fixed: Sequence[Tensor]) -> Tensors:
        """Compute everything that does not depend on the tangents and is needed with them."""
        return self._before(*fixed)

    def apply(self, prepared: Tensors, tangents: Sequence[Tensor]) -> Tensors:
        """Evaluate the function at the tangents, for the prepared rest."""
        return self._after(*prepared, *tangents)


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Take forward derivatives, or trace, in one thread at a time.

    Torch keeps the tracer and the level of forward derivatives in variables of the process. The
    first thread into `torch.func.jvp` opens that level and closes it on its way out, whoever else
    is inside by then. So we open it before and close it after, when no thread of the user's is
    inside. Python changes threads after calls, not between assignments: no thread sees half of it.
    """
    with _TURNS.at(_TURNS):
        is_open = _waited_for(_open_level)
        try:
            yield
        finally:
            if is_open:
                _waited_for(lambda: _NESTING.JVP_NESTING == 1)
                _NESTING.JVP_NESTING -= 1
                _LEVEL._current_level = -1
                torch._C._exit_dual_level(level=0)


def _open_level() -> bool:
    if _NESTING.JVP_NESTING or _LEVEL._current_level >= 0:
        return False
    _NESTING.JVP_NESTING, _LEVEL._current_level = 1, 0
    try:
        torch._C._enter_dual_level()
    except RuntimeError:  # a thread of the user's has just opened it
        _NESTING.JVP_NESTING, _LEVEL._current_level = 0, -1
        return False
    return True


def _waited_for(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_NAP)
    return True


class _FilledZeros(TorchDispatchMode):
    """Give memory to zeros without any, which stand for tangents of constants.

    Many of torch's operations read memory that is not there when they are called from a trace,
    which ends the process: ldexp, addcmul, addcdiv, addr, index_add and mse_loss, for some.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default
        return func(*args, **(kwargs or {}))


def _check_shapes_are_fixed(graph: Graph) -> None:
    """Refuse a graph with operations whose results have shapes that depend on values."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        dynamic = torch.Tag.dynamic_output_shape in target.tags
        if target == torch.ops.aten.index.Tensor:  # dynamic with masks alone
            kinds = [kind(index)[1] for index in node.args[1] if index is not None]
            dynamic = torch.bool in kinds or torch.uint8 in kinds
        if dynamic or "as_strided" in str(target):
            raise RuntimeError(f"{target} cannot be applied to other values.")


def _forget_source(module: GraphModule) -> None:
    """Free the text of a graph, which torch keeps for tracebacks for as long as it runs."""
    key = type(module).forward.__code__.co_filename
    linecache.cache.pop(key, None)
    loader: Any = getattr(torch.fx.graph_module, "_loader", None)
    getattr(loader, "eval_cache", {}).pop(key, None)


def held_bytes(prepared: Tensors, fixed: Sequence[Tensor]) -> int:
    """Return the memory of prepared tensors, beside the arguments they were made from."""
    storages = [tensor.untyped_storage() for tensor in prepared]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in fixed:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _cut(traced: GraphModule, num_fixed: int) -> tuple[GraphModule, GraphModule]:
    """Cut the graph in two: from the fixed arguments to what is needed of them, and from there."""
    *nodes, output = traced.graph.nodes
    arguments = [node for node in nodes if node.op == "placeholder"]
    fixed, tangents = arguments[:num_fixed], arguments[num_fixed:]
    varying, earlier, later = set(tangents), list[Node](), list[Node]()
    for node in nodes:
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
            later.append(node)
        elif node not in arguments:
            earlier.append(node)
    used = [node for user in (*later, output) for node in user.all_input_nodes]
    needed = [node for node in dict.fromkeys(used) if node not in varying]

    def part(given: list[Node], calls: list[Node], result: Any) -> GraphModule:
        graph, env = Graph(), dict[Node, Node]()
        for node in given:
            env[node] = graph.placeholder(node.name)
        for node in calls:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(map_arg(result, env.__getitem__))
        graph.eliminate_dead_code()
        return GraphModule(traced, graph)

    before = part(fixed, earlier, tuple(needed))
    return before, part([*needed, *tangents], later, output.args[0])


def rewrite(graph: Graph, device: torch.device) -> None:
    """Rewrite a graph in place, for the device that it will run on.

    Sums and products with zeros, and second names of tensors, are left out. On a GPU gradients of
    convolutions are convolutions with flipped weights and matrix products of patches: cuDNN's
    choice in float32 is an FFT, which takes twice as long (see docs/performance.md).
    """
    _leave_out_names(graph)
    _leave_out_zeros(graph)
    if device.type == "cuda":
        for node in list(graph.find_nodes(op="call_function", target=_CONVOLUTION_BACKWARD)):
            with graph.inserting_before(node):
                _convolution_gradients(graph, node)
    graph.eliminate_dead_code()
    graph.lint()


def kind(node: Node) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and type of a node's result, as they were when it was traced."""
    seen = node.meta["tensor_meta"] if "tensor_meta" in node.meta else node.meta["val"]
    return tuple(seen.shape), seen.dtype


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


def _convolution_gradients(graph: Graph, node: Node) -> None:
    """Compute what is used of the gradients of a convolution by multiplications."""
    arguments: tuple[Any, ...] = node.args
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
        new.meta = dict(use.meta)
        use.replace_all_uses_with(new)
        graph.erase_node(use)


def _once(graph: Graph, target: Any, source: Node, *rest: Any) -> Node:
    """Return the call of a function on a node: the one that is there, or a new one after it."""
    for use in source.users:
        if use.target == target and use.args == (source, *rest):
            return use
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1] if source in placeholders else source):
        return graph.call_function(target, (source, *rest))


def input_gradient(signal: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """Convolve a signal (B, O, h, w) with the flipped weights (O, I, k, l): (B, I, H, W)."""
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
