"""Parameters that scale, shift or are looked up: norms, embeddings, positions, class tokens.

What comes back to the result δ of such a call gives the derivatives for each example directly:

    y = w∘x + b      ∂/∂w = Σ δ∘x      ∂/∂b = Σ δ       over the places that share w and b
    y_t = E[id_t]    ∂/∂E[k] = Σ_{t: id_t = k} δ_t
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from deltabars.curvature.layers import Call, Pair, Window

Rows = Callable[[Tensor], Tensor]  # gradients (R, B, …) by a result -> rows (B, R, ·)


@dataclass(frozen=True)
class Use:
    """One use of a parameter.

    Attributes:
        name: of the parameter.
        rows: its rows, from the gradients by the result.
        edge: where in the graph of derivatives the result is.
        seen: what the rows need, and its version at the time, to notice changes in place.
    """

    name: str
    rows: Rows
    edge: GradientEdge
    seen: Tensor | None
    version: int

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of it."""
        return (self.name,)

    @property
    def is_changed(self) -> bool:
        """Whether what was seen has been altered since."""
        return self.seen is not None and self.seen._version != self.version


@dataclass(frozen=True)
class Part:
    """A parameter in a call, and how its rows follow; `seen` is what they need of the call."""

    parameter: Tensor
    rows: Rows
    seen: Tensor | None = None


Result = tuple[Tensor, list[Part]]


def _sum_to(shape: torch.Size, gradients: Tensor) -> Tensor:
    """Gradients (R, B, …) summed over what shares a parameter of this shape: (B, R, ·)."""
    sizes = list(shape)[-(gradients.ndim - 2) :] if gradients.ndim > 2 else []
    sizes = [1] * (gradients.ndim - 2 - len(sizes)) + sizes
    shared = [place + 2 for place, size in enumerate(sizes) if size == 1]
    summed = gradients.sum(shared) if shared else gradients
    return summed.flatten(2).transpose(0, 1) if summed.ndim > 2 else summed.mT.unsqueeze(2)


def _scaled_sum(shape: torch.Size, factor: Tensor, gradients: Tensor) -> Tensor:
    return _sum_to(shape, gradients * factor)


def _affine(plain: Tensor, weight: Tensor | None, bias: Tensor | None, after: int = 0) -> Result:
    """plain∘w + b, for parameters that `after` dimensions follow."""
    parts, result = [], plain
    if weight is not None:
        view = weight[(..., *[None] * after)]
        result = result * view
        seen = plain.detach()
        parts.append(Part(weight, partial(_scaled_sum, view.shape, seen), seen))
    if bias is not None:
        view = bias[(..., *[None] * after)]
        result = result + view
        parts.append(Part(bias, partial(_sum_to, view.shape)))
    return result, parts


def _layer_norm(
    input: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Result:  # fmt: skip
    return _affine(F.layer_norm(input, shape, None, None, eps), weight, bias)


def _rms_norm(
    input: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Result:
    return _affine(F.rms_norm(input, shape, None, eps), weight, None)


def _group_norm(
    input: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Result:  # fmt: skip
    return _affine(F.group_norm(input, groups, None, None, eps), weight, bias, input.ndim - 2)


def _batch_norm(
    input: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Result | None:  # fmt: skip
    if training:
        return None
    plain = F.batch_norm(input, mean, variance, None, None, False, momentum, eps)
    return _affine(plain, weight, bias, input.ndim - 2)


def _embedding(
    batch: int, ids: Tensor, weight: Tensor, *options: Any, **more: Any
) -> Result | None:
    # Padding and the like have been seen to (`definitions`), but for a norm that is held.
    if (len(options) > 1 and options[1] is not None) or more.get("max_norm") is not None:
        return None
    if ids.ndim > 1 and ids.shape[0] == 1:  # positions, say, that all examples share
        ids = ids.expand(batch, *ids.shape[1:])
    if ids.ndim == 0 or ids.shape[0] != batch:
        return None
    return F.embedding(ids, weight), [Part(weight, partial(_looked_up, ids, len(weight)), ids)]


def _looked_up(ids: Tensor, count: int, gradients: Tensor) -> Tensor:
    rows, batch, width = gradients.shape[0], gradients.shape[1], gradients.shape[-1]
    places = ids.reshape(batch, -1) + count * torch.arange(batch, device=ids.device)[:, None]
    signals = gradients.reshape(rows, -1, width).transpose(0, 1)  # (B·T, R, D)
    table = gradients.new_zeros(batch * count, rows, width)
    table.index_add_(0, places.flatten(), signals)
    return table.view(batch, count, rows, width).transpose(1, 2).flatten(2)


def _sum(batch: int, left: Any, right: Any) -> Result | None:
    given = _parameter_and_rest(batch, left, right)
    if given is None:
        return None
    return left + right, [Part(given[0], partial(_sum_to, given[0].shape))]


def _product(batch: int, left: Any, right: Any) -> Result | None:
    given = _parameter_and_rest(batch, left, right)
    if given is None:
        return None
    seen = given[1].detach()
    rows = partial(_scaled_sum, given[0].shape, seen)
    return left * right, [Part(given[0], rows, seen)]


def _parameter_and_rest(batch: int, left: Any, right: Any) -> tuple[Tensor, Tensor] | None:
    """The one that is spread over the other one, whose first dimension counts examples."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    small, large = (left, right) if left.numel() < right.numel() else (right, left)
    spread = torch.broadcast_shapes(small.shape, large.shape) == large.shape
    per_example = small.ndim == large.ndim and small.ndim > 0 and small.shape[0] != 1
    if not spread or per_example or large.ndim < 2 or large.shape[0] != batch:
        return None
    return small, large


def _expand(batch: int, parameter: Tensor, *sizes: Any) -> Result | None:
    result = parameter.expand(*sizes)
    new = result.ndim > parameter.ndim or parameter.shape[0] == 1
    if result.ndim < 2 or result.shape[0] != batch or not new:
        return None
    return result, [Part(parameter, partial(_sum_to, parameter.shape))]


_NORMS: dict[Any, Callable[..., Result | None]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
}
_OTHERS: dict[Any, Callable[..., Result | None]] = {
    F.embedding: _embedding,
    Tensor.expand: _expand,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _sum),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _product),
}


def followed(func: Any, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    """The result of a call and its parameters' parts in it; None where it is none of these."""
    if func in _NORMS:
        fits = isinstance(args[0], Tensor) and args[0].shape[0] == batch if args else False
        return _NORMS[func](*args, **kwargs) if fits else None
    if func in _OTHERS and (func is F.embedding or not kwargs):
        return _OTHERS[func](batch, *args, **kwargs)
    return None


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
