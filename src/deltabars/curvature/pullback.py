"""Rows of derivatives by the parameters: cotangents of the outputs, pulled back to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deltabars.curvature.columns import Part, kept_parts
from deltabars.curvature.layers import Factors, Recorder
from deltabars.inputs import Inputs, leaves, map_leaves
from deltabars.network import Network

Cotangents = Callable[[Tensor], Tensor]  # outputs (B, C) -> (B, R, C)

_EXAMPLES = 3  # that the way over the layers is checked on
_AGREE = 1e-3  # relative: a wrong way is off by as much as the derivatives themselves


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

    Weights and biases of dense layers and of two-dimensional convolutions (without groups) are
    reached through the layers' activations; the rest example by example. Which are which is found
    out on the first inputs of each shape, and checked there against derivatives of single
    examples; where a later batch uses them differently, that batch goes example by example.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._rests: dict[tuple[torch.Size, ...], tuple[str, ...]] = {}

    def rows(
        self,
        inputs: Inputs,
        cotangents: Cotangents,
        out: Tensor | None = None,
        parts: Mapping[str, Part] | None = None,
    ) -> Tensor:
        """The rows (B, R, P), written to `out` where that is given; or the parts of them alone."""
        pulled = self.pull(inputs, cotangents)
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

    def pull(self, inputs: Inputs, cotangents: Cotangents) -> Pulled:
        """The rows in parts. Cost: R backward passes without weights."""
        shape = tuple(leaf.shape[1:] for leaf in leaves(inputs))
        if shape not in self._rests:
            self._rests[shape] = self._find_rest(inputs)
        rest = self._rests[shape]
        names = [name for name in self.network.trained if name not in rest]
        pulled = self._through_layers(inputs, cotangents, names) if names else None
        if pulled is None:
            outputs = self.network.outputs(dict(self.network.trained), inputs)
            pulled = Pulled(outputs, cotangents(outputs).shape[1], [], {})
            rest = tuple(self.network.trained)
        if rest:
            pulled.loose.update(self._one_by_one(inputs, cotangents(pulled.outputs), rest))
        return pulled.scaled(self.network.scales) if self.network.scales else pulled

    def _through_layers(
        self, inputs: Inputs, cotangents: Cotangents, names: list[str]
    ) -> Pulled | None:
        """The rows by the named parameters; None where they are not used in layers alone."""
        recorder, outputs = self._record(inputs, names)
        if not recorder.reached.issuperset(names) or recorder.elsewhere:
            return None
        edges = [call.edge for call in recorder.calls]
        back = cotangents(outputs.detach()).transpose(0, 1)  # (R, B, C)
        gradients = _gradients(outputs, edges, back)
        loose: dict[str, Tensor] = {}
        layers = []
        for call, gradient in zip(recorder.calls, gradients, strict=True):
            if gradient is None:  # the outputs do not depend on this layer
                continue
            factors = call.factors(gradient)
            if factors.bias is not None:
                _add(loose, factors.bias, factors.bias_rows())
            layers.append(factors)
        weights = [factors.weight for factors in layers if factors.weight is not None]
        shared = {name for name in weights if weights.count(name) > 1}
        for factors in layers:  # the rows of a weight that several calls share are their sum
            if factors.weight in shared:
                _add(loose, factors.weight, factors.weight_rows())
        alone = [f for f in layers if f.weight is not None and f.weight not in shared]
        return Pulled(outputs.detach(), back.shape[0], alone, loose)

    def _record(self, inputs: Inputs, names: list[str]) -> tuple[Recorder, Tensor]:
        trained = dict(self.network.trained)
        tracked = {id(trained[name]): name for name in names}
        recorder = Recorder(tracked, leaves(inputs)[0].shape[0])
        with torch.enable_grad(), recorder:
            outputs = self.network.outputs(trained, inputs)
        return recorder, outputs

    def _one_by_one(
        self, inputs: Inputs, cotangents: Tensor, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        trained = dict(self.network.trained)
        chosen = {name: trained[name] for name in names}

        def one(example: Inputs, rows: Tensor) -> dict[str, Tensor]:
            def output(at: dict[str, Tensor]) -> Tensor:
                return self.network.one_output({**trained, **at}, example)

            pull = torch.func.vjp(output, chosen)[1]
            if len(rows) == 1:  # one vmap less, which some operations do not bear twice
                return {name: part[None] for name, part in pull(rows[0])[0].items()}
            derivatives: dict[str, Tensor] = torch.func.vmap(pull)(rows)[0]
            return derivatives

        parts = torch.func.vmap(one)(inputs, cotangents)
        return {name: part.reshape(*part.shape[:2], -1) for name, part in parts.items()}

    def _find_rest(self, inputs: Inputs) -> tuple[str, ...]:
        """The parameters that cannot be reached through layers, by trying."""
        # More than one example, repeated if need be: of one it is not seen which dimension counts.
        some = torch.arange(_EXAMPLES, device=self.network.device) % leaves(inputs)[0].shape[0]
        few = map_leaves(lambda leaf: leaf[some], inputs)
        names = list(self.network.trained)
        recorder, outputs = self._record(few, names)
        changed = any(call.inputs._version != call.version for call in recorder.calls)
        good = [
            name
            for name in names
            if name in recorder.reached and name not in recorder.elsewhere and not changed
        ]
        mixed = self._mixed(inputs, good) if good else set()
        good = [name for name in good if name not in mixed]
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(outputs.shape, generator=generator).to(outputs)
        pulled = self._through_layers(few, lambda _: direction[:, None], good) if good else None
        if pulled is None:
            return tuple(names)
        parts = dict(pulled.loose)
        for factors in pulled.layers:
            if factors.weight is not None:
                parts[factors.weight] = factors.weight_rows()
        right = self._agreeing(few, direction, parts)
        return tuple(name for name in names if name not in right)

    def _mixed(self, inputs: Inputs, names: list[str]) -> set[str]:
        """The names of layers that see the examples in another order, or together.

        Outputs of one half of the examples send no signals to the other half of a layer's output.
        """
        recorder, outputs = self._record(inputs, names)
        if not recorder.calls:
            return set()
        generator = torch.Generator().manual_seed(1)
        half = torch.rand(len(outputs), generator=generator).to(outputs.device) < 0.5
        back = (half[:, None] * torch.ones_like(outputs))[None]
        found = set()
        for call, gradient in zip(
            recorder.calls,
            _gradients(outputs, [call.edge for call in recorder.calls], back),
            strict=True,
        ):
            if gradient is not None and bool(gradient[0][~half].any()):
                found |= {name for name in (call.weight, call.bias) if name}
        return found

    def _agreeing(self, few: Inputs, direction: Tensor, parts: dict[str, Tensor]) -> set[str]:
        """The names whose rows (B, 1, ·) are the derivatives of single examples."""
        trained = {
            name: value.clone().requires_grad_(name in parts)
            for name, value in self.network.trained.items()
        }
        with torch.enable_grad():
            outputs = self.network.outputs(trained, few)
            totals = (outputs * direction).sum(1).unbind()
        right = set(parts)
        for example, total in enumerate(totals):
            chosen = [trained[name] for name in parts]
            single = torch.autograd.grad(total, chosen, retain_graph=True, materialize_grads=True)
            for (name, rows), gradient in zip(parts.items(), single, strict=True):
                gap = float((rows[example, 0] - gradient.flatten()).norm())
                if not gap <= _AGREE * float(gradient.norm()):
                    right.discard(name)
        return right


def _gradients(outputs: Tensor, edges: list[GradientEdge], back: Tensor) -> list[Tensor | None]:
    """The gradients (R, B, …) of rows of cotangents (R, B, C), by places in the graph."""
    if back.shape[0] == 1:
        single = torch.autograd.grad(outputs, edges, back[0], allow_unused=True)
        return [None if gradient is None else gradient[None] for gradient in single]
    return list(torch.autograd.grad(outputs, edges, back, allow_unused=True, is_grads_batched=True))


def _add(parts: dict[str, Tensor], name: str, rows: Tensor) -> None:
    parts[name] = parts[name] + rows if name in parts else rows
