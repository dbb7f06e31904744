"""How outputs z become a loss, a mean and their derivatives.

A likelihood knows, for a batch of outputs z (B, C):

* the loss of each example, −log p(target | z) up to a constant;
* the mean map m(z), which `Prediction.mean` reports, and its product with rows of ∂z/∂ω;
* rows Rᵀ·∂z/∂ω with R Rᵀ = ∂²loss/∂z², of which the GGN is the sum of outer products.
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

    @abstractmethod
    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise DataError unless `targets` fit `outputs` (B, C)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, (B,)."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """m(z), (B, C)."""

    @abstractmethod
    def push_forward(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """(∂m/∂z)·rows: the sensitivity of the mean, (B, C, P), from that of z, (B, C, P)."""

    @abstractmethod
    def curvature_rows(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Rᵀ·rows, (B, C, P), with R Rᵀ = ∂²loss/∂z² (which does not depend on the targets)."""

    @abstractmethod
    def label(self, mean: Tensor) -> Tensor | None:
        """The predicted label, from the mean."""


class Categorical(Likelihood):
    """One of C classes: softmax cross-entropy on logits, integer targets (B,)."""

    name = "categorical"

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

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def push_forward(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return self.mean(outputs).unsqueeze(-1) * self._centred(outputs, rows)

    def curvature_rows(self, outputs: Tensor, rows: Tensor) -> Tensor:
        # R = diag(√p) − p √pᵀ, and R Rᵀ = diag(p) − p pᵀ.
        return self.mean(outputs).sqrt().unsqueeze(-1) * self._centred(outputs, rows)

    def label(self, mean: Tensor) -> Tensor:
        return mean.argmax(-1)

    def _centred(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Each row less the p-weighted mean of all C rows, (B, C, P).

        A vector subtracted from all rows changes nothing in theory. Subtracting the leading
        class's row first keeps the digits where p is nearly 1 and the rest nearly cancels.
        """
        top = outputs.argmax(-1)[:, None, None].expand(-1, 1, rows.shape[-1])
        rows = rows - rows.gather(1, top)
        return rows - (self.mean(outputs).unsqueeze(-1) * rows).sum(-2, keepdim=True)


class Bernoulli(Likelihood):
    """C independent yes/no answers: sigmoid cross-entropy on logits, summed over the C outputs.

    Targets (B, C) are 0 or 1, of any real type.
    """

    name = "bernoulli"

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        _check_same_shape(outputs, targets)
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise DataError(
                "Targets: expected 0 or 1 for the Bernoulli likelihood, got other values."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def push_forward(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return self._slope(outputs).unsqueeze(-1) * rows

    def curvature_rows(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return self._slope(outputs).sqrt().unsqueeze(-1) * rows

    def label(self, mean: Tensor) -> Tensor:
        return (mean > 0.5).long()

    def _slope(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()


class Gaussian(Likelihood):
    """Regression with unit noise: half the squared error, summed over the C outputs."""

    name = "gaussian"

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

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def push_forward(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return rows

    def curvature_rows(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return rows

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


def _check_same_shape(outputs: Tensor, targets: Tensor) -> None:
    if targets.shape != outputs.shape:
        raise DataError(
            f"Targets: expected the shape {tuple(outputs.shape)} of the outputs, "
            f"got {tuple(targets.shape)}. Reshape them, for example with .unsqueeze(1)."
        )
