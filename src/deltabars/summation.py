"""Inner products of long rows, summed in float64.

A float32 dot product of 10⁵ numbers on a CPU is off by some 5e-6 of the norms, which is more than
orthogonality and the differences ‖f‖² − ‖Qᵀf‖² can bear. Products over short stretches are not;
their sums are kept in float64, at the speed of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STRETCH = 1024


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The products a bᵀ of rows a (…, n, P) and b (m, P) or (…, m, P): (…, n, m), float64."""
    if a.dtype == torch.float64:
        return a @ b.mT
    total = (a[..., :_STRETCH] @ b[..., :_STRETCH].mT).double()
    for start in range(_STRETCH, a.shape[-1], _STRETCH):
        stretch = slice(start, start + _STRETCH)
        total += a[..., stretch] @ b[..., stretch].mT
    return total
