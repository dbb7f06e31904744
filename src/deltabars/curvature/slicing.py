"""Layers without the units and inputs that no output depends on.

Weight decay leaves many ReLU units that no training example switches on. Their weights have no
derivative, for any example (`Problem.reached`). So dense layers and convolutions are computed
without the rows and columns of their weights that have none. What is left of a layer's channels
goes on through ReLU, pooling and flattening to the next layer, and is put among zeros only where
something else asks for it. Whether that is the same function is not reasoned about but measured, on
all examples (see `HessianOperator`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deltabars.problem.parameters import ParameterSpace

_CHANNELS = {F.linear: -1, F.conv2d: 1}  # the dimension of inputs and results that has them
_RELU = {F.relu, torch.relu, Tensor.relu}
_MAX_POOLING = {torch.max_pool2d, F.max_pool2d}
_FLATTEN = {torch.flatten, Tensor.flatten}

Indices = tuple[int, ...]
Slices = Mapping[str, tuple[Indices, Indices]]  # by weight: the rows and columns kept


def slices_of(space: ParameterSpace, reached: Tensor) -> Slices:
    """Return the rows and columns of each weight that hold reached numbers (P',), if not all do."""
    mask = torch.zeros(space.size, dtype=torch.bool)
    mask[reached.cpu()] = True
    found = {}
    for name, shape in zip(space.names, space.shapes, strict=True):
        if len(shape) not in (2, 4):
            continue
        there = mask[space.slices[name]].view(shape[0], shape[1], -1).any(-1)  # (O, I)
        rows, columns = there.any(1), there.any(0)
        bias = name.removesuffix("weight") + "bias"
        if name.endswith("weight") and bias in space.names:
            rows |= mask[space.slices[bias]]
        if not bool(rows.all() and columns.all()):
            # At least one of each, as a layer without units is none.
            kept = [tuple(m.nonzero().squeeze(1).tolist()) or (0,) for m in (rows, columns)]
            found[name] = kept[0], kept[1]
    return found


@dataclass(frozen=True)
class _Channels:
    """Some channels of a tensor of which the others are zero."""

    part: Tensor  # the channels kept, (B, C', …); before the ReLU, if that is still to come
    kept: Indices  # which of all channels they are
    count: int  # of all channels
    dim: int  # the dimension that has them
    relu: bool = False  # whether a ReLU is still to come: behind a max pooling it has less to do

    def rectified(self) -> Tensor:
        """Return the kept channels with the ReLU applied."""
        return self.part.relu() if self.relu else self.part

    def whole(self) -> Tensor:
        """Return all channels."""
        part = self.rectified()
        sizes = list(part.shape)
        sizes[self.dim] = self.count
        kept = torch.tensor(self.kept, device=part.device)
        return part.new_zeros(sizes).index_copy(self.dim, kept, part)


class Sliced(TorchFunctionMode):
    """Run a forward pass with slices of the weights.

    Each result that has slices is made whole, too, for whatever else the model does with it. In a
    trace that is no work, as nothing depends on it.
    """

    def __init__(self, trained: Mapping[str, Tensor], slices: Slices) -> None:
        super().__init__()
        self._slices = {id(trained[name]): kept for name, kept in slices.items()}
        self._known: dict[int, tuple[Tensor, _Channels]] = {}  # by whole tensor, kept alive

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; on the channels that are kept alone, where that is the same."""
        kwargs = kwargs or {}
        found = None
        if self._slices:
            found = self._layer(func, args, kwargs) or self._between(func, args, kwargs)
        if found is None:
            return func(*args, **kwargs)
        whole = found.whole()
        self._known[id(whole)] = whole, found
        return whole

    def _layer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Channels | None:
        """Compute the kept rows of a layer from the kept columns of its inputs."""
        dim = _CHANNELS.get(func)
        kept = self._slices.get(id(args[1])) if dim and len(args) > 1 else None
        if kept is None or dim is None:
            return None
        inputs, weight, *rest = args
        has_examples = inputs.ndim >= 2 if func is F.linear else inputs.ndim == 4
        if not has_examples or inputs.shape[dim] != weight.shape[1]:  # which groups make differ
            return None
        rows, columns = kept
        known = self._known.get(id(inputs))
        if known is not None and known[1].dim == dim % inputs.ndim:
            channels = known[1]
            inputs, there = channels.rectified(), channels.kept
            columns = tuple(column for column in columns if column in there) or there[:1]
        else:
            there = tuple(range(weight.shape[1]))
        inputs = _select(inputs, dim, [there.index(column) for column in columns])
        weight = _select(_select(weight, 0, rows), 1, columns)
        bias = kwargs.get("bias", rest[0] if rest else None)
        bias = None if bias is None else _select(bias, 0, rows)
        options = {name: value for name, value in kwargs.items() if name != "bias"}
        part = func(inputs, weight, bias, *rest[1:], **options)
        return _Channels(part, rows, args[1].shape[0], dim % part.ndim)

    def _between(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> _Channels | None:
        """Apply ReLU, a pooling or a flattening to the channels that are known."""
        if not args or id(args[0]) not in self._known:
            return None
        channels = self._known[id(args[0])][1]
        if func in _RELU:
            return replace(channels, relu=True)
        if channels.dim != 1 or channels.part.ndim != 4:
            return None
        if func in _MAX_POOLING or func is F.avg_pool2d:
            delay = channels.relu and func in _MAX_POOLING
            inputs = channels.part if delay else channels.rectified()
            return replace(channels, part=func(inputs, *args[1:], **kwargs), relu=delay)
        if func in _FLATTEN and (args[1:], kwargs) in [((1,), {}), ((1, -1), {})]:
            size = channels.part.shape[2:].numel()
            kept = tuple(size * channel + at for channel in channels.kept for at in range(size))
            part = channels.part.flatten(1)
            return replace(channels, part=part, kept=kept, count=size * channels.count)
        return None


def _select(tensor: Tensor, dim: int, indices: Indices | list[int]) -> Tensor:
    """Return some indices of a dimension; the tensor itself, if they are all."""
    if list(indices) == list(range(tensor.shape[dim])):
        return tensor
    return tensor.index_select(dim, torch.tensor(indices, device=tensor.device))
