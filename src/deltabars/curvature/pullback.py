"""Rows of derivatives by the parameters: cotangents of the outputs, pulled back to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deltabars.curvature.columns import Part, kept_parts
from deltabars.curvature.footprint import Footprint
from deltabars.curvature.layers import Factors, joined
from deltabars.curvature.recorder import Recorder
from deltabars.curvature.singles import UNSUPPORTED, Singles, agree, total_norm
from deltabars.inputs import Inputs, leaves, map_leaves
from deltabars.memory import ran_out
from deltabars.network import Network

Cotangents = Callable[[Tensor], Tensor]  # outputs (B, C) -> (B, R, C)

_EXAMPLES = 3  # that the way over the layers is checked on


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
    through the layers' activations; the rest example by example. Which are which is found
    out on the first inputs of each shape, and checked there against derivatives of single
    examples; where a later batch uses them differently, that batch goes example by example.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._singles = Singles(network)
        self._rows_together: bool | None = None  # not known yet
        self._rests: dict[tuple[torch.Size, ...], tuple[str, ...]] = {}
        self._footprints: dict[tuple[int | None, tuple[torch.Size, ...]], Footprint] = {}

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
            pulled.loose.update(self._singles.rows(inputs, cotangents(pulled.outputs), rest))
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

    def _through_layers(
        self, inputs: Inputs, cotangents: Cotangents, names: list[str]
    ) -> Pulled | None:
        """The rows by the named parameters; None where they are not used in layers alone."""
        recorder, outputs = self._record(inputs, names)
        if recorder.elsewhere:
            return None
        edges = [call.edge for call in recorder.followed]
        back = cotangents(outputs.detach()).transpose(0, 1)  # (R, B, C)
        gradients = self._gradients(outputs, edges, back)
        loose: dict[str, Tensor] = {}
        layers = []
        count = len(recorder.calls)
        for use, gradient in zip(recorder.uses, gradients[count:], strict=True):
            if gradient is not None:
                _add(loose, use.name, use.rows(gradient))
        for call, gradient in zip(recorder.calls, gradients[:count], strict=True):
            if gradient is None:  # the outputs do not depend on this layer
                continue
            factors = call.factors(gradient)
            if factors.bias is not None:
                _add(loose, factors.bias, factors.bias_rows())
            layers.append(factors)
        weights = joined([factors for factors in layers if factors.weight is not None])
        seen = loose.keys() | {factors.weight for factors in weights}
        for name in [name for name in names if name not in seen]:
            # Not used, or not by what the outputs depend on.
            size = self.network.trained[name].numel()
            loose[name] = outputs.new_zeros(len(outputs), len(back), size)
        return Pulled(outputs.detach(), back.shape[0], weights, loose)

    def _gradients(
        self, outputs: Tensor, edges: list[GradientEdge], back: Tensor
    ) -> list[Tensor | None]:
        """The gradients (R, B, …) of rows of cotangents (R, B, C), by places in the graph."""
        if self._rows_together is not False and back.shape[0] > 1:
            untried = self._rows_together is None  # then the graph is held for another way
            options = {"retain_graph": untried, "allow_unused": True, "is_grads_batched": True}
            try:
                batched = torch.autograd.grad(outputs, edges, back, **options)
            except UNSUPPORTED as error:  # an operation whose derivative does not bear vmap
                if ran_out(error) or not untried:
                    raise
                self._rows_together = False
            else:
                self._rows_together = True
                return list(batched)
        last = len(back) - 1
        single = [
            torch.autograd.grad(outputs, edges, row, retain_graph=r < last, allow_unused=True)
            for r, row in enumerate(back)
        ]
        return [
            None if parts[0] is None else torch.stack(parts) for parts in zip(*single, strict=True)
        ]

    def _record(self, inputs: Inputs, names: list[str]) -> tuple[Recorder, Tensor]:
        trained = dict(self.network.trained)
        tracked = {id(trained[name]): name for name in names}
        recorder = Recorder(tracked, leaves(inputs)[0].shape[0])
        with torch.enable_grad(), recorder:
            outputs = self.network.outputs(trained, inputs)
        return recorder, outputs

    def _find_rest(self, inputs: Inputs) -> tuple[str, ...]:
        """The parameters that cannot be reached through layers, by trying."""
        # More than one example, repeated if need be: of one it is not seen which dimension counts.
        some = torch.arange(_EXAMPLES, device=self.network.device) % leaves(inputs)[0].shape[0]
        few = map_leaves(lambda leaf: leaf[some], inputs)
        names = list(self.network.trained)
        try:
            recorder, outputs = self._record(few, names)
        except UNSUPPORTED as error:  # positions for each example, say, where it expects one
            if ran_out(error):
                raise
            return tuple(names)
        changed = any(call.is_changed for call in recorder.followed)
        good = [name for name in names if name not in recorder.elsewhere and not changed]
        mixed = self._mixed(inputs, good) if good else set()
        good = [name for name in good if name not in mixed]
        generator = torch.Generator().manual_seed(0)
        size = (_EXAMPLES, _EXAMPLES, outputs.shape[1])  # as many rows as examples: see Singles
        back = torch.randn(size, generator=generator).to(outputs)
        pulled = self._through_layers(few, lambda _: back, good) if good else None
        if pulled is None:
            return tuple(names)
        parts = dict(pulled.loose)
        for factors in pulled.layers:
            if factors.weight is not None:
                parts[factors.weight] = factors.weight_rows()
        right = self._agreeing(few, back, parts)
        return tuple(name for name in names if name not in right)

    def _mixed(self, inputs: Inputs, names: list[str]) -> set[str]:
        """The names of layers that see the examples in another order, or together.

        Outputs of one half of the examples send no signals to the other half of a layer's output.
        """
        recorder, outputs = self._record(inputs, names)
        calls = recorder.followed
        if not calls:
            return set()
        generator = torch.Generator().manual_seed(1)
        half = torch.rand(len(outputs), generator=generator).to(outputs.device) < 0.5
        back = (half[:, None] * torch.ones_like(outputs))[None]
        found = set()
        gradients = self._gradients(outputs, [call.edge for call in calls], back)
        for call, gradient in zip(calls, gradients, strict=True):
            if gradient is not None and bool(gradient[0][~half].any()):
                found |= set(call.names)
        return found

    def _agreeing(self, few: Inputs, back: Tensor, parts: dict[str, Tensor]) -> set[str]:
        """The names whose rows (B, R, ·) are the derivatives of single examples."""
        trained = {
            name: value.clone().requires_grad_(name in parts)
            for name, value in self.network.trained.items()
        }
        with torch.enable_grad():
            outputs = self.network.outputs(trained, few)
            totals = (outputs[:, None] * back).sum(2).flatten().unbind()  # (B·R,)
        right = set(parts)
        chosen = [trained[name] for name in parts]
        for (n, r), total in zip(product(*map(range, back.shape[:2])), totals, strict=True):
            single = torch.autograd.grad(total, chosen, retain_graph=True, materialize_grads=True)
            whole = total_norm(single)
            for (name, rows), gradient in zip(parts.items(), single, strict=True):
                if not agree(rows[n, r], gradient.flatten(), whole):
                    right.discard(name)
        return right


def _add(parts: dict[str, Tensor], name: str, rows: Tensor) -> None:
    parts[name] = parts[name] + rows if name in parts else rows
