"""Predictions of any number of inputs, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deltabars.batches import Batch, check_not_batches, iterate, unlabelled
from deltabars.covariance import Covariance
from deltabars.curvature.sensitivity import sensitivities
from deltabars.errors import DataError
from deltabars.inputs import Inputs, Signature, leaves
from deltabars.likelihoods import Likelihood
from deltabars.memory import chunk_within, resolve_budget
from deltabars.network import Network, model_errors
from deltabars.prediction import Prediction
from deltabars.progress import Progress

_LARGEST_CHUNK = 256


@dataclass(frozen=True)
class Scorer:
    """What turns inputs into predictions with error bars.

    Attributes:
        signature: of the inputs that the network was fitted with.
        bases: eigenvectors (K, P) by matrix.
        covariances: by the name under which their predictions are returned.
        space, bound, with_covariance: as for `DeltaFit.predict`.
    """

    network: Network
    likelihood: Likelihood
    signature: Signature
    bases: Mapping[str, Tensor]
    covariances: Mapping[str, Covariance]
    space: str
    bound: str
    with_covariance: bool

    def predict(self, inputs: Any, chunk_size: int, progress: bool) -> dict[str, Prediction]:
        """The predictions of every covariance; F and its projections are computed once."""
        parts: dict[str, list[Prediction]] = {name: [] for name in self.covariances}
        total = len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else None
        done = 0
        with Progress("Predicting", total, "input", progress) as bar:
            for chunk in self._chunks(inputs, chunk_size):
                for name, prediction in self._predict_chunk(chunk):
                    parts[name].append(prediction)
                done += len(chunk)
                bar.show(done)
        if not done:
            raise DataError("Inputs: expected at least one, got none.")
        return {name: Prediction.concatenate(part) for name, part in parts.items()}

    def _chunks(self, inputs: Any, size: int) -> Iterator[Batch]:
        if isinstance(inputs, list):
            check_not_batches(inputs, self.signature)
        for raw in iterate(inputs, size):
            batch = unlabelled(raw, self.signature)
            self._check(batch.inputs)
            yield from batch.to(self.network.device, self.network.dtype).split(size)

    def _predict_chunk(self, chunk: Batch) -> Iterator[tuple[str, Prediction]]:
        with self.network.evaluation(), model_errors():
            outputs, sensitivity = sensitivities(
                self.network, self.likelihood, chunk.inputs, self.bases, self.space
            )
        if not bool(outputs.isfinite().all()):
            raise DataError("Outputs: expected finite values, got NaN or infinity.")
        label = self.likelihood.label(self.likelihood.mean(outputs))
        for name, covariance in self.covariances.items():
            yield (
                name,
                Prediction.compute(
                    sensitivity,
                    covariance,
                    label,
                    bound=self.bound,
                    with_covariance=self.with_covariance,
                ),
            )

    def _check(self, inputs: Inputs) -> None:
        self.signature.check(inputs, also=str(self.network.dtype))
        own = self.network.device
        for leaf in leaves(inputs):
            if leaf.device.type not in ("cpu", own.type):
                places = "the CPU" if own.type == "cpu" else f"{own} or the CPU"
                raise DataError(
                    f"Inputs: expected tensors on {places}, got {leaf.device}. Move them with "
                    ".to(…)."
                )
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                raise DataError("Inputs: expected finite values, got NaN or infinity.")


def choose_chunk_size(network: Network, num_outputs: int, memory_budget: int | None) -> int:
    """Inputs at a time: F (B, C, P) and what it is made of must fit."""
    budget = resolve_budget(memory_budget, network.device)
    per_input = 3 * num_outputs * network.parameters.size * network.dtype.itemsize
    return chunk_within(budget, per_input, most=_LARGEST_CHUNK)
