"""Predictions of any number of inputs, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltabars.batches import Batch, check_not_batches, iterate, unlabelled
from deltabars.covariance import Covariance
from deltabars.curvature.pullback import Pullback
from deltabars.curvature.sensitivity import sensitivities
from deltabars.errors import DataError
from deltabars.inputs import Inputs, Signature, leaves
from deltabars.likelihoods import Likelihood
from deltabars.memory import ChunkSize, chunk_within, resolve_budget
from deltabars.network import Network, model_errors
from deltabars.prediction import Prediction
from deltabars.progress import Progress

_READ_SIZE = 8192  # inputs, where they do not come in batches
_LARGEST_CHUNK = 1024
_PROBE = 8  # inputs that memory is measured on
_COPIES = 4  # of the projections, that their squares and sums take about


@dataclass(frozen=True)
class Scorer:
    """What turns inputs into predictions with error bars.

    Attributes:
        signature: of the inputs that the network was fitted with.
        bases: eigenvectors (K, P) by matrix.
        covariances: by the name under which their predictions are returned.
        space, bound, with_covariance: as for `DeltaFit.predict`.
        memory_budget: bytes to stay within; half of the free memory if None.
    """

    pullback: Pullback
    likelihood: Likelihood
    signature: Signature
    bases: Mapping[str, Tensor]
    covariances: Mapping[str, Covariance]
    space: str
    bound: str
    with_covariance: bool
    memory_budget: int | None

    def predict(self, inputs: Any, chunk_size: int | None, progress: bool) -> dict[str, Prediction]:
        """The predictions of every covariance; F and its projections are computed once.

        The chunk size is chosen by the memory budget if None.
        """
        parts: dict[str, list[Prediction]] = {name: [] for name in self.covariances}
        total = len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else None
        done = 0
        with Progress("Predicting", total, "input", progress) as bar:
            for predictions in self._predictions(inputs, chunk_size):
                for name, prediction in predictions.items():
                    parts[name].append(prediction)
                done += len(next(iter(predictions.values())))
                bar.show(done)
        if not done:
            raise DataError("Inputs: expected at least one, got none.")
        return {name: Prediction.concatenate(part) for name, part in parts.items()}

    def _predictions(self, inputs: Any, given: int | None) -> Iterator[dict[str, Prediction]]:
        """The predictions of all inputs, a chunk at a time."""
        size = None if given is None else ChunkSize(given)
        if isinstance(inputs, list):
            check_not_batches(inputs, self.signature)
        for raw in iterate(inputs, _READ_SIZE):
            batch = unlabelled(raw, self.signature)
            self._check(batch.inputs)
            batch = batch.to(self._network.device, self._network.dtype)
            size = ChunkSize(self._choose_chunk_size(batch)) if size is None else size
            yield from size.each([batch], self._predict_chunk)

    def _predict_chunk(self, chunk: Batch) -> dict[str, Prediction]:
        with self._network.evaluation(), model_errors():
            outputs, sensitivity = sensitivities(
                self.pullback,
                self.likelihood,
                chunk.inputs,
                self.bases,
                self.space,
                with_gram=self.with_covariance,
            )
        if not bool(outputs.isfinite().all()):
            raise DataError("Outputs: expected finite values, got NaN or infinity.")
        label = self.likelihood.label(self.likelihood.mean(outputs))
        return {
            name: Prediction.compute(
                sensitivity, covariance, label, self.likelihood.target_noise, bound=self.bound
            )
            for name, covariance in self.covariances.items()
        }

    def _choose_chunk_size(self, batch: Batch) -> int:
        """Inputs at a time: activations, the largest layer's part of F, and F·Q must fit."""
        few = batch.rows(slice(0, _PROBE))
        columns = sum(basis.shape[0] for basis in self.bases.values())
        with self._network.evaluation(), model_errors():
            pulled = self.pullback.pull(few.inputs, self.likelihood.mean_jacobian)
            activations = self._network.activation_bytes(few.inputs) // len(few)
        layers = [factors.numbers_per_input(columns) for factors in pulled.layers]
        loose = sum(rows.shape[1] * rows.shape[2] for rows in pulled.loose.values())
        numbers = (2 * max(layers, default=0) + loose) * self._network.dtype.itemsize
        projected = _COPIES * columns * torch.float64.itemsize
        per_input = pulled.count * (2 * activations + projected) + numbers
        budget = resolve_budget(self.memory_budget, self._network.device)
        return chunk_within(budget, per_input, _LARGEST_CHUNK, self._network.device)

    @property
    def _network(self) -> Network:
        return self.pullback.network

    def _check(self, inputs: Inputs) -> None:
        self.signature.check(inputs, also=str(self._network.dtype))
        own = self._network.device
        for leaf in leaves(inputs):
            if leaf.device.type not in ("cpu", own.type):
                places = "the CPU" if own.type == "cpu" else f"{own} or the CPU"
                raise DataError(
                    f"Inputs: expected tensors on {places}, got {leaf.device}. Move them with "
                    ".to(…)."
                )
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                raise DataError("Inputs: expected finite values, got NaN or infinity.")
