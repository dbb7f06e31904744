"""The training cost (1/N) Σₙ lossₙ(ω) + (λ/2)·‖ω‖² at its trained point.

This is the one place where 1/N and λ enter.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltabars.errors import BadValueError, DataError, ModelError, OptimumWarning, option, warn
from deltabars.likelihoods.base import Likelihood, Loss, read_loss, told_apart
from deltabars.problem.data import (
    Batch,
    TrainingData,
    as_tensors,
    leaves,
    map_leaves,
    ranges_of,
)
from deltabars.problem.network import Network, model_errors
from deltabars.problem.parameters import (
    AUTO,
    L2Rates,
    LastLayer,
    ParameterSpace,
    Prior,
    Selection,
)
from deltabars.problem.sharding import own_part
from deltabars.runtime.distributed import Group, check_same_options, current_group
from deltabars.runtime.memory import DATA, ChunkSize, chunk_within, resolve_budget, share
from deltabars.runtime.vectors import Spaces

_COPIES = 6  # of the activations of a chunk, that derivatives take about
_PROBE = 64  # examples that the model is tried on
_AT_OPTIMUM = 0.5  # of the relative gradient: no initialisation comes near
_HARDLY = 0.95  # of the mean loss of the best constant outputs


class Totals(NamedTuple):
    """Sums over examples, in float64."""

    sums: Tensor  # (4,): of losses, weights, labels predicted right (or NaN), and examples
    gradient: Tensor  # (P,): ∂(Σ lossₙ)/∂ω
    moments: Tensor  # of the targets (see `Likelihood.constant_answer`)


class Problem:
    """Everything that the curvature of a training cost depends on, checked.

    Args:
        model, data, likelihood, l2, device, dtype, memory_budget, deterministic,
            allow_probabilities: as for `deltabars.fit`; a captured model or a Loss will do, too.
        parameters: which parameters count (see `ParameterSpace.select`).
        chunk_size: examples at a time; by default as many as the memory budget has room for, up to
            1,024 on a CPU and 8,192 elsewhere. Half as many are tried where memory runs out.
        on_progress: called with the examples done and what is being done with them.

    Attributes:
        parameters: those that count, P in number, and their positions in the flat vector.
        likelihood: with weights, if any, of mean one over the data.
        given_l2: λ as it was given; `"auto"` where it is to be found (see `at_l2`).
        prior: λ of the cost above: the given one, unless a loss module reduces in another way.
        l2: λ, in the coordinates that derivatives are taken in (see `Prior`).
        train_accuracy: on the training data; None where targets are no labels.
        constant_answer: the accuracy (or NaN) and the mean loss of the best constant outputs.
        ranges: of the first inputs (see `behaviour`).
        reached: the indices in ω of the parameters that any output depends on, (P',), ascending;
            None for all.
        on_chunk: called with the number of examples of each chunk before it is processed.
    """

    on_chunk: Callable[[int], None] | None = None

    def __init__(
        self,
        model: torch.nn.Module | Network,
        data: Any,
        likelihood: str | Likelihood | Loss | torch.nn.Module = "categorical",
        parameters: Selection | ParameterSpace = None,
        l2: L2Rates | Prior | str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
        chunk_size: int | None = None,
        deterministic: bool = False,
        allow_probabilities: bool = False,
        on_progress: Callable[[int, str], None] | None = None,
    ) -> None:
        loss = read_loss(likelihood)
        self.likelihood = loss.likelihood
        self.group = current_group()
        network = model
        if not isinstance(network, Network):
            network = Network.capture(network, parameters, device, dtype, deterministic)
        is_open = isinstance(l2, str) and l2 == AUTO  # 1 until `at_l2`
        given = (
            l2 if isinstance(l2, Prior) else Prior.read(1.0 if is_open else l2, network.parameters)
        )
        self.given_l2: L2Rates | str = AUTO if is_open else given.given
        self.network = replace(network, scales=given.scales)
        self.device, self.dtype = network.device, network.dtype
        self.parameters = network.parameters
        self.num_parameters = self.parameters.size
        self._check_same_everywhere((loss.divided_by, loss.multiple))
        self.memory_budget = _budget(memory_budget, self.device, self.group)
        if chunk_size is not None and (not isinstance(chunk_size, Integral) or chunk_size < 1):
            raise BadValueError(f"batch_size: expected a whole number above 0, got {chunk_size!r}.")
        report = on_progress or (lambda done, what: None)
        room, source, counted = share(self.memory_budget, DATA), "whole", self.likelihood.counted
        data = as_tensors(data)
        if isinstance(data, Iterator):
            raise DataError(
                "Data: expected data that can be read more than once, got a one-pass iterator "
                f"({type(data).__name__}). Give a DataLoader, a Dataset or tensors."
            )
        if self.group.size > 1:
            data, source = own_part(data, self.group)
        self.data = TrainingData(
            data, self.device, self.dtype, room, report, self.group, counted, source
        )
        self.num_examples = self.data.num_examples
        self.num_outputs = 0  # until the model is tried
        first = next(iter(self.chunks(_PROBE)))
        self.ranges = ranges_of(first.inputs)
        advice, self._pixels = _advice_on_inputs(first)
        with model_errors(advice):
            self.network = self.network.verified(first.inputs)
        with self.network.evaluation(), model_errors(advice):
            self.num_outputs = self._try(first, allow_probabilities)
            self._check_same_function(first)
            self.activation_bytes = self.network.activation_bytes(first.inputs) // len(first)
            most = 1024 if self.device.type == "cpu" else 8192
            each = _COPIES * self.activation_bytes
            size = chunk_size or chunk_within(self.memory_budget, each, most, self.device)
            self.chunk_size = ChunkSize(size)
            if isinstance(parameters, LastLayer):
                self.network.check_last_layer(first.rows(slice(0, 8)).inputs)
            totals = self._read_losses(report)
            self.reached = self._find_reached(totals.gradient)
        loss_sum, weight, right, _ = totals.sums.tolist()
        self.mean_loss = loss_sum / weight
        self.train_accuracy = None if math.isnan(right) else right / self.num_examples
        self.constant_answer = self.likelihood.constant_answer(totals.moments, self.num_examples)
        self._data_gradient = (totals.gradient / weight).to(self.dtype)
        counts = self.num_examples, self.num_outputs, weight
        self.prior = given if is_open else given.times(loss.l2_factor(*counts))
        self.l2 = self.prior.level
        self.spaces = Spaces.of(self.num_parameters, self.reached, self.group)

    def at_l2(self, l2: float) -> Problem:
        """Return the same problem with another λ, one for all parameters."""
        other = copy(self)
        other.prior, other.l2 = Prior.read(l2, self.parameters), l2
        return other

    @property
    def num_reached(self) -> int:
        """P': how many of them any output depends on."""
        return self.num_parameters if self.reached is None else len(self.reached)

    @property
    def penalty(self) -> float:
        """½ Σ λᵢωᵢ² at ω̂: the part of the cost that is not the mean loss."""
        return 0.5 * float(self.network.point.double() @ self._pull.double())

    @property
    def gradient(self) -> Tensor:
        """∇cost at ω̂, (P,): about zero where the network was trained to the end with this λ."""
        return self._data_gradient + self._pull

    @property
    def relative_gradient(self) -> float:
        """‖∇cost‖ over ‖∇mean loss‖ + ‖λω̂‖: 0 at an optimum, 1 where nothing balances."""
        scale = float(self._data_gradient.norm()) + float(self._pull.norm())
        return float(self.gradient.norm()) / scale if scale else 0.0

    @property
    def _pull(self) -> Tensor:
        """λω̂, (P,): the gradient of the penalty."""
        point, scale = self.network.point, self.network.scale
        return self.l2 * (point if scale is None else point / scale.square())

    def chunks(self, size: int | None = None) -> Iterator[Batch]:
        """Yield the data once, in chunks on the device."""
        for batch in self.data.chunks(size or self.chunk_size.value):
            if self.on_chunk is not None:
                self.on_chunk(len(batch))
            assert batch.targets is not None
            targets = self.likelihood.arranged(batch.targets, self.num_outputs)
            yield Batch(batch.inputs, targets)

    def losses(self, trained: dict[str, Tensor], batch: Batch) -> Tensor:
        """Compute the loss of each example of a batch, (B,), as a function of the parameters."""
        assert batch.targets is not None
        outputs = self.network.outputs(trained, batch.inputs)
        return self.likelihood.loss(outputs.double(), batch.targets)

    @property
    def is_at_chance(self) -> bool:
        """Whether the model is no better on its training data than the best constant outputs.

        By its mean loss; or by its accuracy, within two standard deviations of that many guesses,
        where the loss is hardly better either. Not at an optimum: λ is large there.
        """
        accuracy, loss = self.constant_answer
        # A loss of 0 is that of targets that are all the same.
        if not loss > 0 or self.relative_gradient < _AT_OPTIMUM:
            return False
        spread = 2 * math.sqrt(max(accuracy * (1 - accuracy), 0) / self.num_examples)
        found = self.train_accuracy
        guesses = found is not None and found <= accuracy + spread
        return self.mean_loss >= loss or (guesses and self.mean_loss > _HARDLY * loss)

    def warn_of_optimum(self, far: str, contradicted: str = "") -> None:
        """Warn of weights at no optimum.

        Args:
            far: how far predictions at one are; or nothing.
            contradicted: what the evidence says of λ; or nothing.
        """
        chance = mode = ""
        if self.is_at_chance:
            accuracy, loss = self.constant_answer
            found, best = f"a mean loss of {self.mean_loss:.4g}", f"{loss:.4g}"
            if self.train_accuracy is not None:
                found = f"a training accuracy of {self.train_accuracy:.1%} and {found}"
                best = f"{accuracy:.1%}, {best}"
            chance = (
                f"Expected weights that were trained on these data, got {found}, which is that of "
                f"chance (the best constant outputs have {best}). Load the trained weights, and "
                f"prepare inputs and targets as in training.{self._pixels} "
            )
        names = {type(module).__name__ for module in self.network.model.modules()}
        kinds = sorted(name for name in names if "BatchNorm" in name or "Dropout" in name)
        if kinds:
            last = set(LastLayer().names(self.network.model))
            other = f", or take {option('params', LastLayer())}, which is less affected"
            mode = (
                f" The model has {' and '.join(kinds)}, so the cost it was trained with is not "
                "quite this one, of eval mode: train on for a while in eval mode"
                f"{'' if last.issuperset(self.parameters.names) else other}."
            )
        warn(
            f"{chance}Expected weights near an optimum of mean loss + (l2/2)·‖w‖², got a cost "
            f"gradient of norm {float(self.gradient.norm()):.3g}, which is "
            f"{self.relative_gradient:.0%} of the sum of its two parts{far and f': {far}'}. Train "
            "on with this cost, or give the l2 that the network was trained with (weight_decay of "
            f"SGD and Adam; not of AdamW).{mode}{contradicted and f' l2: {contradicted}'}",
            OptimumWarning,
        )

    def _check_same_everywhere(self, reduction: tuple[str, float]) -> None:
        """Refuse a process with another model or other options."""
        state = {**self.network.trained, **self.network.constants}
        options = {
            "model": sorted((name, tuple(value.shape)) for name, value in state.items()),
            "params": self.parameters.names,
            "l2": dict(self.given_l2) if isinstance(self.given_l2, Mapping) else self.given_l2,
            "likelihood": (told_apart(self.likelihood), reduction),
            "dtype": self.dtype,
            "device": self.device.type,
        }
        check_same_options(self.group, options)

    def _check_same_function(self, batch: Batch) -> None:
        """Refuse a process whose model gives other outputs for the first process's inputs."""
        if self.group.size == 1:
            return
        few = self.group.broadcast_object(map_leaves(Tensor.cpu, batch.rows(slice(0, 3)).inputs))
        few = map_leaves(lambda leaf: leaf.to(self.device), few)
        found = self.network.outputs(self.network.trained, few).cpu()
        first, *others = self.group.gather_objects(found)
        limits: Any = {"rtol": 1e-3, "atol": 1e-3 * float(first.abs().max()), "equal_nan": True}
        for rank, other in enumerate(others, 1):
            if other.shape != first.shape or not torch.allclose(other, first, **limits):
                raise ModelError(
                    "Model: expected the same weights and forward pass in every process, got other "
                    f"outputs in process {rank} than in process 0. Load the weights from one file."
                )

    def _try(self, batch: Batch, allow_probabilities: bool) -> int:
        """Check the outputs of one chunk; return the number of outputs C."""
        outputs = self.network.outputs(self.network.trained, batch.inputs)
        if outputs.shape[0] != len(batch):
            raise ModelError(
                f"Model output: expected one row for each of {len(batch)} examples, got "
                f"{tuple(outputs.shape)}. The first dimension must count examples."
            )
        if self.network.is_random(batch.inputs):
            raise ModelError(
                "Model output: expected the same outputs for the same inputs in eval mode, got "
                "different ones. Turn off what is random in the forward pass."
            )
        self.network.check_independence(batch.inputs, outputs, closely=True)
        assert batch.targets is not None
        targets = self.likelihood.arranged(batch.targets, outputs.shape[1])
        self.likelihood.check_targets(outputs, targets)
        if not allow_probabilities and self.likelihood.are_probabilities(outputs, targets):
            what, end, inverse = "rows that sum to one", "softmax", "torch.log"
            if self.likelihood.name != "categorical":
                what, end, inverse = "probabilities between 0 and 1", "sigmoid", "torch.logit"
            raise ModelError(
                f"Model output: expected logits, got {what}. If the model ends in a {end}, leave "
                f"it out, or return {inverse} of its result: the loss applies a {end} itself. "
                f"{option('allow_probabilities', True)} takes them for logits."
            )
        return outputs.shape[1]

    def _read_losses(self, report: Callable[[int, str], None]) -> Totals:
        """Sum over all examples, all checked; bring their weights to a mean of one."""
        totals: Totals | None = None
        for part in self.chunk_size.each(self.chunks(), self._totals_of):
            totals = part if totals is None else Totals(*map(torch.add, totals, part))
            report(int(totals.sums[3]), f"gradient of {self.num_examples}")
        assert totals is not None
        totals = Totals(*map(self.group.all_reduce_, totals))
        if not bool(totals.gradient.isfinite().all()):
            raise ModelError(
                "Gradients: expected finite values, got NaN or infinity. Look for square roots "
                "or logarithms at zero in the model."
            )
        weight = float(totals.sums[1])
        if not weight > 0:
            raise DataError(
                "Targets: expected examples that count, got weight 0 for every class in the data."
            )
        if weight != self.num_examples:
            self.likelihood = self.likelihood.divided(weight / self.num_examples)
        return totals

    def _totals_of(self, batch: Batch) -> Totals:
        """Sum over one chunk."""
        targets, likelihood = batch.targets, self.likelihood
        assert targets is not None
        noted: list[Tensor] = []

        def total(outputs: Tensor) -> Tensor:
            if outputs.shape[1] != self.num_outputs:
                expected, got = self.num_outputs, outputs.shape[1]
                raise ModelError(
                    f"Model output: expected {expected} columns on every batch, got {got}."
                )
            likelihood.check_targets(outputs, targets)
            noted[:] = outputs, likelihood.loss(outputs, targets)
            return noted[1].sum()

        gradient = self.network.gradient(batch.inputs, total).double()
        outputs, losses = (each.detach() for each in noted)
        self.network.check_independence(batch.inputs, outputs)
        bad = int((~losses.isfinite()).sum())
        if bad:
            raise DataError(
                f"Losses: expected finite values, got {bad} NaN or infinite ones in a chunk "
                f"of {len(losses)} examples. Look for outputs that overflow."
            )
        label = likelihood.label(likelihood.mean(outputs))
        right = math.nan
        if label is not None and label.shape == targets.shape:
            right = float(label.eq(targets).double().mean()) * len(targets)
        weight = float(likelihood.weights(outputs, targets).double().sum())
        sums = [float(losses.double().sum()), weight, right, len(batch)]
        moments = likelihood.moments(outputs, targets).to(gradient.device)
        return Totals(torch.tensor(sums, dtype=torch.float64), gradient, moments)

    def _find_reached(self, gradient: Tensor) -> Tensor | None:
        """Find the parameters with a nonzero derivative of any output for any example.

        Silent ReLU units and inputs that are always zero leave many without. Where the gradient has
        zeros, a pass with random cotangents decides: nothing cancels there but by chance.
        """
        if bool(gradient.all()):
            return None
        found = torch.zeros_like(gradient)
        generator = torch.Generator().manual_seed(0)

        def derivatives(batch: Batch) -> Tensor:
            def total(outputs: Tensor) -> Tensor:
                drawn = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
                return (outputs * drawn.to(outputs)).sum()

            return self.network.gradient(batch.inputs, total)

        for part in self.chunk_size.each(self.chunks(), derivatives):
            found += (part != 0).to(found)
        found = self.group.all_reduce_(found)
        if not bool(found.any()):
            raise ModelError(
                "Model output: expected one that depends on the selected parameters, got "
                "derivatives that are all zero. Look for .detach() or torch.no_grad() in the "
                "forward pass."
            )
        return None if bool(found.all()) else found.nonzero().squeeze(1)


def _budget(memory_budget: int | None, device: torch.device, group: Group) -> int:
    """Return the budget of each process: processes on one device share what is free there.

    The smallest of all, because what one process keeps decides for all how far a basis grows.
    """
    budget, kind = resolve_budget(memory_budget, device), device.type
    if kind == "cuda":  # each process may see its GPU as the first
        kind = str(torch.cuda.get_device_properties(device).uuid)
    devices = group.gather_objects((platform.node(), kind))
    alike = devices.count(devices[group.rank]) if memory_budget is None else 1
    return min(group.gather_objects(budget // alike))


def _advice_on_inputs(batch: Batch) -> tuple[str, str]:
    """Return hints for inputs of an integer type, and for the numbers of a picture's file."""
    integers = pixels = ""
    for leaf in leaves(batch.inputs):
        if "int" in str(leaf.dtype):
            integers = (
                f". The inputs are of {leaf.dtype}: a network that was trained on floats takes "
                "floats, prepared as in training (pixels of 0 to 255 by x.float() / 255, say)."
            )
        if leaf.ndim > 1 and (leaf.dtype == torch.uint8 or leaf.is_floating_point()):
            low, high = float(leaf.min()), float(leaf.max())
            if low >= 0 and 1 < high <= 255 and bool((leaf.float() == leaf.float().round()).all()):
                pixels = (
                    f" The inputs are whole numbers from {low:g} to {high:g}: divide them as in "
                    "training, by 255, say."
                )
    return integers, pixels
