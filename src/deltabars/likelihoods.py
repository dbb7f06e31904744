"""How outputs z become a loss, a mean and their derivatives.

A likelihood knows, for a batch of outputs z (B, C):

* the loss of each example, −log p(target | z) up to a constant;
* the gradient of that loss by z;
* the mean map m(z), which `Prediction.mean` reports, and its Jacobian ∂m/∂z;
* the natural parameters η(z), of which the mean is a function as it is of z, m(η) = m(z), and the
  slope that makes the one Jacobian of the other: ∂m/∂z = diag(slope)·∂η/∂z;
* Rᵀ with R Rᵀ = ∂²loss/∂z²: the GGN is the sum of the outer products of the rows Rᵀ·∂z/∂ω.

All three derivatives are rows of cotangents of z, to be pulled back to the parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from deltabars.errors import BadValueError, DataError


class Likelihood(ABC):
    """What the network's outputs mean. Subclasses are final."""

    name: str
    discrete: bool  # whether targets are labels: a prediction of labels has an entropy

    @abstractmethod
    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise DataError unless `targets` fit `outputs` (B, C)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, (B,)."""

    def loss_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """∂loss/∂z of each example, (B, C)."""
        at = outputs.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.loss(at, targets).sum(), at)
        return gradient

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

    @abstractmethod
    def curvature_root(self, outputs: Tensor) -> Tensor:
        """Rᵀ, (B, C, C), with R Rᵀ = ∂²loss/∂z² (which does not depend on the targets)."""

    @abstractmethod
    def label(self, mean: Tensor) -> Tensor | None:
        """The predicted label, from the mean."""


class Categorical(Likelihood):
    """One of C classes: softmax cross-entropy on logits, integer targets (B,)."""

    name = "categorical"
    discrete = True

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        classes = outputs.shape[1]
        if classes < 2:
            raise DataError(
                "Outputs: expected at least two logits for the categorical likelihood, got one. "
                "For yes/no targets use likelihood='bernoulli' and targets of shape (N, 1)."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(
                f"Targets: expected class numbers of an integer type, got {targets.dtype}. "
                "Convert class numbers with .long(); for other targets choose likelihood="
                "'bernoulli' (0 or 1) or 'gaussian' (real numbers)."
            )
        if targets.shape != outputs.shape[:1]:
            raise DataError(
                f"Targets: expected shape ({outputs.shape[0]},) to match logits of shape "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}. "
                + (
                    "Turn one-hot rows into class numbers with .argmax(1)."
                    if targets.shape == outputs.shape
                    else "Reshape them, for example with .squeeze(1)."
                )
            )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise DataError(
                f"Targets: expected class numbers from 0 to {classes - 1} (the model has "
                f"{classes} outputs), got {low if low < 0 else high}. Classes count from 0."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.long(), reduction="none")

    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        return outputs.softmax(dim)

    def natural(self, outputs: Tensor) -> Tensor:
        # log p: logits that differ by a constant say the same.
        return outputs.log_softmax(-1)

    def natural_jacobian(self, outputs: Tensor, classes: Tensor | None = None) -> Tensor:
        # The rows e_c − p. 1 − p_c is the sum of the other probabilities: where p is nearly 1, that
        # has digits.
        p = self.mean(outputs).unsqueeze(-2)  # (B, 1, C)
        own = _own(outputs, classes)
        others = torch.where(own, 0.0, p).sum(-1, keepdim=True)  # (B, k, 1)
        return torch.where(own, others, -p)

    def slope(self, outputs: Tensor) -> Tensor:
        return self.mean(outputs)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        # R = diag(√p) − p √pᵀ, and R Rᵀ = diag(p) − p pᵀ.
        return self.mean(outputs).sqrt().unsqueeze(-1) * self.natural_jacobian(outputs)

    def entropy(self, mean: Tensor, dim: int = -1) -> Tensor:
        return torch.special.entr(mean).sum(dim)

    def label(self, mean: Tensor) -> Tensor:
        return mean.argmax(-1)


class Bernoulli(Likelihood):
    """C independent yes/no answers: sigmoid cross-entropy on logits, summed over the C outputs.

    Targets (B, C) are 0 or 1, of any real type.
    """

    name = "bernoulli"
    discrete = True

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        _check_same_shape(outputs, targets)
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise DataError(
                "Targets: expected 0 or 1 for the Bernoulli likelihood, got other values."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(-1)

    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        return outputs.sigmoid()

    def slope(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()

    def curvature_root(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed(self.slope(outputs).sqrt())

    def entropy(self, mean: Tensor, dim: int = -1) -> Tensor:
        # Of each answer by itself, summed: what they tell of one another is left out.
        return (torch.special.entr(mean) + torch.special.entr(1 - mean)).sum(dim)

    def label(self, mean: Tensor) -> Tensor:
        return (mean > 0.5).long()


class Gaussian(Likelihood):
    """Regression with unit noise: half the squared error, summed over the C outputs."""

    name = "gaussian"
    discrete = False

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        _check_same_shape(outputs, targets)
        if not targets.is_floating_point():
            raise DataError(
                f"Targets: expected a floating type for the Gaussian likelihood, "
                f"got {targets.dtype}."
            )
        if not bool(targets.isfinite().all()):
            raise DataError("Targets: expected finite values, got NaN or infinity.")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets.to(outputs.dtype)).square().sum(-1)

    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        return outputs

    def slope(self, outputs: Tensor) -> Tensor:
        return torch.ones_like(outputs)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        return unit_rows(outputs)

    def label(self, mean: Tensor) -> None:
        return None


LIKELIHOODS: dict[str, Likelihood] = {
    likelihood.name: likelihood for likelihood in (Categorical(), Bernoulli(), Gaussian())
}


def get_likelihood(name: str | Likelihood) -> Likelihood:
    """The likelihood of that name; a Likelihood is returned as it is."""
    if isinstance(name, Likelihood):
        return name
    if not isinstance(name, str) or name not in LIKELIHOODS:
        raise BadValueError(f"likelihood: expected one of {sorted(LIKELIHOODS)}, got {name!r}.")
    return LIKELIHOODS[name]


def unit_rows(outputs: Tensor, classes: Tensor | None = None) -> Tensor:
    """The rows e_c (B, k, C) of the identity for the classes (B, k), or for all."""
    return _own(outputs, classes).to(outputs.dtype).expand(outputs.shape[0], -1, -1)


def _own(outputs: Tensor, classes: Tensor | None) -> Tensor:
    """Whether a column is a row's own class: (B, k, C) for the classes (B, k), (C, C) for all."""
    every = torch.arange(outputs.shape[-1], device=outputs.device)
    return (every if classes is None else classes).unsqueeze(-1) == every


def _check_same_shape(outputs: Tensor, targets: Tensor) -> None:
    if targets.shape != outputs.shape:
        raise DataError(
            f"Targets: expected the shape {tuple(outputs.shape)} of the outputs, "
            f"got {tuple(targets.shape)}. Reshape them, for example with .unsqueeze(1)."
        )
