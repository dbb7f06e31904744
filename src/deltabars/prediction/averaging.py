"""Which outputs of each input are asked for, where there are too many for all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.likelihoods.base import Likelihood


@dataclass(frozen=True)
class Classes:
    """k of the C outputs: the same ones for all inputs, or those with each input's highest mean.

    Attributes:
        count: k.
        listed: the numbers of the outputs; None for the k highest.
    """

    count: int
    listed: tuple[int, ...] | None

    def __call__(self, outputs: Tensor) -> Tensor:
        """The numbers (B, k) of the outputs asked for, given all of them (B, C)."""
        if self.listed is not None:
            listed = torch.tensor(self.listed, device=outputs.device)
            return listed.expand(outputs.shape[0], -1)
        # The mean rises with the output, which has more digits; of equal ones the first goes first.
        return outputs.sort(dim=-1, descending=True, stable=True).indices[:, : self.count]


def choose_classes(asked: Any, num_outputs: int, likelihood: Likelihood) -> Classes | None:
    """The outputs that `"topN"` or a list of their numbers stands for; None for all of them."""
    if asked is None:
        return None
    if isinstance(asked, str):
        return _highest(asked, num_outputs, likelihood)
    numbers = asked.tolist() if hasattr(asked, "tolist") else asked
    if not isinstance(numbers, Iterable) or isinstance(numbers, dict | set | bytes):
        raise BadValueError(
            f"classes: expected None, 'top5' or the like, or a list of class numbers, got "
            f"{asked!r}. One class goes in a list too, such as [3]."
        )
    return _listed(list(numbers), num_outputs)


def _highest(asked: str, num_outputs: int, likelihood: Likelihood) -> Classes:
    found = re.fullmatch(r"top([1-9][0-9]*)", asked)
    if found is None:
        raise BadValueError(
            f"classes: expected 'top' and a whole number from 1 on, such as 'top5', got {asked!r}. "
            "A list of class numbers names them one by one."
        )
    if not likelihood.discrete:
        raise BadValueError(
            f"classes: expected a list of numbers of outputs, such as [0, 1], for the "
            f"{likelihood.name} likelihood, got {asked!r}: its outputs are no probabilities."
        )
    count = int(found[1])
    if count > num_outputs:
        raise BadValueError(
            f"classes: expected at most 'top{num_outputs}', for the network has {num_outputs} "
            f"outputs, got {asked!r}. classes=None gives all of them."
        )
    return Classes(count, None)


def _listed(numbers: list[Any], num_outputs: int) -> Classes:
    if not numbers:
        raise BadValueError(
            "classes: expected at least one class number, got none. classes=None gives all classes."
        )
    for number in numbers:
        if not is_whole(number):
            raise BadValueError(
                f"classes: expected whole numbers, got {number!r}. Classes are named by their "
                f"numbers, from 0 to {num_outputs - 1}."
            )
        if not 0 <= number < num_outputs:
            raise BadValueError(
                f"classes: expected numbers from 0 to {num_outputs - 1}, for the network has "
                f"{num_outputs} outputs, got {number}. Classes count from 0; the last one is "
                f"{num_outputs - 1}."
            )
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise BadValueError(
            f"classes: expected each class once, got {twice} more than once: the score would count "
            "it so often. Name it once."
        )
    return Classes(len(numbers), tuple(int(number) for number in numbers))


METHODS = ("auto", "sampling", "probit")
SAMPLES = 512

_MOST_CLASSES = (
    100  # that are averaged unasked: V takes C² numbers an input, its root C³ operations
)
_AT_ONCE = {"cpu": 1 << 17}  # numbers drawn, which stay in the cache
_AT_ONCE_ELSEWHERE = 1 << 26


@dataclass(frozen=True)
class Moderated:
    """Averages over the parameters for B inputs.

    Attributes:
        mean: p̄, (B, C).
        entropy: H(p̄), (B,), in nats.
        mutual_information: between label and parameters, (B,), in nats; None where it is not known.
    """

    mean: Tensor
    entropy: Tensor
    mutual_information: Tensor | None


@dataclass(frozen=True, eq=False)
class Moderation:
    """How predictions are averaged.

    Attributes:
        likelihood: what the outputs mean.
        noise: points (S, C) that stand for N(0, I), the same ones for every input, so that no
            result depends on what else is predicted; None for the probit formula.
    """

    likelihood: Likelihood
    noise: Tensor | None

    def __call__(self, outputs: Tensor, covariance: Tensor) -> Moderated:
        """The averages, given outputs z (B, C) and the covariance (B, C, C) of z or of η(z)."""
        outputs = outputs.double()
        # A = ∂η/∂z takes the covariance of z to that of η. That of η it leaves as it is, but for
        # rounding: log probabilities do not scatter along p, and A p = 0 to the last digits.
        jacobian = self.likelihood.natural_jacobian(outputs)
        covariance = jacobian @ covariance @ jacobian.mT
        natural = self.likelihood.natural(outputs)
        if self.noise is None:
            return self._by_probit(natural, covariance)
        return self._by_sampling(natural, covariance, self.noise.to(outputs.device))

    def _by_probit(self, natural: Tensor, covariance: Tensor) -> Moderated:
        """m(η/√(1 + πv/8)), v the variance of each η (MacKay, 1992, for two classes).

        Logits are known up to a constant that would matter here: log probabilities have none.
        """
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        mean = self.likelihood.mean(natural / (1 + math.pi / 8 * variance).sqrt())
        return Moderated(mean, self.likelihood.entropy(mean), None)

    def _by_sampling(self, natural: Tensor, covariance: Tensor, noise: Tensor) -> Moderated:
        most = _AT_ONCE.get(natural.device.type, _AT_ONCE_ELSEWHERE)
        size = max(1, most // noise.numel())
        means, entropies = [], []
        for center, root in zip(
            natural.split(size), _symmetric_root(covariance).split(size), strict=True
        ):
            # The many samples last: along few classes a processor does one number at a time.
            drawn = self.likelihood.mean(center.unsqueeze(2) + root @ noise.T, dim=1)  # (b, C, S)
            means.append(drawn.mean(2))
            entropies.append(self.likelihood.entropy(drawn, dim=1).mean(1))
        mean = torch.cat(means)
        entropy = self.likelihood.entropy(mean)
        # Entropy is concave: what is below zero is rounding.
        return Moderated(mean, entropy, (entropy - torch.cat(entropies)).clamp(min=0))


def choose_moderation(
    method: Any, samples: Any, seed: Any, num_outputs: int, likelihood: Likelihood, subset: bool
) -> Moderation | None:
    """How to average as `DeltaFit.predict` was asked to; None for not at all.

    Args:
        subset: whether only some of the classes are computed.
    """
    if method is not None and method not in METHODS:
        raise BadValueError(f"moderation: expected one of {METHODS} or None, got {method!r}.")
    if not is_whole(samples) or not 1 <= samples <= 2**SobolEngine.MAXBIT:
        raise BadValueError(
            f"samples: expected a whole number from 1 to 2^{SobolEngine.MAXBIT}, got {samples!r}. "
            "Powers of two cover the space most evenly."
        )
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise BadValueError(f"seed: expected a whole number from 0 on, got {seed!r}.")
    if method == "auto":
        if subset or not likelihood.discrete or num_outputs > _MOST_CLASSES:
            return None
        method = "sampling"
    if method is None:
        return None
    if not likelihood.discrete:
        raise BadValueError(
            f"moderation: expected 'auto' or None for the {likelihood.name} likelihood, got "
            f"{method!r}: its mean is the output itself, which averaging leaves as it is."
        )
    if subset:
        raise BadValueError(
            f"moderation: expected 'auto' or None together with classes=, got {method!r}: an "
            "average over the parameters needs all classes. Ask for it with classes=None."
        )
    if method == "probit":
        return Moderation(likelihood, None)
    if num_outputs > SobolEngine.MAXDIM:
        raise BadValueError(
            f"moderation: expected at most {SobolEngine.MAXDIM:,} outputs for 'sampling', got "
            f"{num_outputs:,}. Use moderation='probit' or None."
        )
    return Moderation(likelihood, normal_points(int(samples), num_outputs, int(seed)))


def normal_points(count: int, size: int, seed: int) -> Tensor:
    """Points (count, size) spread evenly over N(0, I): a scrambled Sobol sequence, float64.

    Measured on 10 classes, 512 of them err less than 2,048 independent draws, in probabilities and
    in the mutual information; antithetic pairs of draws help the former and harm the latter.
    """
    engine = SobolEngine(size, scramble=True, seed=seed)
    cells = engine.draw(count, dtype=torch.float64)
    return torch.special.ndtri(cells + 0.5**SobolEngine.MAXBIT / 2)  # their middles: never 0 or 1


def _symmetric_root(matrices: Tensor) -> Tensor:
    """The R = Rᵀ ≥ 0 with R R = V for each V ≥ 0 of (B, C, C), which may be singular.

    It is the one root that varies with V alone: no signs or order of eigenvectors enter. A V that
    is not finite has a root that is not.
    """
    broken = ~matrices.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eigh(matrices.masked_fill(broken[:, None, None], 0.0))
    values = values.clamp(min=0).masked_fill(
        broken[:, None], math.nan
    )  # negative ones are rounding
    return (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
