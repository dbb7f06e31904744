"""Layers that are called as they are defined, where torch's own form lacks derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from deltabars.recurrence import RECURRENT, called_with_steps


class AsDefined(TorchFunctionMode):
    """A forward pass that has derivatives of every kind, for one example and for many.

    Recurrent layers go step by step, bags are sums of embeddings, padding is a constant, and
    bilinear layers and weight norms are their formulas. It costs a microsecond a call.

    Args:
        held: what is put in the place of some tensors, by their identity, wherever they are used.
    """

    def __init__(self, held: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self._held = held or {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, or what it is made of."""
        kwargs = kwargs or {}
        if self._held:
            args, kwargs = tree_map(lambda leaf: self._held.get(id(leaf), leaf), (args, kwargs))
        if func in _DEFINITIONS:
            return _DEFINITIONS[func](*args, **kwargs)
        if func in RECURRENT and not kwargs:
            return called_with_steps(func, args)
        return func(*args, **kwargs)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding` with its true derivatives, which neither are sparse nor depend on the batch.

    The row of the padding is a constant: torch's backward derivatives say so, its forward ones
    do not, and Hessian products take both.
    """
    rows = F.embedding(input, weight, None, max_norm, norm_type)
    if padding_idx is None:
        return rows
    return rows.detach().where(_is_padding(input, weight, padding_idx)[..., None], rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`F.embedding_bag`, which has no second derivatives, as a sum; of bags of one size, (B, L)."""
    if input.ndim != 2:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, False, mode, False, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, None, max_norm, norm_type)  # (B, L, D)
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = ~_is_padding(input, weight, padding_idx)
    if mode == "max":
        highest = rows.masked_fill(~counted[..., None], -torch.inf).amax(1)
        return highest.where(counted.any(1, keepdim=True), 0.0)
    scales = counted.to(rows.dtype)
    if per_sample_weights is not None:
        scales = scales * per_sample_weights
    total = (rows * scales[..., None]).sum(1)
    return total / counted.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else total


def _is_padding(input: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    return input == padding_idx % weight.shape[0]


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else product + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_DEFINITIONS: dict[Any, Callable[..., Tensor]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.bilinear: _bilinear,
    torch._weight_norm: _weight_norm,
}
