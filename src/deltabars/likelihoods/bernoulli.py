"""Yes or no, once or several times."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltabars.errors import BadValueError, DataError
from deltabars.likelihoods.base import (
    CLASSES,
    Likelihood,
    Loss,
    check_same_shape,
    divisor_of,
    numbers,
    register,
)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """C independent yes/no answers: sigmoid cross-entropy on logits, summed over the C outputs.

    Targets (B, C) are 0 or 1, of any real type. With C = 1 it is binary, else multi-label.

    Attributes:
        pos_weight: how many times as much a 1 counts as a 0: one number, or one an output; None for
            alike. What counts is the proportion: see `scale`.
        scale: what a 0 counts. A fit chooses it, so that the weights of all targets in the training
            data have a mean of one.
    """

    pos_weight: tuple[float, ...] | None = None
    scale: float = 1.0

    name = "bernoulli"
    discrete = True

    def __post_init__(self) -> None:
        if self.pos_weight is not None:
            object.__setattr__(self, "pos_weight", numbers("pos_weight", self.pos_weight))
        numbers("scale", self.scale)

    def arranged(self, targets: Tensor, num_outputs: int) -> Tensor:
        """Answers (B,) are those of one output (B, 1)."""
        return targets[:, None] if num_outputs == targets.ndim == 1 else targets

    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        check_same_shape(outputs, targets)
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise DataError(
                "Targets: expected 0 or 1 for the Bernoulli likelihood, got other values. "
                f"{CLASSES} For real numbers use 'gaussian'; probabilities are not taken."
            )
        if self.pos_weight is not None and len(self.pos_weight) not in (1, outputs.shape[1]):
            raise BadValueError(
                f"pos_weight: expected one number, or one for each of {outputs.shape[1]} outputs, "
                f"got {len(self.pos_weight)}."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = None if self.pos_weight is None else outputs.new_tensor(self.pos_weight)
        loss = F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), pos_weight=weight, reduction="none"
        ).sum(-1)
        return loss if self.scale == 1 else self.scale * loss

    def are_probabilities(self, outputs: Tensor, targets: Tensor) -> bool:
        # Logits may lie in [0, 1] by chance: it counts how likely the targets are either way, by
        # three standard errors.
        if not bool(((outputs >= 0) & (outputs <= 1)).all()):
            return False
        gain = self.loss(outputs, targets) - self.loss(outputs.logit(eps=1e-6), targets)
        return bool(gain.mean() > 3 * gain.std(correction=0) / math.sqrt(len(gain)))

    def moments(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets.double().sum(0, keepdim=True)

    def constant_answer(self, moments: Tensor, count: int) -> tuple[float, float]:
        yes = moments[0].cpu()
        no = count - yes
        much = yes if self.pos_weight is None else yes * yes.new_tensor(self.pos_weight)
        loss = self.scale * (torch.special.entr(much / (much + no)) * (much + no)).sum()
        loss = loss + self.scale * (torch.special.entr(no / (much + no)) * (much + no)).sum()
        return float(torch.maximum(yes, no).mean()) / count, float(loss) / count

    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        return outputs.sigmoid()

    def slope(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()

    def entropy(self, mean: Tensor, dim: int = -1) -> Tensor:
        # Of each answer by itself, summed: what they tell of one another is left out.
        return (torch.special.entr(mean) + torch.special.entr(1 - mean)).sum(dim)

    def curvature_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.diag_embed(self.pivots(outputs, targets).sqrt())

    def pivots(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.slope(outputs) * self._target_weights(outputs, targets)

    def label(self, mean: Tensor) -> Tensor:
        return (mean > 0.5).long()

    def weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._target_weights(outputs, targets).mean(-1)

    def divided(self, mean_weight: float) -> Bernoulli:
        return replace(self, scale=self.scale / mean_weight)

    def _target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what each target counts, (B, C): for a 1 `pos_weight` times as much as for a 0."""
        if self.pos_weight is None:
            return torch.full_like(outputs, self.scale)
        more = outputs.new_tensor(self.pos_weight) - 1
        return self.scale * (1 + more * targets.to(outputs.dtype))


def _read(module: nn.BCEWithLogitsLoss) -> Loss:
    if module.weight is not None:
        raise BadValueError(
            "likelihood: expected nn.BCEWithLogitsLoss without weight=, got one with it. Weights "
            "of outputs or of single examples are not supported; pos_weight= is."
        )
    return Loss(Bernoulli(module.pos_weight), divisor_of(module, "elements"))  # type: ignore[arg-type]


register(Bernoulli(), "bce", {"pos_weight": "pos_weight"}, nn.BCEWithLogitsLoss, _read)
