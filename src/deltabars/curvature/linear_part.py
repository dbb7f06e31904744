"""The part of a computation that is linear in some of its arguments, to be applied many times.

A Hessian product is the derivative of the gradient along a vector. At a fixed point and for fixed
examples all of it but the vector is known beforehand: the forward pass, the gradient, the masks and
the positions that maxima were taken at. So the computation is traced once into a graph of tensor
operations, which is cut in two: what does not depend on the vector is computed once for each chunk
of examples (`prepare`); what does is all that a product has to compute (`apply`).
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from deltabars.curvature.rewriting import dependent, kind, rewrite
from deltabars.runtime.precision import Turns

Tensors = tuple[Tensor, ...]

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
        fixed: example arguments that stay the same from product to product.
        tangents: example arguments that change.
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
        prepared: Tensors = self._before(*fixed)
        return prepared

    def apply(self, prepared: Tensors, tangents: Sequence[Tensor]) -> Tensors:
        """Evaluate the function at the tangents, for the prepared rest."""
        result: Tensors = self._after(*prepared, *tangents)
        return result


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Take forward derivatives, or trace, in one thread at a time.

    Torch keeps the tracer and the level of forward derivatives in variables of the process. The
    first thread into `torch.func.jvp` opens that level and closes it on its way out, whoever else
    is inside by then. So we open it before and close it after, when no thread of the user's is
    inside.
    """
    with _TURNS.at(_TURNS):
        is_open = _waited_for(_open_level)
        try:
            yield
        finally:
            if is_open:
                _waited_for(lambda: _NESTING.JVP_NESTING == 1)
                _NESTING.JVP_NESTING -= 1
                _LEVEL.exit_dual_level()


def _open_level() -> bool:
    if _NESTING.JVP_NESTING or _LEVEL._current_level >= 0:
        return False
    _NESTING.JVP_NESTING += 1  # no call since the comparison, so that no thread is in between
    try:
        _LEVEL.enter_dual_level()
    except RuntimeError:
        _NESTING.JVP_NESTING -= 1
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
            indices: Any = node.args[1]
            dynamic = any(
                index is not None and kind(index)[1] in (torch.bool, torch.uint8)
                for index in indices
            )
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
    nodes = list(traced.graph.nodes)
    arguments = [node for node in nodes if node.op == "placeholder"]
    (output,) = (node for node in nodes if node.op == "output")
    varying = dependent(traced.graph, arguments[num_fixed:])
    later = [node for node in nodes if node in varying and node.op == "call_function"]
    users = [*later, output]
    needed = list(
        dict.fromkeys(n for user in users for n in user.all_input_nodes if n not in varying)
    )
    before, env = Graph(), dict[Node, Node]()
    for node in nodes:
        if node not in varying and node is not output:
            env[node] = before.node_copy(node, env.__getitem__)
    before.output(tuple(env[node] for node in needed))
    before.eliminate_dead_code()
    after, env = Graph(), {}
    for node in needed:
        env[node] = after.placeholder(node.name)
    for node in arguments[num_fixed:]:
        env[node] = after.placeholder(node.name)
    for node in later:
        env[node] = after.node_copy(node, env.__getitem__)
    after.output(map_arg(output.args[0], env.__getitem__))
    return GraphModule(traced, before), GraphModule(traced, after)
