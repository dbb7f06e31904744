"""Layers without the units and inputs that no output depends on.

Weight decay leaves many ReLU units that no training example switches on. Their weights have no
derivative, for any example (`Problem.reached`). So dense layers and convolutions are computed
without the rows and columns of their weights that have none: the results are put among zeros, which
the ReLU behind them passes on as zeros. Whether that is the same function is not reasoned about but
measured, on all examples (see `HessianOperator`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deltabars.problem.parameters import ParameterSpace

_CHANNELS = {F.linear: -1, F.conv2d: 1}  # the dimension of inputs and results that has them

Slices = Mapping[str, tuple[Tensor, Tensor]]  # by weight: the rows (O',) and columns (I',) kept


def slices_of(space: ParameterSpace, reached: Tensor) -> Slices:
    """Return the rows and columns of each weight that hold reached numbers, where some do not.

    Args:
        space: of the parameters.
        reached: indices of the reached ones, (P',).
    """
    mask = torch.zeros(space.size, dtype=torch.bool, device=reached.device)
    mask[reached] = True
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
            found[name] = _indices(rows), _indices(columns)
    return found


def _indices(mask: Tensor) -> Tensor:
    """Return the indices that are set; at least one, as a layer without units is none."""
    return mask.nonzero().squeeze(1) if bool(mask.any()) else mask.new_zeros(1, dtype=torch.long)


class Sliced(TorchFunctionMode):
    """Run a forward pass with slices of the weights.

    Args:
        trained: the parameters as the forward pass has them.
        slices: what is kept of some of them.
    """

    def __init__(self, trained: Mapping[str, Tensor], slices: Slices) -> None:
        super().__init__()
        self._slices = {id(trained[name]): kept for name, kept in slices.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, with slices of its weight where it is a layer that has them."""
        kwargs = kwargs or {}
        channels = _CHANNELS.get(func)
        kept = self._slices.get(id(args[1])) if channels and len(args) > 1 else None
        if kept is None or channels is None or not _is_plain(func, args, kwargs):
            return func(*args, **kwargs)
        inputs, weight, *rest = args
        rows, columns = kept
        weight = weight.index_select(0, rows).index_select(1, columns)
        if rest and rest[0] is not None:
            rest[0] = rest[0].index_select(0, rows)
        if kwargs.get("bias") is not None:
            kwargs = {**kwargs, "bias": kwargs["bias"].index_select(0, rows)}
        part = func(inputs.index_select(channels, columns), weight, *rest, **kwargs)
        sizes = list(part.shape)
        sizes[channels] = args[1].shape[0]
        return part.new_zeros(sizes).index_copy(channels % part.ndim, rows, part)


def _is_plain(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a layer connects all of its inputs (no groups, no missing batch)."""
    inputs, weight = args[:2]
    if func is F.linear:
        return bool(inputs.ndim >= 2 and weight.ndim == 2)
    return bool(inputs.ndim == weight.ndim == 4 and inputs.shape[1] == weight.shape[1])
