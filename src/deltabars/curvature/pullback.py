"""What the graph of a forward pass says: which parameters are in it, and if examples stay apart.

Cotangents of the outputs pass through a chain of operations on their way to a layer. Where each of
these works on every example by itself, row b of what arrives belongs to example b. For operations
that are known that is read off their dimensions, at some microseconds each; where one is not known,
or does otherwise, what arrives has to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from deltabars.curvature.layers import Factors, Footprint, Part, joined, kept_parts
from deltabars.curvature.recorder import Recorder
from deltabars.curvature.singles import ROUNDING, UNSUPPORTED, Singles, agree, total_norm
from deltabars.problem.data import Inputs, leaves, map_leaves
from deltabars.problem.network import Network
from deltabars.runtime.memory import ran_out

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


Cotangents = Callable[[Tensor], Tensor]  # outputs (B, C) -> (B, R, C)

_EXAMPLES = 3  # that the way over the layers is checked on
# Relative: what is not rounding, also of models that compute a part in float32. Weights of two
# examples differ by less in one case of a thousand.
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-4}


@dataclass(frozen=True)
class Pulled:
    """R rows of derivatives (B, R, P), in parts.

    Attributes:
        outputs: of the network, (B, C).
        count: R.
        layers: factors of the rows by the weights of layers.
        loose: rows (B, R, ·) by the other parameters, by name.
    """

    outputs: Tensor
    count: int
    layers: list[Factors]
    loose: dict[str, Tensor]

    def scaled(self, scales: Mapping[str, float]) -> Pulled:
        """The rows times a number for each parameter."""
        layers = []
        for factors in self.layers:
            assert factors.weight is not None
            layers.append(replace(factors, signals=factors.signals * scales[factors.weight]))
        loose = {name: rows * scales[name] for name, rows in self.loose.items()}
        return Pulled(self.outputs, self.count, layers, loose)


class Pullback:
    """The map from cotangents v (B, R, C) of the outputs z to rows v·∂z/∂ω (B, R, P).

    Weights and biases of dense layers and of two-dimensional convolutions (without groups), of
    norms and embeddings, and what is added to or multiplied with all examples alike are reached
    through the layers' activations; the rest example by example.

    Which are which is found out on the first inputs of each shape, and checked there against
    derivatives of single examples. What may differ from batch to batch is checked on each of them:
    whether parameters are used in another way (`routes`); whether rows of layers belong to the
    examples of the same number, by the graph of derivatives or else by one more row of cotangents,
    which has another weight for each example; rows that were taken example by example, by their
    weighted sum; and whether outputs depend on the rest of the batch.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._singles = Singles(network)
        self._rows_together = True  # as far as is known
        self._rests: dict[tuple[torch.Size, ...], tuple[str, ...]] = {}
        self._footprints: dict[tuple[int | None, tuple[torch.Size, ...]], Footprint] = {}

    def rows(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        out: Tensor | None = None,
        parts: Mapping[str, Part] | None = None,
        *,
        again: bool = False,
    ) -> Tensor:
        """The rows (B, R, P), written to `out` where that is given; or the parts of them alone."""
        pulled = self.pull(inputs, cotangents, again=again)
        if parts is None:
            parts = kept_parts(self.network.parameters, None)
        if out is None:
            width = max(part.place.stop for part in parts.values())
            out = pulled.outputs.new_empty(len(pulled.outputs), pulled.count, width)
        for name, rows in pulled.loose.items():
            part = parts[name]
            out[..., part.place] = rows if part.numbers is None else rows[..., part.numbers]
        for factors in pulled.layers:
            assert factors.weight is not None
            part = parts[factors.weight]
            place = out[..., part.place]
            if part.numbers is None:
                factors.weight_rows(place)
            elif part.outputs is not None and part.inputs is not None:
                factors.at(part.outputs, part.inputs).weight_rows(place)
            else:
                place.copy_(factors.weight_rows()[..., part.numbers])
        return out

    def pull(self, inputs: Inputs, cotangents: Cotangents, *, again: bool = False) -> Pulled:
        """The rows in parts. Cost: R backward passes without weights; one more for some models.

        Args:
            inputs: of the network.
            cotangents: from the outputs (B, C) to v (B, R, C).
            again: whether these inputs have been through the checks before.

        Raises:
            ModelError: the outputs for one example depend on the rest of the batch.
        """
        shape = tuple(leaf.shape[1:] for leaf in leaves(inputs))
        is_new = shape not in self._rests
        if is_new:
            self._rests[shape] = self._find_rest(inputs)
        while True:
            rest = self._rests[shape]
            names = [name for name in self.network.trained if name not in rest]
            passed = self._pass(inputs, cotangents, names, again)
            if not again:
                self.network.check_independence(inputs, passed.outputs, closely=passed.is_mixed)
            if not passed.lost:
                break
            self._rests[shape] = (*rest, *passed.lost)
            if passed.is_mixed and not is_new:
                self._singles.warn(passed.lost, "layers that see batches in another order")
        loose = passed.loose
        if rest:
            agrees = None if again else passed.agrees
            loose |= self._singles.rows(inputs, passed.back.transpose(0, 1), rest, agrees)
        pulled = Pulled(passed.outputs.detach(), len(passed.back), passed.layers, loose)
        return pulled.scaled(self.network.scales) if self.network.scales else pulled

    def footprint(self, inputs: Inputs, cotangents: Cotangents, count: int | None) -> Footprint:
        """What the rows of each input take, measured on the first inputs of these shapes.

        Args:
            count: R, where it is not that of all outputs.
        """
        key = count, tuple(leaf.shape for leaf in leaves(inputs))
        if key not in self._footprints:
            pulled = self.pull(inputs, cotangents)
            activations = self.network.activation_bytes(inputs)
            self._footprints[key] = Footprint.of(
                pulled.outputs, pulled.count, pulled.layers, pulled.loose, activations
            )
        return self._footprints[key]

    def _pass(
        self, inputs: Inputs, cotangents: Cotangents, names: list[str], again: bool
    ) -> _Passed:
        """The rows by the named parameters, unless some of them are used in another way."""
        trained = {
            name: value.detach().requires_grad_(bool(names) or not again)
            for name, value in self.network.trained.items()
        }
        recorder = Recorder({id(trained[name]): name for name in names}, leaves(inputs)[0].shape[0])
        with torch.enable_grad(), recorder:
            outputs = self.network.outputs(trained, inputs)
        followed = recorder.followed
        route = Route.of(outputs, {call.edge.node for call in followed})
        back = cotangents(outputs.detach()).transpose(0, 1)  # (R, B, C)
        lost = {name for name in names if id(trained[name]) in route.leaves}
        lost |= {name for call in followed if call.is_changed for name in call.names}
        passed = _Passed(outputs, trained, back, sorted(lost))
        if lost or not names:
            return passed
        marks = None if again or route.keeps_apart else _Marks.of(back)
        rows = back if marks is None else torch.cat([back, marks.sum(back)])
        keep = not again and len(names) < len(trained)  # for `agrees`
        gradients = self._gradients(outputs, [call.edge for call in followed], rows, keep)
        if gradients is None:
            return self._pass(inputs, cotangents, names, again)
        if marks is not None:
            for call, gradient in zip(followed, gradients, strict=True):
                if gradient is not None and not marks.stay(gradient):
                    lost |= set(call.names)
            if lost:
                return replace(passed, lost=sorted(lost), is_mixed=True)
        count = len(recorder.calls)
        loose, layers = passed.loose, []
        for use, gradient in zip(recorder.uses, gradients[count:], strict=True):
            if gradient is not None:
                _add(loose, use.name, use.rows(gradient[: len(back)]))
        for call, gradient in zip(recorder.calls, gradients[:count], strict=True):
            if gradient is None:  # the outputs do not depend on this layer
                continue
            factors = call.factors(gradient[: len(back)])
            if factors.bias is not None:
                _add(loose, factors.bias, factors.bias_rows())
            layers.append(factors)
        passed.layers.extend(joined([factors for factors in layers if factors.weight is not None]))
        seen = loose.keys() | {factors.weight for factors in passed.layers}
        for name in [name for name in names if name not in seen]:
            # Not used, or not by what the outputs depend on.
            loose[name] = back.new_zeros(len(outputs), len(back), trained[name].numel())
        return passed

    def _gradients(
        self, outputs: Tensor, edges: list[GradientEdge], back: Tensor, keep: bool
    ) -> list[Tensor | None] | None:
        """The gradients (R, B, …) of rows of cotangents (R, B, C), by places in the graph.

        None where vmap does not support an operation of it: once, with the graph used up.
        """
        if not edges or not outputs.requires_grad:
            return [None] * len(edges)
        if self._rows_together and len(back) > 1:
            try:
                return list(
                    torch.autograd.grad(
                        outputs, edges, back, keep, allow_unused=True, is_grads_batched=True
                    )
                )
            except UNSUPPORTED as error:
                if ran_out(error):
                    raise
                self._rows_together = False
                return None
        last = len(back) - 1
        single = [
            torch.autograd.grad(outputs, edges, row, keep or r < last, allow_unused=True)
            for r, row in enumerate(back)
        ]
        return [
            None if parts[0] is None else torch.stack(parts) for parts in zip(*single, strict=True)
        ]

    def _find_rest(self, inputs: Inputs) -> tuple[str, ...]:
        """The parameters that cannot be reached through layers, by trying."""
        # More than one example, repeated if need be: of one it is not seen which dimension counts.
        # In another order than that of the batch, which they may have been sorted in; or in that
        # one, where the model takes no other.
        some = torch.arange(_EXAMPLES, device=self.network.device)
        for turned in (some.roll(-1), some):
            try:
                right = self._tried(inputs, turned)
            except UNSUPPORTED as error:  # positions for each example, say, where it expects one
                if ran_out(error):
                    raise
            else:
                return tuple(name for name in self.network.trained if name not in right)
        return tuple(self.network.trained)

    def _tried(self, inputs: Inputs, some: Tensor) -> set[str]:
        """The names whose rows for some examples can be had through layers, and are right."""
        few = map_leaves(lambda leaf: leaf[some % len(leaf)], inputs)

        def rows(outputs: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(0)
            size = (_EXAMPLES, _EXAMPLES, outputs.shape[1])
            return torch.randn(size, generator=generator).to(outputs)

        good = list(self.network.trained)
        while good:
            passed = self._pass(few, rows, good, again=True)
            if not passed.lost:
                return self._agreeing(few, passed)
            good = [name for name in good if name not in passed.lost]
        return set()

    def _agreeing(self, few: Inputs, passed: _Passed) -> set[str]:
        """The names whose rows (B, R, ·) are the derivatives of single examples."""
        parts = dict(passed.loose)
        for factors in passed.layers:
            if factors.weight is not None:
                parts[factors.weight] = factors.weight_rows()
        trained = {
            name: value.detach().requires_grad_() for name, value in self.network.trained.items()
        }
        right = set(parts)
        with torch.enable_grad():
            outputs = self.network.outputs(trained, few)
            if not outputs.requires_grad:
                return right
            totals = (outputs * passed.back).sum(2).flatten().unbind()  # (R·B,)
        chosen = [trained[name] for name in parts]
        places = product(*map(range, passed.back.shape[:2]))
        for (r, n), total in zip(places, totals, strict=True):
            single = torch.autograd.grad(total, chosen, retain_graph=True, materialize_grads=True)
            whole = total_norm(single)
            for (name, rows), gradient in zip(parts.items(), single, strict=True):
                if not agree(rows[n, r], gradient.flatten(), whole):
                    right.discard(name)
        return right


@dataclass(frozen=True)
class _Passed:
    """A forward pass that was recorded, and the rows that it gives.

    Attributes:
        outputs: (B, C), with their graph of derivatives.
        trained: the parameters in it.
        back: the cotangents (R, B, C).
        lost: the names of parameters that are used otherwise than is followed; then no rows are
            there.
        is_mixed: whether examples are, so that rows do not belong to those of the same number.
        layers, loose: as those of `Pulled`.
    """

    outputs: Tensor
    trained: dict[str, Tensor]
    back: Tensor
    lost: list[str]
    is_mixed: bool = False
    layers: list[Factors] = field(default_factory=list)
    loose: dict[str, Tensor] = field(default_factory=dict)

    def agrees(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether a weighted sum of rows (B, R, ·) is what one backward pass gives for it."""
        marks = _Marks.of(self.back)
        exact: Sequence[Tensor] = [each.new_zeros(each.shape[2]) for each in rows.values()]
        if self.outputs.requires_grad:
            chosen, back = [self.trained[name] for name in rows], marks.sum(self.back)[0]
            exact = torch.autograd.grad(
                self.outputs, chosen, back, retain_graph=True, materialize_grads=True
            )
        sums = [marks.sum(each.transpose(0, 1))[0] for each in rows.values()]  # (B, ·)
        rounding = ROUNDING * torch.finfo(self.back.dtype).eps * total_norm(sums)
        gaps = [float((a.sum(0) - b.flatten()).norm()) for a, b in zip(sums, exact, strict=True)]
        sizes = [_CLOSE[self.back.dtype] * float(each.norm()) + rounding for each in sums]
        return not any(gap > size for gap, size in zip(gaps, sizes, strict=True))


@dataclass(frozen=True)
class _Marks:
    """Weights that tell examples, and rows, from one another.

    Attributes:
        examples, rows: the weights, (B,) and (R,), all of about one size.
    """

    examples: Tensor
    rows: Tensor

    @classmethod
    def of(cls, back: Tensor) -> _Marks:
        """Weights for cotangents (R, B, C)."""
        generator = torch.Generator().manual_seed(1)
        drawn = 2 * torch.rand(sum(back.shape[:2]), generator=generator, dtype=torch.float64) - 1
        weights = (drawn + drawn.sign()).to(back)  # from 1 to 2, and from -2 to -1
        return cls(weights[len(back) :], weights[: len(back)])

    def sum(self, rows: Tensor) -> Tensor:
        """The weighted sum over r of rows (R, B, …), in one row (1, B, …)."""
        total = (self.rows @ rows.flatten(1)).view(len(self.examples), -1)
        return (total * self.examples[:, None]).view(1, *rows.shape[1:])

    def stay(self, gradients: Tensor) -> bool:
        """Whether of gradients (R + 1, B, …) the last ones are that sum of the others."""
        rows, last = gradients[:-1].flatten(2), gradients[-1].flatten(1)
        gaps = (last - self.sum(rows)[0]).norm(dim=-1)
        sizes = (self.rows.abs() @ rows.norm(dim=-1)) * self.examples.abs()  # (B,)
        eps = torch.finfo(last.dtype).eps
        return not bool((gaps > _CLOSE[last.dtype] * sizes + eps * sizes.max()).any())


def _add(parts: dict[str, Tensor], name: str, rows: Tensor) -> None:
    parts[name] = parts[name] + rows if name in parts else rows
