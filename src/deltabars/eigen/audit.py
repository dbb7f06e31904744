"""Audit of eigenpairs: measured against the matrix itself, and against the promised residual."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deltabars.eigen.pairs import (
    PRODUCT_ROUNDING,
    SKEW,
    EigenPairs,
    default_tolerance,
    residual_scale,
)
from deltabars.errors import ConvergenceWarning, option, warn
from deltabars.runtime.vectors import Space

_FAR = 10  # times: the random signs of a measurement never make that much by themselves
_USUAL, _TIMES = 4, 2  # of rounding in products: units in the last place; what was measured
_ROUNDING = 100  # units in the last place of ‖A‖ that a product with a long sum can be off by


def audit(
    matmat: Callable[[Tensor], Tensor], space: Space, pairs: EigenPairs, seed: int = 0
) -> dict[str, float]:
    """Measure pairs against the matrix itself, at the cost of one product and K²P operations.

    Args:
        matmat: products of the matrix with rows (b, p) of the own columns.
        space: of the rows.
        pairs: with vectors (K, p).
        seed: of the signs.

    For y = Σ ±q with random signs, A y − Σ ±λq is the signed sum of all residual vectors, and
    its mean square is the sum of theirs.

    Returns:
        `orthogonality`, the largest entry of |QQᵀ − I|, and `orthogonality_norm`, its norm;
        `product_rounding`, what rounding in products may add to ‖Aq − λq‖; `residual_rms`, the
        root mean square of that; `largest_residual` as the solver reported it; and the limits of
        orthogonality and `residual_rms`, `orthogonality_limit` and `residual_limit`: some times
        what the solver promised, and the rounding of a product.
    """
    vectors = pairs.vectors
    gram = space.inner(vectors, vectors)
    gram.diagonal().sub_(1.0)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(pairs),), generator=generator) * 2.0 - 1.0
    signs = signs.to(vectors.device, vectors.dtype)
    image = matmat((signs @ vectors)[None])[0]
    rest = image - (signs * pairs.values.to(vectors.dtype)) @ vectors
    usual = default_tolerance(vectors.dtype)
    tolerance = max(usual, float(pairs.statistics.get("tolerance", usual)))
    promised = pairs.residuals.clamp(min=tolerance) * residual_scale(pairs.values)
    norm = max(abs(float(pairs.values[0])), abs(pairs.least))
    rms = float(space.inner(rest[None], rest[None])) ** 0.5 / len(pairs) ** 0.5
    known = float((pairs.residuals * residual_scale(pairs.values)).square().mean().sqrt())
    own = torch.finfo(vectors.dtype).eps
    # Models may have parts of their own in float32, such as norms of Hugging Face's.
    rounding = max(_ROUNDING * own, torch.finfo(torch.float32).eps) * norm
    return {
        "orthogonality": float(gram.abs().max()),
        "orthogonality_limit": _FAR * usual,
        SKEW: _norm(gram.cpu()),
        PRODUCT_ROUNDING: _USUAL * own * norm + _TIMES * max(0.0, rms - known),
        "residual_rms": rms,
        "residual_limit": _FAR * float(promised.square().mean().sqrt()) + rounding,
        "largest_residual": float(pairs.residuals.max()),
    }


def _norm(gram: Tensor) -> float:
    """‖·‖₂ of a symmetric matrix; NaN where a number in it is."""
    finite = bool(gram.isfinite().all())
    return float(torch.linalg.eigvalsh(gram).abs().max()) if finite else float("nan")


def warn_of_audit(name: str, found: dict[str, float]) -> None:
    """Warn where pairs are far from what their solver promised.

    Args:
        name: of the matrix.
        found: as `audit` returns it.
    """
    if not found["orthogonality"] <= found["orthogonality_limit"]:
        warn(
            f"Eigenvectors of the {name}: expected orthonormal ones, to "
            f"{found['orthogonality_limit']:.1g}, got entries of QQᵀ − I of up to "
            f"{found['orthogonality']:.2g}: error bars can be wrong by as much and more. Use "
            f"{option('solver', 'krylov')} or {option('dtype', torch.float64)}.",
            ConvergenceWarning,
        )
    if not found["residual_rms"] <= found["residual_limit"]:
        warn(
            f"Eigenpairs of the {name}: expected ‖Aq − λq‖ up to {found['residual_limit']:.2g}, "
            f"got {found['residual_rms']:.2g} (root mean square): products with the matrix are not "
            "those of one symmetric matrix, and the error bars cannot be trusted. Look in the "
            "model for derivatives of its own (autograd.Function) that are wrong or random, or "
            f"use {option('dtype', torch.float64)}.",
            ConvergenceWarning,
        )
