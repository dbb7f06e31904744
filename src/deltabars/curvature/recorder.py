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
from torch.utils._pytree import tree_leaves, tree_map

from deltabars.curvature.elements import Use, followed
from deltabars.curvature.layers import Call, Pair, Window


@dataclass
class Recorder(TorchFunctionMode):
    """Notes the calls of layers with weights or biases among `names`, while it is active.

    Such a call gets the bare values of its parameters. So what the outputs' graph of derivatives
    still leads to (see `routes`) are the parameters that are used in any other way, be it out of
    sight of this mode.

    Attributes:
        names: of parameters, by the identity of their tensors.
        batch_size: B.
        calls: the layers called.
        uses: of parameters that scale, shift or are looked up.
    """

    names: Mapping[int, str]
    batch_size: int
    calls: list[Call] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

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
        result = None
        if used and torch.is_grad_enabled():  # nothing depends on what is done without
            bare = partial(tree_map, lambda leaf: leaf.detach() if id(leaf) in used else leaf)
            if func in _LAYERS:
                result = self._call(func, used, bare, args, kwargs)
            if result is None:
                result = self._use(func, used, bare, args, kwargs)
        return func(*args, **kwargs) if result is None else result

    def _use(self, func: Any, used: set[int], bare: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Call what scales, shifts or looks up; None where it is not that alone."""
        plain = bare((args, kwargs))
        pairs = zip(tree_leaves((args, kwargs)), tree_leaves(plain), strict=True)
        names = {id(leaf): self.names[id(given)] for given, leaf in pairs if id(given) in used}
        found = followed(func, self.batch_size, *plain)
        if found is None or not names.keys() <= {id(part.parameter) for part in found[1]}:
            return None
        result, parts = found
        if not result.requires_grad:  # so that it has a place in the graph
            result = result.detach().requires_grad_()
        edge = get_gradient_edge(result)
        for part in parts:
            name = names.get(id(part.parameter))
            if name is not None:
                version = 0 if part.seen is None else part.seen._version
                self.uses.append(Use(name, part.rows, edge, part.seen, version))
        return result

    def _call(self, func: Any, used: set[int], bare: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Call a layer; None where it cannot be followed."""
        inputs, weight, bias, window = _LAYERS[func](*args, **kwargs)
        if not self._fits(inputs, weight, window) or used - {id(weight), id(bias)}:
            return None
        if not inputs.requires_grad:  # so that the output has a place in the graph
            inputs = inputs.detach().requires_grad_()
        rest, named = bare((args[1:], kwargs))
        output: Tensor = (
            func(inputs, *rest, **named) if args else func(**{**named, "input": inputs})
        )
        if (
            not output.dtype == inputs.dtype == weight.dtype
        ):  # autocast, whose casts are part of the derivative
            return None
        names = self.names.get(id(weight)), None if bias is None else self.names.get(id(bias))
        seen = inputs.detach()
        self.calls.append(Call(*names, seen, seen._version, get_gradient_edge(output), window))
        return output

    def _fits(self, inputs: Tensor, weight: Tensor, window: Window | str | None) -> bool:
        if window == _UNUSUAL or inputs.ndim < 2 or inputs.shape[0] != self.batch_size:
            return False
        return weight.ndim == 2 if window is None else weight.ndim == inputs.ndim == 4


_UNUSUAL = "unusual"


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
