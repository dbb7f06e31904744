"""Rows of derivatives by all parameters, from cotangents of the outputs.

What a network does with its parameters in dense layers, convolutions, norms, embeddings and the
like is followed through its calls (`layers.py`), for all examples in one backward pass. Derivatives
by the other parameters are taken one example at a time: under `vmap`, or by plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from deltabars.curvature.layers import Factors, Pair, Recorder
from deltabars.errors import ModelWarning, first_line, option, warn
from deltabars.problem.data import Inputs, leaves, map_leaves
from deltabars.problem.network import Network
from deltabars.problem.parameters import ParameterSpace
from deltabars.runtime.memory import ran_out
from deltabars.runtime.precision import without_noise

Cotangents = Callable[[Tensor], Tensor]  # outputs (B, C) -> (B, R, C)

# What torch raises where it does not support a model; other errors are the model's own.
UNSUPPORTED = (RuntimeError, IndexError, TypeError)

_EXAMPLES, _ROWS = 3, 2  # that derivatives are checked on
_AGREE = 1e-3  # relative: wrong rows are off by as much as the derivatives themselves
_ROUNDING = 100  # units in the last place of the derivatives by all parameters together
# Relative: what is not rounding, also of models that compute a part in float32. Weights of two
# examples differ by less in one case of a thousand.
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-4}


class Part(NamedTuple):
    """What is kept of a parameter."""

    place: slice  # among the columns that are kept
    numbers: Tensor | None = None  # indices of the numbers that are kept, (p,); None for all
    crossing: tuple[Tensor, Tensor] | None = None  # rows and columns of a weight that they fill


def kept_parts(space: ParameterSpace, reached: Tensor | None) -> Mapping[str, Part]:
    """Return the parts of all parameters, by name; of all numbers where `reached` is None."""
    if reached is None:
        return {name: Part(place) for name, place in space.slices.items()}
    parts, done = {}, 0
    for (name, whole), shape in zip(space.slices.items(), space.shapes, strict=True):
        numbers = reached[(reached >= whole.start) & (reached < whole.stop)] - whole.start
        place = slice(done, done + len(numbers))
        done = place.stop
        parts[name] = Part(place)
        if len(numbers) < whole.stop - whole.start:
            width = torch.Size(shape[1:]).numel()
            crossing = (numbers // width).unique(), (numbers % width).unique()
            crosses = len(crossing[0]) * len(crossing[1]) == len(numbers) > 0
            parts[name] = Part(place, numbers, crossing if crosses and len(shape) > 1 else None)
    return parts


@dataclass(frozen=True)
class Footprint:
    """The memory of R rows for each input: R, C, bytes of activations, numbers held whole."""

    count: int
    outputs: int
    activations: int
    loose: int
    layers: tuple[Pair, ...]  # the numbers of each, and how many more for each vector of a basis

    def largest_layer(self, columns: int) -> int:
        """Return the numbers of the largest layer, for bases of so many vectors together."""
        return max((numbers + columns * each for numbers, each in self.layers), default=0)


@dataclass(frozen=True)
class Pulled:
    """R rows of derivatives (B, R, P), in parts."""

    outputs: Tensor  # of the network, (B, C)
    back: Tensor  # the cotangents, (R, B, C)
    layers: dict[str, Factors] = field(default_factory=dict)  # of rows by the weights of layers
    loose: dict[str, Tensor] = field(default_factory=dict)  # rows (B, R, ·) by other parameters
    lost: Collection[str] = ()  # parameters that are not followed; any means no rows
    is_mixed: bool = False  # whether rows are not those of the example of their number


class Pullback:
    """Map cotangents v (B, R, C) of the outputs z to rows v·∂z/∂ω (B, R, P).

    Which parameters can be followed is found out on the first inputs of each shape, where their
    rows are compared with plain autograd. What may differ from batch to batch is checked on each:
    whether parameters are used in another way; whether rows belong to the examples of the same
    number, by the graph of derivatives, or else by one more row of cotangents, which has another
    weight for each example; and whether outputs depend on the rest of the batch.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._rows_together = True  # unless vmap does not support it
        self._examples_together = True
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
        """Return the rows (B, R, P), or the given parts of them; in `out` where that is given."""
        pulled = self.pull(inputs, cotangents, again=again)
        if parts is None:
            parts = kept_parts(self.network.parameters, None)
        if out is None:
            width = max(part.place.stop for part in parts.values())
            out = pulled.outputs.new_empty(len(pulled.outputs), len(pulled.back), width)
        for name, rows in pulled.loose.items():
            part = parts[name]
            out[..., part.place] = rows if part.numbers is None else rows[..., part.numbers]
        for name, factors in pulled.layers.items():
            part = parts[name]
            place = out[..., part.place]
            if part.numbers is None:
                factors.weight_rows(place)
            elif part.crossing is not None:
                factors.at(*part.crossing).weight_rows(place)
            else:
                place.copy_(factors.weight_rows()[..., part.numbers])
        return out

    def pull(self, inputs: Inputs, cotangents: Cotangents, *, again: bool = False) -> Pulled:
        """Return the rows in parts; `again` for inputs that have been through the checks before.

        Cost: R backward passes without weights, one more for some models; and a forward pass and R
        backward passes of single examples where some parameters cannot be followed.
        """
        shape = tuple(leaf.shape[1:] for leaf in leaves(inputs))
        if shape not in self._rests:
            self._rests[shape] = self._examine(inputs)
        while True:
            rest = self._rests[shape]
            pulled = self._pass(inputs, cotangents, rest, again)
            if not again:
                self.network.check_independence(inputs, pulled.outputs, closely=pulled.is_mixed)
            if not pulled.lost:
                break
            self._rests[shape] = (*rest, *pulled.lost)
        if rest:
            pulled.loose.update(self._single_rows(inputs, pulled.back.transpose(0, 1), rest))
        for name, scale in self.network.scales.items():
            if name in pulled.loose:
                pulled.loose[name] = pulled.loose[name] * scale
            else:
                factors = pulled.layers[name]
                pulled.layers[name] = Factors(factors.activations, factors.signals * scale)
        return pulled

    def footprint(self, inputs: Inputs, cotangents: Cotangents, count: int | None) -> Footprint:
        """Return what rows take, measured on the first inputs of these shapes and this R."""
        key = count, tuple(leaf.shape for leaf in leaves(inputs))
        if key not in self._footprints:
            pulled = self.pull(inputs, cotangents)
            self._footprints[key] = Footprint(
                len(pulled.back),
                pulled.outputs.shape[1],
                self.network.activation_bytes(inputs) // len(pulled.outputs),
                sum(rows.shape[1] * rows.shape[2] for rows in pulled.loose.values()),
                tuple(factors.numbers for factors in pulled.layers.values()),
            )
        return self._footprints[key]

    def _pass(
        self, inputs: Inputs, cotangents: Cotangents, rest: Collection[str], again: bool
    ) -> Pulled:
        """Compute the rows by all parameters but the rest; none where one is not followed."""
        names = [name for name in self.network.trained if name not in rest]
        trained = {
            name: value.detach().requires_grad_(name not in rest)
            for name, value in self.network.trained.items()
        }
        recorder = Recorder({id(trained[name]): name for name in names}, len(leaves(inputs)[0]))
        with torch.enable_grad(), recorder:
            outputs = self.network.outputs(trained, inputs)
        uses = recorder.uses
        edges = list(dict.fromkeys(use.edge for use in uses))
        found, keeps_apart = read_graph(outputs, {edge.node for edge in edges})
        back = cotangents(outputs.detach()).transpose(0, 1)
        lost = {name for name in names if id(trained[name]) in found}
        lost |= {
            use.name for use in uses if use.seen is not None and use.seen._version != use.version
        }
        if lost or not names:
            return Pulled(outputs.detach(), back, lost=sorted(lost))
        marks = None if again or keeps_apart else _Marks.of(back)
        rows = back if marks is None else torch.cat([back, marks.sum(back)])
        gradients = self._gradients(outputs, edges, rows)
        if gradients is None:
            return self._pass(inputs, cotangents, rest, again)
        if marks is not None:
            mixed = {edge for edge, each in gradients.items() if not marks.stay(each)}
            lost = {use.name for use in uses if use.edge in mixed}
            if lost:
                return Pulled(outputs.detach(), back, lost=sorted(lost), is_mixed=True)
        found_rows: dict[str, list[Tensor | Factors]] = {name: [] for name in names}
        for use in uses:
            if use.edge in gradients:  # else the outputs do not depend on this call
                found_rows[use.name].append(use.rows(gradients[use.edge][: len(back)]))
        pulled = Pulled(outputs.detach(), back)
        for name, parts in found_rows.items():
            factors = [part for part in parts if isinstance(part, Factors)]
            if factors and len(factors) == len(parts):  # a sum over calls is one over positions
                pulled.layers[name] = factors[0]
                if len(factors) > 1:
                    activations = torch.cat([each.activations for each in factors], 1)
                    signals = torch.cat([each.signals for each in factors], 3)
                    pulled.layers[name] = Factors(activations, signals)
                continue
            loose = [part.weight_rows() if isinstance(part, Factors) else part for part in parts]
            size = len(outputs), len(back), trained[name].numel()
            pulled.loose[name] = sum(loose[1:], loose[0]) if loose else back.new_zeros(size)
        return pulled

    def _gradients(
        self, outputs: Tensor, edges: list[GradientEdge], back: Tensor
    ) -> dict[GradientEdge, Tensor] | None:
        """Compute gradients (R, B, …) for cotangents (R, B, C), where the outputs depend on edges.

        None where vmap does not support an operation of it: once, with the graph used up.
        """
        if not edges or not outputs.requires_grad:
            return {}
        derive = partial(torch.autograd.grad, outputs, edges, allow_unused=True)
        found: Any
        if self._rows_together and len(back) > 1:
            try:
                found = derive(back, is_grads_batched=True)
            except UNSUPPORTED as error:
                if ran_out(error):
                    raise
                self._rows_together = False
                return None
        else:
            last = len(back) - 1
            single = [derive(row, retain_graph=r < last) for r, row in enumerate(back)]
            found = [
                None if parts[0] is None else parts[0][None] if last == 0 else torch.stack(parts)
                for parts in zip(*single, strict=True)
            ]
        return {edge: each for edge, each in zip(edges, found, strict=True) if each is not None}

    def _examine(self, inputs: Inputs) -> tuple[str, ...]:
        """Return the parameters that cannot be followed, by comparing rows of a few examples."""
        # More than one example, repeated if need be: of one it is not seen which dimension counts.
        some = torch.arange(_EXAMPLES, device=self.network.device)
        few = map_leaves(lambda leaf: leaf[(some % len(leaf)).sort().values], inputs)

        def rows(outputs: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(_EXAMPLES, _ROWS, outputs.shape[1], generator=generator)
            return drawn.to(outputs)

        names, rest = tuple(self.network.trained), set[str]()
        try:
            while (pulled := self._pass(few, rows, rest, again=True)).lost:
                rest |= {*pulled.lost}
        except UNSUPPORTED as error:  # a model that takes batches of one size alone, say
            if ran_out(error):
                raise
            return names
        back = pulled.back.transpose(0, 1)

        def agreeing(find: Callable[[slice], Mapping[str, Tensor]]) -> set[str]:
            found = []
            for one in (slice(r, r + 1) for r in range(_ROWS)):  # together they take more memory
                exact = self._by_autograd(few, back[:, one], names, together=_EXAMPLES)
                found.append(_agreeing(find(one), exact))
            return set.intersection(*found)

        def followed(one: slice) -> Mapping[str, Tensor]:
            rows = {name: each[:, one] for name, each in pulled.loose.items()}
            for name, layer in pulled.layers.items():
                rows[name] = Factors(layer.activations, layer.signals[:, one]).weight_rows()
            return rows

        right = agreeing(followed)
        missing = tuple(name for name in names if name not in right)
        if missing and self._examples_together:
            singly = agreeing(lambda one: self._single_rows(few, back[:, one], missing))
            if singly != {*missing}:
                self._leave_vmap(missing, "its derivatives under vmap are not those of autograd")
        return missing

    def _single_rows(
        self, inputs: Inputs, back: Tensor, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Compute the rows (B, R, ·) by some parameters for cotangents (B, R, C), singly."""
        if self._examples_together:
            try:
                with without_noise():  # one by one inside torch is still faster than here
                    return self._by_vmap(inputs, back, names)
            except UNSUPPORTED as error:
                if ran_out(error):
                    raise
                self._leave_vmap(names, first_line(error))
        return self._by_autograd(inputs, back, names)

    def _by_vmap(self, inputs: Inputs, back: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Compute them for all examples at once, a row after the other."""
        # Not all at once: torch's derivative of a PReLU is wrong under two `vmap`s of one size.
        trained = dict(self.network.trained)
        chosen = {name: trained[name] for name in names}

        def rows(example: Inputs, back: Tensor) -> dict[str, Tensor]:  # back (R, C)
            def output(at: dict[str, Tensor]) -> Tensor:
                return self.network.one_output({**trained, **at}, example)

            pull = torch.func.vjp(output, chosen)[1]
            parts = [pull(row)[0] for row in back.unbind()]
            return {name: torch.stack([part[name] for part in parts]) for name in names}

        found = torch.func.vmap(rows)(inputs, back)
        return {name: rows.reshape(*rows.shape[:2], -1) for name, rows in found.items()}

    def _by_autograd(
        self, inputs: Inputs, back: Tensor, names: tuple[str, ...], together: int = 1
    ) -> dict[str, Tensor]:
        """Compute them one after the other, with some examples together in a forward pass."""
        trained = {
            name: value.detach().requires_grad_(name in names)
            for name, value in self.network.trained.items()
        }
        chosen = [trained[name] for name in names]
        rows = {name: back.new_zeros(*back.shape[:2], trained[name].numel()) for name in names}
        derive = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
        for low in range(0, len(back), together):
            some = slice(low, low + together)
            with torch.enable_grad():
                outputs = self.network.outputs(trained, map_leaves(itemgetter(some), inputs))
                totals = (outputs.unsqueeze(1) * back[some]).sum(2).flatten().unbind()  # B·R
            if not outputs.requires_grad:
                continue
            places = product(range(low, low + len(outputs)), range(back.shape[1]))
            for place, total in zip(places, totals, strict=True):
                for name, part in zip(names, derive(total, chosen), strict=True):
                    rows[name][place] = part.flatten()
        return rows

    def _leave_vmap(self, names: tuple[str, ...], reason: str) -> None:
        self._examples_together = False
        count = len(self.network.trained)
        warn(
            "Model: expected operations that torch can differentiate for many examples at once, "
            f"got one that it cannot ({reason}). Continuing example by example for {len(names)} of "
            f"{count} parameters ({names[0]}{', …' if len(names) > 1 else ''}), which is slower; "
            f"leave them out with {option('params=')} if it takes too long.",
            ModelWarning,
        )


def _agreeing(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> set[str]:
    """Return the parameters whose rows (B, R, ·) are the exact ones.

    Some rows are zero but for rounding, such as those by the bias of attention's keys.
    """
    whole = torch.stack([rows.norm(dim=-1) for rows in exact.values()]).norm(dim=0)  # (B, R)
    rounding = _ROUNDING * torch.finfo(whole.dtype).eps * whole

    def agree(rows: Tensor, right: Tensor) -> bool:
        size = right.norm(dim=-1)
        gap = torch.stack([(a - b).norm(dim=-1) for a, b in zip(rows, right, strict=True)])
        return bool(((gap <= torch.maximum(_AGREE * size, rounding)) | ~size.isfinite()).all())

    return {name for name, rows in found.items() if agree(rows, exact[name])}


class _Marks(NamedTuple):
    """Weights (B,) and (R,) that tell examples, and rows, from one another, of about one size."""

    examples: Tensor
    rows: Tensor

    @classmethod
    def of(cls, back: Tensor) -> _Marks:
        """Draw weights for cotangents (R, B, C)."""
        generator = torch.Generator().manual_seed(1)
        drawn = 2 * torch.rand(sum(back.shape[:2]), generator=generator, dtype=torch.float64) - 1
        weights = (drawn + drawn.sign()).to(back)  # from 1 to 2, and from -2 to -1
        return cls(weights[len(back) :], weights[: len(back)])

    def sum(self, rows: Tensor) -> Tensor:
        """Return the weighted sum over r of rows (R, B, …), in one row (1, B, …)."""
        total = (self.rows @ rows.flatten(1)).view(len(self.examples), -1)
        return (total * self.examples[:, None]).view(1, *rows.shape[1:])

    def stay(self, gradients: Tensor) -> bool:
        """Return whether of gradients (R + 1, B, …) the last ones are that sum of the others."""
        rows, last = gradients[:-1].flatten(2), gradients[-1].flatten(1)
        gaps = (last - self.sum(rows)[0]).norm(dim=-1)
        sizes = (self.rows.abs() @ rows.norm(dim=-1)) * self.examples.abs()  # (B,)
        eps = torch.finfo(last.dtype).eps
        return not bool((gaps > _CLOSE[last.dtype] * sizes + eps * sizes.max()).any())


# Operations, by their names in the graph, that work on every example by itself if the first
# dimension counts examples in what they take and give, and is none that they go along.
_ALONG = {
    "Amax", "Amin", "Cat", "Glu", "LinalgVectorNorm", "LogSoftmax", "Logsumexp", "Mean",
    "Select", "Slice", "Softmax", "Split", "Stack", "Sum", "Transpose", "Unbind", "Var",
}  # fmt: skip
# The same, without dimensions that they go along.
_APART = {
    "Abs", "AdaptiveAvgPool2D", "AdaptiveMaxPool2D", "Add", "Addmm", "AvgPool2D", "Bmm", "Celu",
    "Clamp", "Clone", "Convolution", "Cos", "Div", "Elu", "Erf", "Exp", "Expand", "Expm1",
    "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "Linear", "Log", "LogSigmoid",
    "MaskedFill", "MaxPool2DWithIndices", "Mish", "Mm", "Mul", "NativeBatchNorm",
    "NativeGroupNorm", "NativeLayerNorm", "Neg", "Pow", "PreluKernel", "Relu", "Rsqrt", "Rsub",
    "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu", "Sigmoid", "Silu", "Sin", "Softplus", "Sqrt", "Sub",
    "Tanh", "Threshold", "ToCopy", "Where",
}  # fmt: skip
# Operations in which the numbers of an example stay next to each other.
_RESHAPES = {"ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View"}
# Operations with inputs that all examples share, and the index of the one that they do not.
_NOT_SHARED = {"Addmm": 1, "Convolution": 0, "Linear": 0, "Mm": 0, "NativeBatchNorm": 0,
               "NativeGroupNorm": 0, "NativeLayerNorm": 0, "PreluKernel": 0}  # fmt: skip


def read_graph(outputs: Tensor, ends: Collection[Node]) -> tuple[set[int], bool]:
    """Read the graph of derivatives of outputs (B, C), at some microseconds a node.

    Returns the identities of the tensors that the outputs are derived from; and whether cotangents
    of an example are known to arrive in its own row, at the nodes `ends`.
    """
    found, leading, apart = set(), set(ends), True
    seen: set[Node | None] = {None}
    waiting: list[tuple[Any, bool]] = [(outputs.grad_fn, False)]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:  # all nodes before it have been read
            if node.name() == "torch::autograd::AccumulateGrad":
                found.add(id(node.variable))
            ways = [n for n, (after, _) in enumerate(node.next_functions) if after in leading]
            if ways:
                leading.add(node)
                apart = apart and (len(outputs) == 1 or _keeps_apart(node, ways, len(outputs)))
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(after, False) for after, _ in node.next_functions]
    return found, apart


def _keeps_apart(node: Any, ways: list[int], batch: int) -> bool:
    """Return whether an operation does, with regard to some of its inputs."""
    name, _, overload = node.name().rpartition("Backward")
    if not overload.isdigit() or (name in _NOT_SHARED and ways != [_NOT_SHARED[name]]):
        return False  # an operation of one's own, by any name; or by way of what is shared
    taken = [node.next_functions[way] for way in ways]
    shapes = [one.shape for one in node._input_metadata]
    shapes += [after._input_metadata[number].shape for after, number in taken]
    if any(not shape or shape[0] % batch for shape in shapes):
        return False
    if name in _RESHAPES:
        return True
    if len({shape[0] for shape in shapes}) > 1 or getattr(node, "_saved_training", False):
        return False
    least = min(map(len, shapes))
    if name in _ALONG:
        dims: list[int] = []
        for attribute in ("_saved_dim", "_saved_dim0", "_saved_dim1"):
            found = getattr(node, attribute, None)
            dims += [found] if isinstance(found, int) else found or ()
        signed = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]
        return bool(dims) and all(dim > 0 or -least < dim < 0 for dim in signed)
    normalized = len(getattr(node, "_saved_normalized_shape", ()))
    return name in _APART and least == max(map(len, shapes)) and normalized < least
