"""A forward pass in which every use of a parameter is noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deltabars.curvature.elements import Part, Use, followed
from deltabars.curvature.layers import Call, Pair, Window


@dataclass
class Recorder(TorchFunctionMode):
    """Notes every call of a layer whose weight or bias is among `names`, while it is active.

    Attributes:
        names: of parameters, by the identity of their tensors.
        batch_size: B.
        calls: the layers called.
        uses: of parameters that scale, shift or are looked up.
        elsewhere: the names of parameters that were used in any other way.
    """

    names: Mapping[int, str]
    batch_size: int
    calls: list[Call] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def followed(self) -> list[Call | Use]:
        """The calls, then the uses."""
        return [*self.calls, *self.uses]

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
        found = followed(func, self.batch_size, args, kwargs)
        if found is not None and used <= {id(part.parameter) for part in found[1]}:
            return self._use(*found)
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # not just its shape
            self.elsewhere |= {self.names[key] for key in used}
        return result

    def _use(self, result: Tensor, parts: list[Part]) -> Tensor:
        if not result.requires_grad:  # so that it has a place in the graph
            result = result.detach().requires_grad_()
        edge = get_gradient_edge(result)
        for part in parts:
            name = self.names.get(id(part.parameter))
            if name is not None:
                version = 0 if part.seen is None else part.seen._version
                self.uses.append(Use(name, part.rows, edge, part.seen, version))
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
