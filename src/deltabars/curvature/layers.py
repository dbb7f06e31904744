"""The dense and convolutional layers of a forward pass, as they were called.

The derivative of an output by a layer's weight is a sum over positions t of outer products

    ∂/∂W = Σ_t δ_t a_tᵀ        ∂/∂b = Σ_t δ_t

of what came back to the layer's output (δ) and what went into it (a; for a convolution, its
patches). δ is that of every example at once, at the cost of one backward pass without weights; so
nothing is computed example by example, and no outer product is formed before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deltabars.curvature.patches import patches

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """How a convolution moves over its input."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair


@dataclass(frozen=True)
class Call:
    """One call of a layer on a batch.

    Attributes:
        weight, bias: the names of its parameters; None for those that are not asked for.
        inputs: what went in, (B, …, I) or (B, I, H, W).
        version: of the inputs at the time, to notice if they are changed in place later.
        edge: where in the graph of derivatives its output is.
        window: of a convolution.
    """

    weight: str | None
    bias: str | None
    inputs: Tensor
    version: int
    edge: GradientEdge
    window: Window | None

    def factors(self, gradients: Tensor) -> Factors:
        """The factors a and δ of this call, from the gradients (R, B, …) by its output."""
        if self.window is None:
            activations = self.inputs.reshape(self.inputs.shape[0], -1, self.inputs.shape[-1])
            signals = gradients.flatten(2, -2).mT if gradients.ndim > 3 else gradients[..., None]
        else:
            window = self.window
            activations = patches(
                self.inputs, window.kernel, window.stride, window.padding, window.dilation
            )
            signals = gradients.flatten(3)
        return Factors(self.weight, self.bias, activations, signals.transpose(0, 1))


@dataclass(frozen=True)
class Factors:
    """What a layer's part of R rows of derivatives is made of, for each of B examples.

    Attributes:
        weight, bias: the names of the layer's parameters.
        activations: a, (B, T, I).
        signals: δ, (B, R, O, T).
    """

    weight: str | None
    bias: str | None
    activations: Tensor
    signals: Tensor

    def at(self, outputs: Tensor, inputs: Tensor) -> Factors:
        """The factors of some outputs (O',) and inputs (I',) alone."""
        activations, signals = self.activations, self.signals
        if len(inputs) < activations.shape[2]:
            activations = activations.index_select(2, inputs)
        if len(outputs) < signals.shape[2]:
            signals = signals.index_select(2, outputs)
        return replace(self, activations=activations, signals=signals)

    def not_zero(self) -> tuple[Tensor, Tensor]:
        """The outputs (O',) and inputs (I',) that are not zero throughout."""
        outputs = self.signals.transpose(0, 2).flatten(1).any(1)
        inputs = self.activations.flatten(0, 1).any(0)
        return outputs.nonzero().squeeze(1), inputs.nonzero().squeeze(1)

    def weight_rows(self, out: Tensor | None = None) -> Tensor:
        """Σ_t δ_t a_tᵀ, (B, R, O·I), in `out` where that is given. Cost: T·O·I operations a row."""
        batch, count, outputs, _ = self.signals.shape
        if out is None:
            rows = self.signals.flatten(1, 2) @ self.activations  # (B, R·O, I)
            return rows.view(batch, count, outputs * rows.shape[2])
        for r in range(count):
            place = out[:, r].unflatten(1, (outputs, -1))
            torch.bmm(self.signals[:, r], self.activations, out=place)
        return out

    def bias_rows(self) -> Tensor:
        """Σ_t δ_t, (B, R, O)."""
        return self.signals.sum(-1)

    def gram(self) -> Tensor:
        """The inner products of the weight's rows, (B, R, R), float64: Σ_ts (a_t·a_s)(δ_t·δ_s)."""
        activations, signals = self.activations.double(), self.signals.double()
        between = activations @ activations.mT  # (B, T, T)
        weighted = signals @ between.unsqueeze(1)  # (B, R, O, T)
        return weighted.flatten(2) @ signals.flatten(2).mT

    def add_projection(self, basis: Tensor, total: Tensor) -> None:
        """Add the products of the weight's rows with a basis (K, O, I) to (B, R, K), float64.

        The activations, which all R rows share, are contracted with the basis first: T·K·O·I
        operations for all rows together.
        """
        count, outputs, inputs = basis.shape
        columns = basis.permute(2, 0, 1).reshape(inputs, count * outputs)  # (I, K·O)
        for t in range(self.signals.shape[3]):
            shared = (self.activations[:, t] @ columns).unflatten(1, (count, outputs))  # (B, K, O)
            total += self.signals[..., t] @ shared.mT  # (B, R, K)

    def numbers_per_input(self, columns: int) -> int:
        """How many numbers the rows, or what takes their place, are for one input."""
        _, count, outputs, positions = self.signals.shape
        inputs = self.activations.shape[2]
        ends = positions * (inputs + count * outputs)
        return ends + (columns * outputs if self.is_cheaper_shared() else count * outputs * inputs)

    def is_cheaper_shared(self) -> bool:
        """Whether `add_projection` takes well fewer operations than forming the rows first."""
        return 2 * self.signals.shape[3] <= self.signals.shape[1]


