"""Sums over all training examples: losses, gradients, weights; each example checked on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltabars.batches import Batch
from deltabars.errors import DataError, ModelError
from deltabars.independence import check_independence
from deltabars.inputs import Inputs
from deltabars.likelihoods import Likelihood
from deltabars.memory import ChunkSize
from deltabars.network import Network
from deltabars.ranks import Ranks

_Part = tuple[Tensor, Tensor, Tensor, float, Tensor]
Watching = Callable[[Inputs, Mapping[str, Tensor]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Totals:
    """Sums over the examples of some data.

    Attributes:
        loss: Σ lossₙ.
        weight: Σ of the examples' weights; N where they all count alike.
        gradient: ∂(Σ lossₙ)/∂ω, (P,), float64.
        right: how many labels are predicted right, NaN where there are none.
        moments: of the targets (see `Likelihood.constant_answer`).
    """

    loss: float
    weight: float
    gradient: Tensor
    right: float
    moments: Tensor

    def over(self, ranks: Ranks) -> Totals:
        """The totals of all ranks.

        Raises:
            DataError: none of the examples counts.
        """
        parts = ranks.gather((self.loss, self.weight, self.right))
        loss, weight, right = (math.fsum(column) for column in zip(*parts, strict=True))
        if not weight > 0:
            raise DataError(
                "Targets: expected examples that count, got weight 0 for every class in the data. "
                "Give each class a weight above zero."
            )
        moments = ranks.sum_(self.moments)
        return Totals(loss, weight, ranks.sum_(self.gradient), right, moments)


def add_up(
    network: Network,
    likelihood: Likelihood,
    num_outputs: int,
    chunks: Iterable[Batch],
    chunk_size: ChunkSize,
    watch: Watching,
    report: Callable[[int], None],
) -> Totals:
    """The totals of all chunks, with every output, target and loss checked.

    Args:
        num_outputs: C, which every chunk must have.
        chunk_size: halved where memory runs out.
        watch: gives, for inputs and parameters, a context to run the forward pass in.
        report: called with the examples done.

    Raises:
        DataError, ModelError: what was expected, found, and to be done.
    """
    gradient = torch.zeros(network.parameters.size, device=network.device, dtype=torch.float64)
    loss = weight = right = 0.0
    moments: Tensor | float = 0.0
    done = 0
    work = partial(_of_chunk, network, likelihood, num_outputs, watch)
    parts: Iterator[_Part] = chunk_size.each(chunks, work)
    for losses, weights, part, of_labels, of_targets in parts:
        bad = int((~losses.isfinite()).sum())
        if bad:
            raise DataError(
                f"Losses: expected finite values, got {bad} NaN or infinite ones in a chunk "
                f"of {len(losses)} examples. Look for outputs that overflow."
            )
        loss += float(losses.double().sum())
        weight += float(weights.double().sum())
        gradient += part
        right += of_labels
        moments = of_targets + moments
        done += len(losses)
        report(done)
    if not bool(gradient.isfinite().all()):
        raise ModelError(
            "Gradients: expected finite values, got NaN or infinity. Look for square roots "
            "or logarithms at zero in the model."
        )
    assert isinstance(moments, Tensor)
    return Totals(loss, weight, gradient, right, moments)


def _of_chunk(
    network: Network,
    likelihood: Likelihood,
    num_outputs: int,
    watch: Watching,
    batch: Batch,
) -> _Part:
    """Of a chunk: the losses (B,), their weights (B,), and the gradient (P,) of the losses' sum;
    how many labels are right; and the moments of the targets.
    """
    targets = batch.targets
    assert targets is not None
    outputs = losses = torch.empty(0)

    def total(found: Tensor) -> Tensor:
        nonlocal outputs, losses
        outputs = found
        if outputs.shape[1] != num_outputs:
            raise ModelError(
                f"Model output: expected {num_outputs} columns on every batch, got "
                f"{outputs.shape[1]}."
            )
        likelihood.check_targets(outputs, targets)
        losses = likelihood.loss(outputs, targets)
        return losses.sum()

    gradient = network.gradient(batch.inputs, total, partial(watch, batch.inputs))
    outputs = outputs.detach()
    check_independence(network, batch.inputs, outputs)
    label = likelihood.label(likelihood.mean(outputs))
    right = math.nan
    if label is not None and label.shape == targets.shape:
        right = float(label.eq(targets).double().mean()) * len(targets)
    weights = likelihood.weights(outputs, targets)
    return losses.detach(), weights, gradient, right, likelihood.moments(outputs, targets)
