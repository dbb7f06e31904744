"""Rows of derivatives from the calls of a network's layers.

A call with parameters, its inputs, and the gradients δ by its result give the derivatives by the
parameters for each example, without another pass:

    y = W a + b      ∂/∂W = Σ_t δ_t a_tᵀ    ∂/∂b = Σ_t δ_t      dense layers; convolutions' patches
    y = w∘x + b      ∂/∂w = Σ δ∘x           ∂/∂b = Σ δ          norms, scales, class tokens
    y_t = E[id_t]    ∂/∂E[k] = Σ_{t: id_t = k} δ_t              embeddings

`Recorder` notes such calls during a forward pass; `pullback.py` computes δ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Pair = tuple[int, int]


def patches(images: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, T, C·k·l), in the order of a weight (O, C, k, l).

    On a GPU a strided view is copied, some fifty times as fast as by `F.unfold`, which goes from
    image to image; on a CPU that is what pays.
    """
    if images.device.type == "cpu":
        return F.unfold(images, kernel, dilation, padding, stride).mT
    if any(padding):
        images = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    windows = images.unfold(2, spans[0], stride[0]).unfold(3, spans[1], stride[1])
    windows = windows[..., :: dilation[0], :: dilation[1]]  # (B, C, h, w, k, l)
    count = windows.shape[2] * windows.shape[3]
    columns = windows.shape[1] * kernel[0] * kernel[1]
    return windows.permute(0, 2, 3, 1, 4, 5).reshape(images.shape[0], count, columns)


@dataclass(frozen=True)
class Factors:
    """R rows of derivatives by a layer's weight (O, I), for each of B examples, as factors."""

    activations: Tensor  # a, (B, T, I)
    signals: Tensor  # δ, (B, R, O, T)

    @classmethod
    def of(cls, inputs: Tensor, window: Sequence[Any] | None, gradients: Tensor) -> Factors:
        """Return the factors, from inputs (B, …, I) and the gradients (R, B, …) by the result.

        Those of a convolution are (B, I, H, W), with a window for `patches`.
        """
        if window is not None:
            activations, signals = patches(inputs, *window), gradients.flatten(3)
        else:
            activations = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
            signals = gradients.flatten(2, -2).mT if gradients.ndim > 3 else gradients[..., None]
        return cls(activations, signals.transpose(0, 1))

    def at(self, outputs: Tensor, inputs: Tensor) -> Factors:
        """Return the factors of some outputs (O',) and inputs (I',)."""
        activations, signals = self.activations, self.signals
        if len(inputs) < activations.shape[2]:
            activations = activations.index_select(2, inputs)
        if len(outputs) < signals.shape[2]:
            signals = signals.index_select(2, outputs)
        return Factors(activations, signals)

    def not_zero(self) -> tuple[Tensor, Tensor]:
        """Return the outputs (O',) and inputs (I',) that are not zero throughout."""
        outputs = self.signals.transpose(0, 2).flatten(1).any(1)
        inputs = self.activations.flatten(0, 1).any(0)
        return outputs.nonzero().squeeze(1), inputs.nonzero().squeeze(1)

    def weight_rows(self, out: Tensor | None = None) -> Tensor:
        """Compute Σ_t δ_t a_tᵀ, (B, R, O·I), in `out` if given. Cost: T·O·I operations a row."""
        batch, count, outputs, _ = self.signals.shape
        if out is None:
            rows = self.signals.flatten(1, 2) @ self.activations  # (B, R·O, I)
            return rows.view(batch, count, outputs * rows.shape[2])
        for r in range(count):
            place = out[:, r].unflatten(1, (outputs, -1))
            torch.bmm(self.signals[:, r], self.activations, out=place)
        return out

    def gram(self) -> Tensor:
        """Compute the rows' inner products (B, R, R), float64: Σ_ts (a_t·a_s)(δ_t·δ_s)."""
        activations, signals = self.activations.double(), self.signals.double()
        between = activations @ activations.mT  # (B, T, T)
        weighted = signals @ between.unsqueeze(1)  # (B, R, O, T)
        return weighted.flatten(2) @ signals.flatten(2).mT

    def add_projection(self, basis: Tensor, total: Tensor) -> None:
        """Add the products of the rows with a basis (K, O, I) to (B, R, K), float64.

        The activations are contracted first: T·K·O·I operations for all R rows together.
        """
        count, outputs, inputs = basis.shape
        columns = basis.permute(2, 0, 1).reshape(inputs, count * outputs)  # (I, K·O)
        for t in range(self.signals.shape[3]):
            shared = (self.activations[:, t] @ columns).unflatten(1, (count, outputs))  # (B, K, O)
            total += self.signals[..., t] @ shared.mT  # (B, R, K)

    @property
    def is_cheaper_shared(self) -> bool:
        """Whether `add_projection` takes well fewer operations than forming the rows first."""
        return 2 * self.signals.shape[3] <= self.signals.shape[1]

    @property
    def numbers(self) -> Pair:
        """The numbers that projecting takes for one input, and for one vector of a basis more."""
        _, count, outputs, positions = self.signals.shape
        inputs = self.activations.shape[2]
        ends = positions * (inputs + count * outputs)
        return (ends, outputs) if self.is_cheaper_shared else (ends + count * outputs * inputs, 0)


