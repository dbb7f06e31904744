"""Predictions of any number of inputs, a chunk at a time, of all outputs or of some."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from deltabars.covariance.base import Covariance
from deltabars.curvature.pullback import Pullback
from deltabars.curvature.sensitivity import Sensitivity, cotangents, sensitivities
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, DataError
from deltabars.likelihoods.base import Likelihood
from deltabars.prediction.averaging import Moderation
from deltabars.prediction.prediction import Prediction
from deltabars.problem.data import Batch, Signature, check_not_batches, iterate, leaves, unlabelled
from deltabars.problem.network import Network, model_errors
from deltabars.runtime.memory import ChunkSize, chunk_within, resolve_budget
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import Basis, ShardedVectors

_READ_SIZE = 8192  # inputs, where they do not come in batches
_LARGEST_CHUNK = 1024
_PROBE = 8  # inputs that memory is measured on
_COPIES = 4  # of the projections (or L Lᵀ), that their squares and sums take about

Found = dict[str, Prediction]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Classes:
    """k of the C outputs: the same ones for all inputs, or those with each input's highest mean."""

    count: int  # k
    listed: tuple[int, ...] | None  # their numbers; None for the k highest

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the numbers (B, k) of the wanted outputs, given all of them (B, C)."""
        if self.listed is not None:
            return torch.tensor(self.listed, device=outputs.device).expand(len(outputs), -1)
        # The mean rises with the output, which has more digits; of equal ones the first goes first.
        return outputs.sort(dim=-1, descending=True, stable=True).indices[:, : self.count]


def choose_classes(asked: Any, num_outputs: int, likelihood: Likelihood) -> Classes | None:
    """Return the outputs that `"topN"` or a list of their numbers stands for; None for all."""
    if asked is None:
        return None
    top = re.fullmatch(r"top([1-9][0-9]*)", asked) if isinstance(asked, str) else None
    if top is not None and likelihood.discrete and int(top[1]) <= num_outputs:
        return Classes(int(top[1]), None)
    numbers = asked.tolist() if hasattr(asked, "tolist") else asked
    if isinstance(numbers, list | tuple | range) and 0 < len(numbers) <= num_outputs:
        known = [int(k) for k in numbers if is_whole(k) and 0 <= k < num_outputs]
        if len(set(known)) == len(numbers):
            return Classes(len(known), tuple(known))
    tops = f"'top1' to 'top{num_outputs}', or " if likelihood.discrete else ""
    raise BadValueError(
        f"classes: expected None for all {num_outputs} outputs, {tops}a list of different whole "
        f"numbers from 0 to {num_outputs - 1}, got {asked!r:.200}."
    )


@dataclass(frozen=True)
class Scorer:
    """What turns inputs into predictions with error bars."""

    pullback: Pullback
    likelihood: Likelihood
    signature: Signature  # of the inputs that the network was fitted with
    bases: Mapping[str, Basis]  # eigenvectors (K, P) by matrix
    covariances: Mapping[str, Covariance]  # by the names of the predictions returned
    space: str  # this and the next two as for `DeltaFit.predict`
    bound: str
    with_covariance: bool
    classes: Classes | None  # which outputs are wanted; all if None
    moderation: Moderation | None  # how predictions are averaged; not at all if None
    memory_budget: int | None  # bytes to stay within; half of the free memory if None
    averaged: Mapping[str, Covariance] = field(default_factory=dict)  # in place of `covariances`

    def predict(self, inputs: Any, chunk_size: int | None, progress: bool) -> Found:
        """Predict with every covariance; F and its projections are computed once."""
        parts: list[Found] = []
        done, total = 0, len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else None
        with Progress("Predicting", total, "input", progress) as bar:
            for found in self._parts(inputs, chunk_size, self._predict_chunk):
                parts.append(found)
                done += len(next(iter(found.values())))
                bar.show(done)
        if not parts:
            raise DataError("Inputs: expected at least one, got none.")
        return {name: Prediction.concatenate([p[name] for p in parts]) for name in parts[0]}

    def each(self, inputs: Any, work: Callable[[Tensor, Sensitivity], Result]) -> Iterator[Result]:
        """Yield the results of `work` on the outputs (B, C) and sensitivities of chunks in turn."""
        yield from self._parts(inputs, None, lambda chunk: work(*self._sensitivities(chunk)))

    def _parts(
        self, inputs: Any, given: int | None, work: Callable[[Batch], Result]
    ) -> Iterator[Result]:
        batches = read_inputs(inputs, self.signature, self._network)
        if any(isinstance(basis, ShardedVectors) for basis in self.bases.values()):
            yield from self._in_step(batches, given, work)
            return
        size = None if given is None else ChunkSize(given)
        for batch in batches:
            size = size or ChunkSize(self._choose_chunk_size(batch))
            yield from size.each([batch], work)

    def _in_step(
        self, batches: Iterator[Batch], given: int | None, work: Callable[[Batch], Result]
    ) -> Iterator[Result]:
        """Predict on processes that share the eigenvectors: one without inputs repeats its last."""
        sharded = [basis for basis in self.bases.values() if isinstance(basis, ShardedVectors)]
        group = sharded[0].space.group
        parts = (batch.split(given or self._choose_chunk_size(batch)) for batch in batches)
        chunks = chain.from_iterable(parts)
        chunk = last = next(chunks, None)
        while any(group.gather_objects(chunk is not None)):
            if last is None:
                raise DataError("Inputs: expected at least one on every process, got none.")
            found = work(last)
            if chunk is not None:
                yield found
            chunk = next(chunks, None)
            last = chunk or last

    def _sensitivities(self, chunk: Batch) -> tuple[Tensor, Sensitivity]:
        with self._network.evaluation(), model_errors():
            given = self.pullback, self.likelihood, chunk.inputs, self.bases, self.space
            wanted: dict[str, Any] = {"classes": self.classes, "with_gram": self._with_gram}
            outputs, sensitivity = sensitivities(*given, **wanted)
        if not bool(outputs.isfinite().all()):
            raise DataError("Outputs: expected finite values, got NaN or infinity.")
        return outputs, sensitivity

    def _predict_chunk(self, chunk: Batch) -> Found:
        outputs, sensitivity = self._sensitivities(chunk)
        predictions, label = {}, self.likelihood.label(self.likelihood.mean(outputs))
        parts = sensitivity.squares, sensitivity.projections, sensitivity.gram
        for name, covariance in self.covariances.items():
            spread, moderated, tempered = covariance.spread(*parts), None, None
            if self.moderation is not None:
                other = self.averaged.get(name)
                scatter = spread if other is None else other.spread(*parts)
                assert scatter.covariance is not None
                moderated = self.moderation(outputs, scatter.covariance)
                if self.moderation.temperature != 1:
                    tempered = self.likelihood.mean(outputs / self.moderation.temperature)
            predictions[name] = Prediction.compute(
                sensitivity.value, spread.scaled(sensitivity.slope), label,
                self.likelihood.target_noise, bound=self.bound,
                with_covariance=self.with_covariance,
                classes=None if self.classes is None else self.classes(outputs),
                moderated=moderated, tempered=tempered,
                of_probabilities=self.space == "probability" and self.likelihood.discrete,
            )  # fmt: skip
        return predictions

    def _choose_chunk_size(self, batch: Batch) -> int:
        """Choose the inputs at a time: activations, a layer's part of F, and F·Q must fit."""
        few = batch.rows(slice(0, _PROBE))
        columns = sum(basis.shape[0] for basis in self.bases.values())
        rows = partial(cotangents, self.likelihood, self.space, self.classes)
        count = None if self.classes is None else self.classes.count
        with self._network.evaluation(), model_errors():
            found = self.pullback.footprint(few.inputs, rows, count)
        size = self._network.dtype.itemsize
        numbers = (2 * found.largest_layer(columns) + found.loose) * size
        columns += found.count if self._with_gram else 0
        projected = _COPIES * columns * torch.float64.itemsize
        # Cotangents are rows of as many numbers as there are outputs.
        each = 2 * found.activations + 2 * found.outputs * size + projected
        device = self._network.device
        budget = resolve_budget(self.memory_budget, device)
        return chunk_within(budget, found.count * each + numbers, _LARGEST_CHUNK, device)

    @property
    def _with_gram(self) -> bool:
        return self.with_covariance or self.moderation is not None

    @property
    def _network(self) -> Network:
        return self.pullback.network


def read_inputs(inputs: Any, signature: Signature, network: Network) -> Iterator[Batch]:
    """Yield checked inputs in batches on the network's device, without their targets."""
    if isinstance(inputs, list):
        check_not_batches(inputs, signature)
    own = network.device
    for raw in iterate(inputs, _READ_SIZE):
        batch = unlabelled(raw, signature)
        signature.check(batch.inputs, also=str(network.dtype))
        for leaf in leaves(batch.inputs):
            if leaf.device.type not in ("cpu", own.type):
                known = "the CPU" if own.type == "cpu" else f"{own} or the CPU"
                raise DataError(f"Inputs: expected tensors on {known}, got {leaf.device}.")
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                raise DataError("Inputs: expected finite values, got NaN or infinity.")
        yield batch.to(own, network.dtype)
