"""Real numbers with normal noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from deltabars.errors import BadValueError, DataError
from deltabars.likelihoods.base import (
    CLASSES,
    Likelihood,
    Loss,
    check_same_shape,
    divisor_of,
    register,
    unit_rows,
)

ESTIMATE = "estimate"


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Regression: C real numbers, each with normal noise of one standard deviation σ.

    The loss is half the squared error, summed over the C outputs, whatever σ: it is what networks
    are trained with, and what `l2` belongs to. −log p is that over σ², and the cost too, so that σ
    changes no optimum and no eigenvector; it enters where eigenvalues become a covariance.

    Attributes:
        noise: σ; None (or `"estimate"`) to estimate it from the residuals of the training data.
        estimated: whether `noise` is such an estimate, which a fit makes. It depends on λ, and
            is made anew where λ changes; a noise that was given stays.

    Example:
        >>> import deltabars
        >>> deltabars.likelihoods.Gaussian(0.3)
        Gaussian(noise=0.3, estimated=False)
    """

    noise: float | None = 1.0
    estimated: bool = False

    name = "gaussian"
    discrete = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", check_noise(self.noise))
        if not isinstance(self.estimated, bool):
            raise BadValueError(f"estimated: expected True or False, got {self.estimated!r}.")

    def arranged(self, targets: Tensor, num_outputs: int) -> Tensor:
        """Numbers (B,) are those of one output (B, 1): a difference of the two would be (B, B)."""
        return targets[:, None] if num_outputs == targets.ndim == 1 else targets

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        check_same_shape(outputs, targets)
        if not targets.is_floating_point():
            raise DataError(
                f"Targets: expected a floating type for the Gaussian likelihood, got "
                f"{targets.dtype}. Convert real numbers with .float(). {CLASSES} For 0 or 1 use "
                "'bernoulli'."
            )
        if not bool(targets.isfinite().all()):
            raise DataError("Targets: expected finite values, got NaN or infinity.")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets.to(outputs.dtype)).square().sum(-1)

    def moments(self, outputs: Tensor, targets: Tensor) -> Tensor:
        exact = targets.double()
        return torch.stack([exact.sum(0), exact.square().sum(0)])

    def constant_answer(self, moments: Tensor, count: int) -> tuple[float, float]:
        total, squares = moments.cpu()
        return math.nan, 0.5 * float((squares - total.square() / count).sum()) / count

    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        return outputs

    def slope(self, outputs: Tensor) -> Tensor:
        return torch.ones_like(outputs)

    def curvature_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return unit_rows(outputs)

    def pivots(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.ones_like(outputs)

    def label(self, mean: Tensor) -> None:
        return None

    @property
    def target_noise(self) -> float | None:
        return self.noise


def check_noise(noise: Any) -> float | None:
    """σ as a float, or None where it is to be estimated; refused unless finite and above zero."""
    if noise is None or (isinstance(noise, str) and noise == ESTIMATE):
        return None
    if isinstance(noise, bool) or not isinstance(noise, Real) or not 0 < float(noise) < math.inf:
        raise BadValueError(
            "noise: expected a finite number above zero, the standard deviation of the targets "
            f"around the mean, or {ESTIMATE!r} for one from the training data, got {noise!r}."
        )
    return float(noise)


def _read(module: nn.MSELoss) -> Loss:
    return Loss(Gaussian(noise=None), divisor_of(module, "elements"), multiple=2.0)


register(Gaussian(), "mse", {"noise": "noise"}, nn.MSELoss, _read)