Rows = Callable[[Tensor], Tensor | Factors]  # gradients (R, B, …) by a result -> rows (B, R, ·)


class Use(NamedTuple):
    """One use of a parameter."""

    name: str
    edge: GradientEdge  # where in the graph of derivatives the call's result is
    rows: Rows  # from the gradients by the result
    seen: Tensor | None  # the input that the rows need
    version: int | None  # of it at the time


class Recorder(TorchFunctionMode):
    """Note the calls that use some parameters in a way that gives their rows.

    Such a call gets detached values of its parameters. So the parameters that the outputs' graph
    of derivatives still leads to are those that are used in another way.
    """

    def __init__(self, names: Mapping[int, str], batch: int) -> None:
        super().__init__()
        self._names = names  # of parameters, by the identity of their tensors
        self._batch = batch  # how many examples there are
        self.uses: list[Use] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note how it uses the parameters."""
        kwargs = kwargs or {}
        result = None
        # Nothing depends on what is done without; transforms of torch.func have their own graphs.
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        if func in _CALLS and torch.is_grad_enabled() and not inside:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(id(leaf) in self._names for leaf in given):
                result = self._follow(func, given, args, kwargs)
        return func(*args, **kwargs) if result is None else result

    def _follow(self, func: Any, given: list[Tensor], args: Any, kwargs: Any) -> Tensor | None:
        """Call with detached parameters; None where that does not give the rows of all of them."""
        first = not any(leaf.requires_grad for leaf in given if id(leaf) not in self._names)
        names: dict[int, str] = {}

        def detached(leaf: Any) -> Any:
            if id(leaf) not in self._names:
                return leaf
            value = leaf.detach().requires_grad_(first)  # so that the result is in the graph
            names[id(value)] = self._names[id(leaf)]
            return value

        args, kwargs = tree_map(detached, (args, kwargs))
        found = _CALLS[func](func, self._batch, *args, **kwargs)
        if found is None:
            return None
        result, parts = found
        if result.ndim < 2 or len(result) != self._batch:
            return None
        if not names.keys() <= {id(parameter) for parameter, _, _ in parts}:
            return None
        if any(parameter.dtype != result.dtype for parameter, _, _ in parts):
            return None  # autocast, whose casts are part of the derivative
        edge = get_gradient_edge(result)
        for parameter, rows, seen in parts:
            if id(parameter) in names:
                version = None if seen is None else seen._version
                self.uses.append(Use(names[id(parameter)], edge, rows, seen, version))
        return result


# The result of a call, and its parameters: their rows, and the input that these need. None where
# the call is not of the kind that gives rows.
Followed = tuple[Tensor, list[tuple[Tensor, Rows, Tensor | None]]] | None


def _linear(func: Any, batch: int, input: Tensor, weight: Tensor, bias: Any = None) -> Followed:
    if weight.ndim != 2:
        return None
    return _layer(F.linear(input, weight, bias), input, weight, bias, (), None)


def _conv2d(
    func: Any, batch: int, input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Followed:  # fmt: skip
    if groups != 1 or isinstance(padding, str) or input.ndim != 4:
        return None
    result = F.conv2d(input, weight, bias, stride, padding, dilation)
    pairs = [(n, n) if isinstance(n, int) else (n[0], n[-1]) for n in (stride, padding, dilation)]
    return _layer(result, input, weight, bias, (1, 1), [tuple(weight.shape[2:]), *pairs])


def _layer(
    result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, after: tuple[int, ...],
    window: Sequence[Any] | None,
) -> Followed:  # fmt: skip
    seen = input.detach()
    parts: list[Any] = [(weight, partial(Factors.of, seen, window), seen)]
    if bias is not None:
        parts.append((bias, partial(_sum_to, (*bias.shape, *after)), None))
    return result, parts


def _norm(func: Any, batch: int, *args: Any, **kwargs: Any) -> Followed:
    given = dict(zip(signature(func).parameters, args, strict=False)) | kwargs
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    if given.get("training"):
        return None
    result = plain = func(**given)
    after = plain.ndim - 2 if func in (F.group_norm, F.batch_norm) else 0
    parts: list[Any] = []
    seen = plain.detach()
    if weight is not None:
        view = weight[(..., *[None] * after)]
        result = result * view
        parts.append((weight, partial(_sum_to, view.shape, factor=seen), seen))
    if bias is not None:
        view = bias[(..., *[None] * after)]
        result = result + view
        parts.append((bias, partial(_sum_to, view.shape), None))
    return result, parts


def _embedding(
    func: Any, batch: int, ids: Tensor, weight: Tensor, padding: Any = None, norm: Any = None,
    *options: Any, max_norm: Any = None, **more: Any,
) -> Followed:  # fmt: skip
    # Of the options `definitions` leaves a norm that is held, which is not followed.
    if norm is not None or max_norm is not None:
        return None
    if ids.ndim > 1 and ids.shape[0] == 1:  # positions, say, that all examples share
        ids = ids.expand(batch, *ids.shape[1:])
    return F.embedding(ids, weight), [(weight, partial(_looked_up, ids, len(weight)), ids)]


def _looked_up(ids: Tensor, count: int, gradients: Tensor) -> Tensor:
    rows, batch, width = gradients.shape[0], gradients.shape[1], gradients.shape[-1]
    places = ids.reshape(batch, -1) + count * torch.arange(batch, device=ids.device)[:, None]
    signals = gradients.reshape(rows, -1, width).transpose(0, 1)  # (B·T, R, D)
    table = gradients.new_zeros(batch * count, rows, width)
    table.index_add_(0, places.flatten(), signals)
    return table.view(batch, count, rows, width).transpose(1, 2).flatten(2)


def _term(func: Any, batch: int, left: Any, right: Any, **options: Any) -> Followed:
    """Follow sums and products of a parameter with what has a row for each example."""
    if options or not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    small, large = (left, right) if left.numel() < right.numel() else (right, left)
    own = small.ndim == large.ndim and small.ndim > 0 and small.shape[0] != 1
    if own or torch.broadcast_shapes(small.shape, large.shape) != large.shape:
        return None
    seen = large.detach() if func in _PRODUCTS else None
    return func(left, right), [(small, partial(_sum_to, small.shape, factor=seen), seen)]


def _expand(func: Any, batch: int, parameter: Tensor, *sizes: Any, **options: Any) -> Followed:
    result = parameter.expand(*sizes, **options)
    if result.ndim == parameter.ndim and parameter.shape[0] != 1:
        return None
    return result, [(parameter, partial(_sum_to, parameter.shape), None)]


def _sum_to(shape: Sequence[int], gradients: Tensor, factor: Tensor | None = None) -> Tensor:
    """Sum gradients (R, B, …), times a factor, over what shares a parameter: (B, R, ·)."""
    if factor is not None:
        gradients = gradients * factor
    own = gradients.ndim - 2
    sizes = [*[1] * (own - len(shape)), *shape[max(0, len(shape) - own) :]]
    shared = [dim + 2 for dim, size in enumerate(sizes) if size == 1]
    summed = gradients.sum(shared, keepdim=True) if shared else gradients
    return summed.flatten(2).transpose(0, 1)


_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_CALLS: dict[Any, Callable[..., Followed]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.embedding: _embedding,
    Tensor.expand: _expand,
    **dict.fromkeys((F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm), _norm),
    **dict.fromkeys((*_SUMS, *_PRODUCTS), _term),
}
