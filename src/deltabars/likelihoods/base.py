"""How outputs z become a loss, a mean and their derivatives.

A likelihood knows, for a batch of outputs z (B, C):

* the loss of each example, −log p(target | z) up to a constant, times how much the example counts;
* the gradient of that loss by z;
* the mean map m(z), which `Prediction.mean` reports, and its Jacobian ∂m/∂z;
* the natural parameters η(z), of which the mean is a function as it is of z, m(η) = m(z), and the
  slope that makes the one Jacobian of the other: ∂m/∂z = diag(slope)·∂η/∂z;
* Rᵀ with R Rᵀ = ∂²loss/∂z²: the GGN is the sum of the outer products of the rows Rᵀ·∂z/∂ω.

All three derivatives are rows of cotangents of z, to be pulled back to the parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, DataError


class Likelihood(ABC):
    """What the network's outputs mean."""

    name: str
    discrete: bool  # whether targets are labels: a prediction of labels has an entropy

    def arranged(self, targets: Tensor, num_outputs: int) -> Tensor:
        """Targets in the shape of C outputs, where they may have another."""
        return targets

    def counted(self, targets: Tensor) -> Tensor | None:
        """Which examples have a target, (B,) bool; None where all do. The others are left out."""
        return None

    @abstractmethod
    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise DataError unless `targets` fit `outputs` (B, C)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, (B,)."""

    def loss_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """∂loss/∂z of each example, (B, C), by float64: p − y has few digits where p is near y."""
        at = outputs.detach().double().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.loss(at, targets).sum(), at)
        return gradient.to(outputs.dtype)

    @abstractmethod
    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        """m(z), (B, C), for outputs along a dimension."""

    def mean_jacobian(self, outputs: Tensor) -> Tensor:
        """∂m/∂z, (B, C, C), a row for each component of the mean."""
        return self.slope(outputs).unsqueeze(-1) * self.natural_jacobian(outputs)

    def natural(self, outputs: Tensor) -> Tensor:
        """η(z), (B, C): the outputs themselves, unless they say one thing in several ways."""
        return outputs

    def natural_jacobian(self, outputs: Tensor, classes: Tensor | None = None) -> Tensor:
        """The rows of ∂η/∂z for the classes (B, k), or for all: (B, k, C)."""
        return unit_rows(outputs, classes)

    @abstractmethod
    def slope(self, outputs: Tensor) -> Tensor:
        """What each row of ∂η/∂z is multiplied by to make a row of ∂m/∂z, (B, C)."""

    def entropy(self, mean: Tensor, dim: int = -1) -> Tensor:
        """The entropy (…,) in nats of the labels that a mean (…, C) predicts."""
        raise NotImplementedError(f"the {self.name} likelihood has no labels")

    def are_probabilities(self, outputs: Tensor, targets: Tensor) -> bool:
        """Whether outputs (B, C) are means already, such as those of a softmax, and no logits."""
        return False

    def moments(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What `constant_answer` needs to know of the targets, summed over them, (k, C)."""
        return outputs.new_zeros(0, outputs.shape[1], dtype=torch.float64)

    def constant_answer(self, moments: Tensor, count: int) -> tuple[float, float]:
        """The accuracy, and the least mean loss, of outputs that are the same for all inputs.

        Args:
            moments: of all `count` targets.

        Returns:
            NaN for an accuracy where targets are no labels, and for what is not known.
        """
        return math.nan, math.nan

    @abstractmethod
    def curvature_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Rᵀ, (B, C, C), with R Rᵀ = ∂²loss/∂z² (the targets decide how much an example counts)."""

    @abstractmethod
    def label(self, mean: Tensor) -> Tensor | None:
        """The predicted label, from the mean."""

    def weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How much each example counts, (B,): 1, unless classes are weighted."""
        return outputs.new_ones(len(outputs))

    def divided(self, mean_weight: float) -> Likelihood:
        """The same with every weight divided by `mean_weight`; called where examples have weights.

        Weights say what counts more than what, not how many examples there are: with a mean of one,
        N examples count as N.
        """
        raise NotImplementedError(f"{type(self).__name__} has weights and does not scale them.")

    @property
    def target_noise(self) -> float | None:
        """The standard deviation of real targets around the mean; None for others."""
        return None


def unit_rows(outputs: Tensor, classes: Tensor | None = None) -> Tensor:
    """The rows e_c (B, k, C) of the identity for the classes (B, k), or for all."""
    return own_class(outputs, classes).to(outputs.dtype).expand(outputs.shape[0], -1, -1)


def own_class(outputs: Tensor, classes: Tensor | None) -> Tensor:
    """Whether a column is a row's own class: (B, k, C) for the classes (B, k), (C, C) for all."""
    every = torch.arange(outputs.shape[-1], device=outputs.device)
    return (every if classes is None else classes).unsqueeze(-1) == every


def numbers(name: str, given: Any) -> tuple[float, ...]:
    """Weights as plain numbers, refused unless they are finite, not negative, and not all zero."""
    if isinstance(given, Tensor):
        given = given.detach().cpu().double().flatten().tolist()
    found = (given,) if isinstance(given, Real) else given
    plain = tuple(found) if isinstance(found, Iterable) and not isinstance(found, str) else ()
    good = all(isinstance(x, Real) and 0 <= float(x) < math.inf for x in plain)
    if not good or not any(plain):
        raise BadValueError(
            f"{name}: expected finite numbers from 0 on, one of them above it, got {given!r}."
        )
    return tuple(float(x) for x in plain)


def check_same_shape(outputs: Tensor, targets: Tensor, alternative: str) -> None:
    """Refuse targets of another shape than the outputs."""
    if targets.shape == outputs.shape:
        return
    count, columns = outputs.shape
    if targets.shape == (count,) and columns == 1:
        advice = "Reshape them with .unsqueeze(1)."
    elif targets.ndim == 1:
        advice = alternative
    else:
        advice = "Give one target for each output."
    raise DataError(
        f"Targets: expected the shape {tuple(outputs.shape)} of the outputs, got "
        f"{tuple(targets.shape)}. {advice}"
    )
