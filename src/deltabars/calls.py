"""What calls of torch's functions do to the channels of their arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
# What is done to each channel by itself, and keeps zeros zero.
DROPOUTS = {F.dropout, F.dropout2d, torch.clone, Tensor.clone}
POOLINGS = {torch.max_pool2d, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d}
RESHAPES = {torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape, torch.reshape}
_FACTS = (int, str, torch.dtype, torch.device, torch.layout)


def is_plain_layer(func: Any, args: tuple[Any, ...], full: int | None) -> bool:
    """Whether a call is of a layer that takes (B, I), or (B, C, H, W) without groups.

    `full` is the number of inputs or channels with those that are left out, where that is known.
    """
    if func not in (F.linear, F.conv2d) or len(args) < 2:
        return False
    inputs, weight = args[:2]
    size = 2 if func is F.linear else 4
    if inputs.ndim != size or weight.ndim != size:
        return False
    return bool(weight.shape[1] == (inputs.shape[1] if full is None else full))


def batch_norm_arguments(
    input: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `F.batch_norm`, in their order."""
    return input, mean, variance, weight, bias, training, momentum, eps


def is_fact(result: Any) -> bool:
    """Whether a result is about the shape or kind of a tensor, and not about its values."""
    return result is not None and all(isinstance(leaf, _FACTS) for leaf in tree_leaves(result))


def changes_its_first(func: Any) -> bool:
    """Whether a function writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return bool(name.endswith("_"))
