"""Training of networks of the same kind at once, each on its own examples.

Their parameters are stacked, (R, …), and an optimiser that works elementwise steps for all. On a
GPU a step is recorded as a CUDA graph and replayed; where that fails, steps are taken one by one.
There may be two ways to compute the gradients: the faster one on that GPU is taken.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from deltabars.errors import BadValueError
from deltabars.runtime.precision import float32_products, without_noise

Weights = dict[str, Tensor]
State = dict[str, Tensor]
Gradients = Callable[[Tensor, Tensor], Weights]
Say = Callable[[str], object]

_WARM_UP = 5  # steps before a graph is recorded: libraries set themselves up in the first ones
_TRIALS = 20  # of a way to compute gradients, to time it
_AHEAD = 500  # steps launched before the GPU is waited for
_AT_ONCE = 250  # validation examples


@dataclass(frozen=True)
class Plan:
    """How networks are trained: Adam, or AdamW where the decay is decoupled.

    Attributes:
        loss: the mean loss of a batch, from outputs and targets.
        epochs: of N // batch steps each; what is left of the examples waits for the next one.
        batch: examples a step; None for all of them.
        rate: the learning rate at a share of the training, from 0 to 1.
        decay: the weight decay; λ unless it is decoupled.
        shuffled: whether every epoch has an order of its own.
        patience: with validation examples, a network is left alone after so many epochs without a
            smaller loss of theirs, and the weights of its best epoch count.
        by_products: the outputs (R, B, …) of stacked weights and inputs (R, B, …): a second way to
            compute what vmap makes of the network.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    epochs: float
    batch: int | None
    rate: Callable[[float], float]
    decay: float = 0.0
    decoupled: bool = False
    shuffled: bool = True
    patience: int | None = None
    by_products: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None = None

    def scaled(self, scale: float) -> Plan:
        """Return a plan of as many epochs, times a factor."""
        return replace(self, epochs=self.epochs * scale)


def train_stacked(
    networks: Sequence[nn.Module],
    examples: tuple[Tensor, Tensor],
    samples: Sequence[Tensor],
    plan: Plan,
    *,
    device: torch.device,
    orders: int | Sequence[int] = 0,
    validation: tuple[Tensor, Tensor] | None = None,
    say: Say = lambda line: None,
) -> list[State]:
    """Train R networks; return their weights on the CPU.

    Args:
        networks: with their initial weights; they stay as they are.
        examples: inputs (N, …) and targets (N, …).
        samples: the indices (N,) of each network's examples.
        orders: the seed of the order of the batches and of dropout, one for all or one each. With
            one for all, the networks see the same positions of their samples at the same time.
        validation: inputs and targets, where the plan has a patience.
        say: called with lines on how far it is.
    """
    if len(networks) != len(samples):
        raise BadValueError(
            f"samples: expected one for each of {len(networks)} networks, got {len(samples)}."
        )
    on_gpu = device.type == "cuda"
    first = orders if isinstance(orders, int) else orders[0]
    with (
        torch.cuda.device(device) if on_gpu else nullcontext(),
        torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []),
        float32_products(device, "tf32"),
        without_noise(),
    ):
        torch.manual_seed(first)  # dropout's
        training = _Training(networks, examples, samples, plan, device, orders)
        if plan.patience is not None and validation is not None:
            weights = training.run_to_best(validation, plan.patience, say)
        else:
            weights = training.run(say)
    names = {name: value.cpu() for name, value in weights.items()}
    return [
        {name: value[number].clone() for name, value in names.items()}
        for number in range(len(networks))
    ]


