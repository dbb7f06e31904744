"""One of C classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltabars.errors import BadValueError, DataError, is_option, option
from deltabars.likelihoods.base import Likelihood, Loss, divisor_of, numbers, own_class, register


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes: softmax cross-entropy on logits, integer targets (B,).

    With class weights w and label smoothing ε the loss of an example of class y is that of torch,

        Σ_c q_c·(−log p_c),    q_c = (1 − ε)·w_y·[c = y] + (ε/C)·w_c

    and ∂²loss/∂z² = (Σ_c q_c)·(diag(p) − p pᵀ): smoothing moves the gradient alone.

    Attributes:
        weight: w, one number a class; None for all alike. What counts is their proportions: they
            are scaled so that those of the training examples, w_y, have a mean of one.
        label_smoothing: ε, from 0 to 1.
        ignore_index: the target of examples that training leaves out, and everything here as well.
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100

    name = "categorical"
    discrete = True

    def __post_init__(self) -> None:
        if self.weight is not None:
            object.__setattr__(self, "weight", numbers("weight", self.weight))
        found = self.label_smoothing
        if not isinstance(found, Real) or not 0 <= found <= 1:
            raise BadValueError(f"label_smoothing: expected a number from 0 to 1, got {found!r}.")

    def counted(self, targets: Tensor) -> Tensor | None:
        # Of class probabilities and of targets of another shape torch and we leave out none.
        is_integer = not targets.is_floating_point() and targets.dtype != torch.bool
        marked = targets == self.ignore_index if is_integer and targets.ndim == 1 else None
        return None if marked is None or not bool(marked.any()) else ~marked

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        classes = outputs.shape[1]
        if classes < 2:
            raise DataError(
                "Outputs: expected at least two logits for the categorical likelihood, got one. Is "
                f"it a regression? Then use {_meant('gaussian', 'mse')}. A yes/no question? Then "
                f"use {_meant('bernoulli', 'bce')} and targets of shape (N, 1) or (N,)."
            )
        if self.weight is not None and len(self.weight) != classes:
            what = option("class_weights") if is_option("class_weights") else "weight"
            raise BadValueError(
                f"{what}: expected one number for each of {classes} classes, got "
                f"{len(self.weight)}."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            advice = "Convert class numbers with .long()"
            if targets.shape == outputs.shape and targets.is_floating_point():
                advice = "Class probabilities are not taken: give class numbers, with .argmax(1)"
            raise DataError(
                f"Targets: expected class numbers of an integer type, got {targets.dtype}. "
                f"{advice}; for other targets choose {_meant('bernoulli', 'bce')} (0 or 1) or "
                "'gaussian' (real numbers)."
            )
        if targets.shape != outputs.shape[:1]:
            advice = "Reshape them, for example with .squeeze(1)."
            if targets.shape == outputs.shape:
                several = f"for several labels an example use {_meant('bernoulli', 'bce')}"
                advice = f"Turn one-hot rows into class numbers with .argmax(1); {several}."
            raise DataError(
                f"Targets: expected shape ({outputs.shape[0]},) to match logits of shape "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}. {advice}"
            )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise DataError(
                f"Targets: expected class numbers from 0 to {classes - 1} (the model has "
                f"{classes} outputs), got {low if low < 0 else high}. Classes count from 0."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = None if self.weight is None else outputs.new_tensor(self.weight)
        options: Any = {"label_smoothing": self.label_smoothing, "reduction": "none"}
        return F.cross_entropy(outputs, targets.long(), weight, **options)

    def are_probabilities(self, outputs: Tensor, targets: Tensor) -> bool:
        # To the rounding of bfloat16. (Log-probabilities are logits.)
        return bool((outputs >= 0).all() and ((outputs.sum(1) - 1).abs() < 5e-3).all())

    def moments(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.bincount(targets.long(), minlength=outputs.shape[1]).double()[None]

    def constant_answer(self, moments: Tensor, count: int) -> tuple[float, float]:
        counts = moments[0].cpu()
        classes = torch.arange(len(counts))
        weights = torch.ones_like(counts) if self.weight is None else counts.new_tensor(self.weight)
        smoothing = self.label_smoothing / len(counts)
        best = weights * ((1 - self.label_smoothing) * counts + smoothing * counts @ weights)
        logits = best.clamp(min=1e-300).log().expand(len(counts), -1)
        loss = counts @ self.loss(logits, classes) / count
        return float(counts.max()) / count, float(loss)

    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        return outputs.softmax(dim)

    def natural(self, outputs: Tensor) -> Tensor:
        # log p: logits that differ by a constant say the same.
        return outputs.log_softmax(-1)

    def natural_jacobian(self, outputs: Tensor, classes: Tensor | None = None) -> Tensor:
        # The rows e_c − p. 1 − p_c is the sum of the other probabilities: where p is nearly 1, that
        # has digits.
        p = self.mean(outputs).unsqueeze(-2)  # (B, 1, C)
        own = own_class(outputs, classes)
        others = torch.where(own, 0.0, p).sum(-1, keepdim=True)  # (B, k, 1)
        return torch.where(own, others, -p)

    def slope(self, outputs: Tensor) -> Tensor:
        return self.mean(outputs)

    def entropy(self, mean: Tensor, dim: int = -1) -> Tensor:
        return torch.special.entr(mean).sum(dim)

    def curvature_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # R = diag(√p) − p √pᵀ, and R Rᵀ = diag(p) − p pᵀ.
        root = self.mean(outputs).sqrt().unsqueeze(-1) * self.natural_jacobian(outputs)
        return root if self.weight is None else self._total(outputs, targets).sqrt()[:, None] * root

    def pivots(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # The elements of x sum up to zero, and diag(1/p) inverts diag(p) − p pᵀ on such.
        return self._total(outputs, targets) * self.mean(outputs)

    def _total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the weights of an example's smoothed labels, (B, 1)."""
        weights = self.weight or (1.0,)
        smoothed = self.label_smoothing * sum(weights) / len(weights)
        return ((1 - self.label_smoothing) * self.weights(outputs, targets) + smoothed)[:, None]

    def label(self, mean: Tensor) -> Tensor:
        return mean.argmax(-1)

    def weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.weight is None:
            return super().weights(outputs, targets)
        return outputs.new_tensor(self.weight)[targets.long()]

    def divided(self, mean_weight: float) -> Categorical:
        assert self.weight is not None
        return replace(self, weight=tuple(w / mean_weight for w in self.weight))


def _meant(likelihood: str, loss: str) -> str:
    """Name another likelihood as the reader does: the command line has losses."""
    named = option("loss", loss)
    return named if named.startswith("--") else option("likelihood", likelihood)


def _read(module: nn.CrossEntropyLoss) -> Loss:
    likelihood = Categorical(module.weight, module.label_smoothing, module.ignore_index)  # type: ignore[arg-type]
    return Loss(likelihood, divisor_of(module, "weights"))


_OPTIONS = {"label_smoothing": "label_smoothing", "class_weights": "weight"}
register(Categorical(), "ce", _OPTIONS, nn.CrossEntropyLoss, _read)
