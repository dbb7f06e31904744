"""Predictions averaged over the parameters: their probabilities, entropy and mutual information."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.likelihoods.base import Likelihood

METHODS = ("auto", "sampling", "probit")
SAMPLES = 512

_MOST_CLASSES = 100  # averaged by default: the root of V takes C³ operations an input
_AT_ONCE, _AT_ONCE_ON_GPU = 1 << 17, 1 << 26  # numbers drawn; the CPU's stay in its cache


class Moderated(NamedTuple):
    """Averages over the parameters for B inputs; entropies in nats."""

    mean: Tensor  # p̄ (B, C)
    entropy: Tensor  # H(p̄) (B,)
    mutual_information: Tensor | None  # between label and parameters (B,)


@dataclass(frozen=True, eq=False)
class Moderation:
    """Average by points (S, C) of N(0, I), the same for every input, or by the probit formula."""

    likelihood: Likelihood
    noise: Tensor | None
    temperature: float = 1.0  # that outputs, and their scatter, are divided by first

    def means(self, outputs: Tensor, covariance: Tensor, temperatures: Tensor) -> Tensor:
        """Average at several temperatures (T,): p̄ (T, B, C). Points are drawn once for all."""
        assert self.noise is not None
        jacobian = self.likelihood.natural_jacobian(outputs.double())
        roots = _symmetric_root(jacobian @ covariance.double() @ jacobian.mT)
        natural, noise = self.likelihood.natural(outputs.double()), self.noise.to(outputs.device)
        size = max(1, _AT_ONCE_ON_GPU // 64 // noise.numel())
        found = []
        for center, root in zip(natural.split(size), roots.split(size), strict=True):
            drawn = center.unsqueeze(2) + root @ noise.T  # (b, C, S)
            each = [self.likelihood.mean(drawn / t, dim=1).mean(2) for t in temperatures.tolist()]
            found.append(torch.stack(each))
        return torch.cat(found, dim=1)

    def __call__(self, outputs: Tensor, covariance: Tensor) -> Moderated:
        """Average, given outputs z (B, C) and the covariance (B, C, C) of z or of η(z)."""
        outputs = outputs.double() / self.temperature
        covariance = covariance / self.temperature**2
        # A = ∂η/∂z takes the covariance of z to that of η. That of η it leaves as it is, but for
        # rounding: log probabilities do not scatter along p, and A p = 0 to the last digits.
        jacobian = self.likelihood.natural_jacobian(outputs)
        covariance = jacobian @ covariance @ jacobian.mT
        natural = self.likelihood.natural(outputs)
        if self.noise is None:  # η/√(1 + πv/8), v the variance of each η (MacKay, 1992)
            variance = covariance.diagonal(dim1=-2, dim2=-1)
            mean = self.likelihood.mean(natural / (1 + math.pi / 8 * variance).sqrt())
            return Moderated(mean, self.likelihood.entropy(mean), None)
        noise, roots = self.noise.to(outputs.device), _symmetric_root(covariance)
        most = _AT_ONCE if outputs.device.type == "cpu" else _AT_ONCE_ON_GPU
        size = max(1, most // noise.numel())
        means, entropies = [], []
        for center, root in zip(natural.split(size), roots.split(size), strict=True):
            # The many samples last: along few classes a processor does one number at a time.
            drawn = self.likelihood.mean(center.unsqueeze(2) + root @ noise.T, dim=1)  # (b, C, S)
            means.append(drawn.mean(2))
            entropies.append(self.likelihood.entropy(drawn, dim=1).mean(1))
        mean = torch.cat(means)
        entropy = self.likelihood.entropy(mean)
        # Entropy is concave: what is below zero is rounding.
        return Moderated(mean, entropy, (entropy - torch.cat(entropies)).clamp(min=0))


def choose_moderation(
    method: Any,
    samples: Any,
    seed: Any,
    num_outputs: int,
    likelihood: Likelihood,
    subset: bool,
    temperature: float = 1.0,
) -> Moderation | None:
    """Choose how to average, by the arguments of `DeltaFit.predict`; None for not at all."""
    if method is not None and method not in METHODS:
        raise BadValueError(f"moderation: expected one of {METHODS} or None, got {method!r}.")
    most = SobolEngine.MAXBIT
    if not is_whole(samples) or not 1 <= samples <= 2**most:
        raise BadValueError(
            f"samples: expected a whole number from 1 to 2^{most}, got {samples!r}."
        )
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise BadValueError(f"seed: expected a whole number from 0 on, got {seed!r}.")
    possible = likelihood.discrete and not subset
    if method == "auto":
        can = not subset and can_be_averaged(num_outputs, likelihood)
        method = "sampling" if can else None
    if method is None:
        return None
    if not possible:
        raise BadValueError(
            f"moderation: expected 'auto' or None, got {method!r}: an average over the parameters "
            "needs probabilities of all classes (no classes=, no Gaussian likelihood)."
        )
    if method == "probit":
        return Moderation(likelihood, None, temperature)
    if num_outputs > SobolEngine.MAXDIM:
        raise BadValueError(
            f"moderation: expected at most {SobolEngine.MAXDIM:,} outputs for 'sampling', got "
            f"{num_outputs:,}. Use moderation='probit' or None."
        )
    points = normal_points(int(samples), num_outputs, int(seed))
    return Moderation(likelihood, points, temperature)


def can_be_averaged(num_outputs: int, likelihood: Likelihood) -> bool:
    """Return whether predictions are averaged by default."""
    return likelihood.discrete and num_outputs <= _MOST_CLASSES


def normal_points(count: int, size: int, seed: int) -> Tensor:
    """Return points (count, size) spread evenly over N(0, I): a scrambled Sobol sequence."""
    cells = SobolEngine(size, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return torch.special.ndtri(cells + 0.5**SobolEngine.MAXBIT / 2)  # their middles: never 0 or 1


def _symmetric_root(matrices: Tensor) -> Tensor:
    """Return the R = Rᵀ ≥ 0 with R R = V for each V ≥ 0 of (B, C, C), singular or not finite."""
    # The one root that varies with V alone: no signs or order of eigenvectors enter.
    finite = matrices.isfinite().all(-1).all(-1)[:, None]
    values, vectors = torch.linalg.eigh(matrices.where(finite[..., None], 0.0))
    values = values.clamp(min=0).where(finite, math.nan)  # negative ones are rounding
    return (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