class _Training:
    """The buffers of a training, at fixed addresses, and its steps."""

    def __init__(
        self,
        networks: Sequence[nn.Module],
        examples: tuple[Tensor, Tensor],
        samples: Sequence[Tensor],
        plan: Plan,
        device: torch.device,
        orders: int | Sequence[int],
    ) -> None:
        self.plan, self.device = plan, device
        self.network = copy.deepcopy(networks[0]).to(device).train()
        stacked, buffers = stack_module_state(list(networks))
        if buffers:
            raise BadValueError("networks: expected parameters alone, got buffers (batch norm?).")
        self.weights: Weights = {
            name: value.detach().to(device, copy=True).contiguous()
            for name, value in stacked.items()
        }
        self.inputs, self.targets = (part.to(device) for part in examples)
        self.samples = torch.stack(list(samples)).to(device)  # (R, N)
        self.queue = self.samples.clone()  # (R, N), in the order of the epoch
        count = self.samples.shape[1]
        self.batch = count if plan.batch is None else plan.batch
        self.per_epoch = count // self.batch
        self.steps = max(1, round(plan.epochs * self.per_epoch))
        seeds = [orders] if isinstance(orders, int) else list(orders)
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rates = [plan.rate(step / self.steps) for step in range(self.steps)]
        self.rates = torch.tensor(rates, device=device)
        self.done = torch.zeros(1, dtype=torch.long, device=device)  # steps
        self.cursor = torch.zeros((), dtype=torch.long, device=device)  # in the queue
        self.offsets = torch.arange(self.batch, device=device)
        self.rate = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        kind = torch.optim.AdamW if plan.decoupled else torch.optim.Adam
        options: dict[str, Any] = {"fused": True, "capturable": on_gpu}
        self.optimiser = kind(
            list(self.weights.values()), lr=self.rate, weight_decay=plan.decay, **options
        )
        self.gradients: Gradients = self._gradients_by_vmap()
        self.take: Callable[[], object] = self._step
        self.number = 0  # steps taken

    def run(self, say: Say) -> Weights:
        """Take all steps; return the weights."""
        while self.number < self.steps:
            self._epoch(say)
        return self.weights

    def run_to_best(self, validation: tuple[Tensor, Tensor], patience: int, say: Say) -> Weights:
        """Take steps until no network gets better; return the weights of the best epochs."""
        held = (validation[0].to(self.device), validation[1].to(self.device))
        best = {name: value.clone() for name, value in self.weights.items()}
        count = len(self.samples)
        least = torch.full((count,), math.inf, device=self.device)
        since = torch.zeros(count, dtype=torch.long, device=self.device)
        while self.number < self.steps and bool((since < patience).any()):
            self._epoch(say)
            losses = self._validate(*held)
            better = (losses < least) & (since < patience)
            least = torch.where(better, losses, least)
            since = torch.where(better, 0, since + 1)
            for name, value in self.weights.items():
                best[name][better] = value[better]
        say(f"best validation losses {least.min():.4f} to {least.max():.4f}")
        return best

    def _epoch(self, say: Say) -> None:
        """Fill the queue and take the steps of an epoch, or what is left of them."""
        self._refill()
        last = min(self.number + self.per_epoch, self.steps)
        while self.number < last:
            if self.device.type == "cuda" and self.number == 0:
                self.gradients = self._fastest(say)
            if self.device.type == "cuda" and self.number == _WARM_UP:
                self.take = recorded(self._step, say)
            self.take()
            self.number += 1
            if self.device.type == "cuda" and self.number % _AHEAD == 0:
                torch.cuda.synchronize()
            if self.number % max(1, self.steps // 10) == 0:
                say(f"step {self.number:,} of {self.steps:,}")

    def _refill(self) -> None:
        self.cursor.zero_()
        if not self.plan.shuffled:
            return
        count = self.samples.shape[1]
        orders = [torch.randperm(count, generator=own) for own in self.generators]
        order = torch.stack(orders).to(self.device).expand(len(self.samples), -1)
        self.queue.copy_(self.samples.gather(1, order))

    def _step(self) -> None:
        """Take a step; nothing in it waits for the GPU or depends on values."""
        inputs, targets = self._next()
        for name, gradient in self.gradients(inputs, targets).items():
            self.weights[name].grad = gradient.contiguous()
        self.rate.copy_(self.rates.index_select(0, self.done).squeeze(0))
        self.optimiser.step()
        self.done.add_(1).clamp_(max=self.steps - 1)
        self.cursor.add_(self.batch)

    def _next(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets (R, B, …) of the next batch."""
        chosen = self.queue.index_select(1, self.cursor + self.offsets)
        return self.inputs[chosen], self.targets[chosen]

    def _gradients_by_vmap(self) -> Gradients:
        def loss(own: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
            return self.plan.loss(functional_call(self.network, own, (inputs,)), targets)

        randomness = "same" if len(self.generators) == 1 else "different"
        each = vmap(grad(loss), randomness=randomness)
        return lambda inputs, targets: each(self.weights, inputs, targets)

    def _gradients_by_products(self, inputs: Tensor, targets: Tensor) -> Weights:
        assert self.plan.by_products is not None
        leaves = {name: value.detach().requires_grad_() for name, value in self.weights.items()}
        with torch.enable_grad():
            outputs = self.plan.by_products(leaves, inputs).flatten(0, 1)
            total = len(inputs) * self.plan.loss(outputs, targets.flatten(0, 1))
        found = torch.autograd.grad(total, list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    def _fastest(self, say: Say) -> Gradients:
        """Return the way to compute gradients that takes the least time on this GPU."""
        if self.plan.by_products is None:
            return self.gradients
        ways: dict[str, Gradients] = {
            "vmap": self.gradients,
            "matrix products": self._gradients_by_products,
        }
        seconds = {name: self._time(way) for name, way in ways.items()}
        times = ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in seconds.items())
        say(f"gradients by {times}")
        return ways[min(seconds, key=lambda name: seconds[name])]

    def _time(self, way: Gradients) -> float:
        """Return the seconds of a computation of gradients; infinite if it fails."""
        try:
            for _ in range(3):
                way(*self._next())
            replay = recorded(lambda: way(*self._next()), lambda line: None)
            replay()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(_TRIALS):
                replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            warnings.warn(f"A way to compute gradients failed: {error}", stacklevel=2)
            return math.inf
        return (time.perf_counter() - started) / _TRIALS

    @torch.no_grad()
    def _validate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean losses (R,) of validation examples."""

        def loss(own: Weights, part: Tensor, truth: Tensor) -> Tensor:
            return self.plan.loss(functional_call(self.network, own, (part,)), truth) * len(part)

        self.network.eval()
        total = torch.zeros(len(self.samples), device=self.device)
        for part, truth in zip(inputs.split(_AT_ONCE), targets.split(_AT_ONCE), strict=True):
            total += vmap(loss, in_dims=(0, None, None))(self.weights, part, truth)
        self.network.train()
        return total / len(inputs)


def recorded(step: Callable[[], object], say: Say) -> Callable[[], object]:
    """Record a step as a CUDA graph without taking it; return its replay, or the step itself."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        torch.cuda.synchronize()
        say(f"no CUDA graph, steps are taken one by one: {error}")
        return step
    return graph.replay