def joined(layers: Sequence[Factors]) -> list[Factors]:
    """The factors with those of one weight put together: the sum of its calls is over positions."""
    calls: dict[str | None, list[Factors]] = {}
    for factors in layers:
        calls.setdefault(factors.weight, []).append(factors)
    return [
        group[0]
        if len(group) == 1
        else replace(
            group[0],
            activations=torch.cat([factors.activations for factors in group], 1),
            signals=torch.cat([factors.signals for factors in group], 3),
        )
        for group in calls.values()
    ]


@dataclass
class Recorder(TorchFunctionMode):
    """Notes every call of a layer whose weight or bias is among `names`, while it is active.

    Attributes:
        names: of parameters, by the identity of their tensors.
        batch_size: B.
        calls: the layers called.
        elsewhere: the names of parameters that were used in any other way.
    """

    names: Mapping[int, str]
    batch_size: int
    calls: list[Call] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def reached(self) -> set[str]:
        """The names of parameters that layers were called with."""
        return {name for call in self.calls for name in (call.weight, call.bias) if name}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note what it does with the parameters."""
        kwargs = kwargs or {}
        used = {id(leaf) for leaf in tree_leaves((args, kwargs))} & self.names.keys()
        if not used or not torch.is_grad_enabled():  # nothing depends on what is done without
            return func(*args, **kwargs)
        layer = _LAYERS.get(func)
        if layer is not None:
            inputs, weight, bias, window = layer(*args, **kwargs)
            if self._fits(inputs, weight, window) and not used - {id(weight), id(bias)}:
                function = partial(_again, func, args, kwargs)
                return self._call(inputs, weight, bias, window, function)
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # not just its shape
            self.elsewhere |= {self.names[key] for key in used}
        return result

    def _fits(self, inputs: Tensor, weight: Tensor, window: Window | str | None) -> bool:
        if window == _UNUSUAL or inputs.ndim < 2 or inputs.shape[0] != self.batch_size:
            return False
        return weight.ndim == 2 if window is None else weight.ndim == inputs.ndim == 4

    def _call(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Any,
        function: Callable[[Tensor], Tensor],
    ) -> Tensor:
        if not inputs.requires_grad:  # so that the output has a place in the graph
            inputs = inputs.detach().requires_grad_()
        output = function(inputs)
        if output.dtype != inputs.dtype:  # autocast, whose casts are part of the derivative
            used = {id(weight), id(bias)} & self.names.keys()
            self.elsewhere |= {self.names[key] for key in used}
            return output
        found = self.names.get
        names = found(id(weight)), None if bias is None else found(id(bias))
        seen = inputs.detach()
        call = Call(*names, seen, seen._version, get_gradient_edge(output), window)
        self.calls.append(call)
        return output


_UNUSUAL = "unusual"


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Tensor) -> Tensor:
    """Call a layer with other inputs."""
    result: Tensor = (
        func(inputs, *args[1:], **kwargs) if args else func(**{**kwargs, "input": inputs})
    )
    return result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return input, weight, bias, None


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    window: Window | str = _UNUSUAL
    if groups == 1 and not isinstance(padding, str) and weight.ndim == 4:
        kernel = (weight.shape[2], weight.shape[3])
        window = Window(kernel, _pair(stride), _pair(padding), _pair(dilation))
    return input, weight, bias, window


def _pair(value: Any) -> Pair:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return (sizes[0], sizes[-1])


_LAYERS: dict[Any, Callable[..., Any]] = {F.linear: _linear, F.conv2d: _conv2d}
