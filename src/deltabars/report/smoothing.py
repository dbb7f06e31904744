"""Local-linear kernel regression: a smooth curve through a cloud of points."""

from __future__ import annotations

import torch
from torch import Tensor

from deltabars.errors import BadValueError

_NEEDED = 3  # points within a bandwidth
_SPREAD = 1e-8  # of the points around a grid point, in squared bandwidths
_CHUNK = 8192
_GRID = 101


def smooth(x: Tensor, y: Tensor, grid: Tensor, bandwidth: float) -> Tensor:
    """The local-linear regression of y on x with a Gaussian kernel, in float64.

    At each grid point t the value is a of the line that minimises

        Σₙ wₙ (yₙ − a − b dₙ)²        dₙ = (xₙ − t)/bandwidth,  wₙ = exp(−dₙ²/2)

    which is a = (S₂T₀ − S₁T₁)/(S₀S₂ − S₁²) with Sⱼ = Σ wₙdₙʲ and Tⱼ = Σ wₙdₙʲyₙ. Where fewer than
    three points lie within a bandwidth of t, or they all have the same x, there is no such line
    that the data support, and the value is NaN.

    Costs n·g kernel values and R·n·g multiplications, in chunks of n: memory beyond the arguments
    is some tens of bytes for each of 8,192·g values.

    Args:
        x: (n,).
        y: (n,), or (R, n): R curves over the same x, which share the weights.
        grid: (g,), where the curve is wanted.
        bandwidth: the kernel's standard deviation, in the units of x.

    Returns:
        (g,), or (R, g).
    """
    if x.ndim != 1 or grid.ndim != 1 or y.ndim not in (1, 2) or y.shape[-1] != len(x):
        raise BadValueError(
            f"smooth: expected x (n,), y (n,) or (R, n) and grid (g,), got shapes "
            f"{tuple(x.shape)}, {tuple(y.shape)} and {tuple(grid.shape)}."
        )
    if not bandwidth > 0:
        raise BadValueError(f"bandwidth: expected a number above 0, got {bandwidth}.")
    rows = y if y.ndim == 2 else y[None]
    t = grid.double()
    near, s0, s1, s2 = t.new_zeros(4, len(t))
    t0, t1 = t.new_zeros(2, len(rows), len(t))
    for start in range(0, len(x), _CHUNK):
        part = slice(start, start + _CHUNK)
        d = (x[part].double() - t[:, None]) / bandwidth  # (g, chunk)
        values = rows[:, part].double()
        near += (d.abs() <= 1).sum(1)
        w = torch.exp(-0.5 * d**2)
        s0 += w.sum(1)
        t0 += values @ w.T
        w *= d
        s1 += w.sum(1)
        s2 += (w * d).sum(1)
        t1 += values @ w.T
    determinant = s0 * s2 - s1**2
    known = (near >= _NEEDED) & (determinant > _SPREAD * s0**2)
    curve = torch.where(known, (s2 * t0 - s1 * t1) / determinant, torch.nan)
    return curve if y.ndim == 2 else curve[0]


def smooth_curve(x: Tensor, y: Tensor, bandwidth: float) -> tuple[Tensor, Tensor]:
    """101 even grid points from the lowest to the highest x (n,), and y smoothed there.

    Both are empty where there are no points.
    """
    if len(x) == 0:
        return x, y
    grid = torch.linspace(float(x.min()), float(x.max()), _GRID, dtype=torch.float64)
    return grid, smooth(x, y, grid, bandwidth)
