"""Inner products of long rows, summed in float64.

A float32 dot product of 10⁵ numbers on a CPU is off by 5e-6 of the norms: too much for
orthogonality and for differences such as ‖f‖² − ‖Qᵀf‖². Products over short stretches are exact
enough; their sums are kept in float64, at the speed of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STRETCH = 512
# Small products of many stretches are computed together, up to so many numbers.
_AT_ONCE = {"cpu": 1 << 20}
_AT_ONCE_ELSEWHERE = 1 << 22


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Compute a bᵀ for rows a (…, n, P) and b (m, P) or (…, m, P): (…, n, m), float64."""
    if a.dtype == torch.float64:
        return a @ b.mT
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*shape, a.shape[-2], b.shape[-2], dtype=torch.float64)
    return add_inner(total, a, b)


def add_inner(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the same products to a total in float64, in place."""
    if a.dtype == torch.float64:
        return total.add_(a @ b.mT)
    whole = a.shape[-1] // _STRETCH
    rest = slice(whole * _STRETCH, None)
    if whole * _STRETCH < a.shape[-1]:
        total += a[..., rest] @ b[..., rest].mT
    pieces_a, pieces_b = _stretches(a, whole), _stretches(b, whole)
    most = _AT_ONCE.get(a.device.type, _AT_ONCE_ELSEWHERE)
    together = max(1, most // max(1, total.numel()))
    for start in range(0, whole, together):
        part = slice(start, start + together)
        products = pieces_a[..., part, :, :] @ pieces_b[..., part, :, :].mT
        if together == 1:
            total += products.squeeze(-3)
        else:
            total += products.sum(-3, dtype=torch.float64)
    return total


def _stretches(rows: Tensor, whole: int) -> Tensor:
    """View rows (…, n, P) as (…, whole, n, stretch)."""
    return rows[..., : whole * _STRETCH].unflatten(-1, (whole, _STRETCH)).transpose(-3, -2)
