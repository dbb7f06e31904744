"""Full precision, whatever the caller has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from deltabars.errors import BadValueError, ModelError
from deltabars.turns import Shared

_CUDNN: Any = torch.backends.cudnn  # its switches are set up at run time


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, no TF32, no inference mode, no recording of gradients; all put back after.

    Attention takes its plain form: the fused ones have no forward or per-example derivatives.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),  # torch.func turns gradients on where it needs them
        torch.autocast(device.type, enabled=False),
        _ieee() if device.type == "cuda" else nullcontext(),
        _plain(),
    ):
        yield


@contextmanager
def _plain_attention() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_plain = Shared(_plain_attention)


@contextmanager
def float32_products(device: torch.device, how: str) -> Iterator[None]:
    """Float32 products and convolutions on a GPU as they are (`"ieee"`) or in `"tf32"`."""
    if device.type != "cuda":
        yield
        return
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, _CUDNN.conv)
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = how
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


# The error of TF32 is of the order of λ itself.
_ieee = Shared(lambda: float32_products(torch.device("cuda"), "ieee"))


def working_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The type to compute in: the one that is asked for, or the model's own, or float32."""
    supported = (torch.float32, torch.float64)
    if asked is not None and asked not in supported:
        raise BadValueError(
            f"dtype: expected torch.float32 or torch.float64, got {asked!r}: "
            "curvature needs the digits."
        )
    if asked is None and not own.is_floating_point:
        raise ModelError(f"Expected real floating-point parameters, got {own}.")
    return asked or (own if own in supported else torch.float32)
