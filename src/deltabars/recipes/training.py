"""Training as in the paper: Adam on batches in the order of the data, for many networks at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from deltabars.errors import BadValueError, DataError
from deltabars.precision import float32_products
from deltabars.progress import Progress
from deltabars.recipes.paper import BATCH, L2
from deltabars.recipes.stack import Stack, channels_last

_STEPS_A_GRAPH = 50
_GRAPHS_AHEAD = 20  # launched before the GPU is waited for
_WARM_UP = 5  # steps before a graph is recorded: libraries set themselves up in the first ones

Schedule = tuple[tuple[int, float], ...]


def train(
    start: Stack,
    images: Tensor,
    labels: Tensor,
    *,
    steps: int,
    schedule: Schedule,
    rows: Tensor | None = None,
    progress: bool = True,
) -> Stack:
    """Minimise mean cross-entropy + (λ/2)·‖ω‖² for each network of a stack, from where it stands.

    Adam with batches of 100 examples, one after the other without shuffling, the first ones again
    after the last. On a GPU the steps are recorded once and replayed, and products are in TF32 (as
    torch's convolutions are by default).

    Args:
        start: the networks; where they are is where they are trained.
        images, labels: (N, channels, side, side) and (N,).
        steps: how many.
        schedule: the learning rate from a step on: (step, rate) pairs, the first for step 0.
        rows: the examples of each network in their order, (M, N): a bootstrap's. All networks
            see the data as they are by default.
        progress: whether to show it.

    Raises:
        BadValueError, DataError: steps and schedule, images, labels or rows do not fit together.

    Cost: M·steps·100 gradients; memory about M·100 examples' patches (some 20 to 30 MB
    a network).
    """
    _check(start, images, labels, steps, schedule, rows)
    trainer = _Trainer(start, images, labels, rows)
    title = "Training" if len(start) == 1 else f"Training {len(start)} networks"
    device = start.weights.device
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with (
        here,
        float32_products(device, "tf32"),
        Progress(title, steps, "step", progress) as bar,
    ):
        for first, last, rate in _stretches(schedule, steps):
            trainer.rate.fill_(rate)
            for done in trainer.run(last - first):
                bar.show(first + done)
    return Stack(start.recipe, trainer.weights.detach())


def _check(
    start: Stack,
    images: Tensor,
    labels: Tensor,
    steps: int,
    schedule: Schedule,
    rows: Tensor | None,
) -> None:
    first = [step for step, _ in schedule]
    if steps < 1 or first[:1] != [0] or first != sorted(set(first)):
        raise BadValueError(
            f"schedule: expected one step or more and rates from step 0 on, in their order, got "
            f"{steps} steps and {schedule}."
        )
    recipe = start.recipe
    shape = (recipe.channels, recipe.side, recipe.side)
    if tuple(images.shape[1:]) != shape or images.shape[:1] != labels.shape:
        raise DataError(
            f"images: expected (N, {', '.join(map(str, shape))}) and N labels, got "
            f"{tuple(images.shape)} and {tuple(labels.shape)}."
        )
    if rows is not None and rows.shape != (len(start), len(labels)):
        raise DataError(
            f"rows: expected ({len(start)}, {len(labels)}), a row of examples for each network, "
            f"got {tuple(rows.shape)}."
        )


def _stretches(schedule: Schedule, steps: int) -> Iterator[tuple[int, int, float]]:
    """The steps of each learning rate: (first, the one after the last, rate)."""
    ends = [step for step, _ in schedule[1:]] + [steps]
    for (first, rate), end in zip(schedule, ends, strict=True):
        if first < min(end, steps):
            yield first, min(end, steps), rate


class _Trainer:
    """The state of a training run, all of it on the device."""

    def __init__(self, start: Stack, images: Tensor, labels: Tensor, rows: Tensor | None) -> None:
        device = start.weights.device
        self.recipe = start.recipe
        self.weights = start.weights.detach().clone().requires_grad_()
        self.rate = torch.zeros((), device=device)
        self.images, self.labels = channels_last(images.to(device)), labels.to(device)
        self.rows = None if rows is None else rows.to(device)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.offsets = torch.arange(BATCH, device=device)
        self.optimiser = torch.optim.Adam(
            [self.weights],
            lr=self.rate,
            weight_decay=L2,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, steps: int) -> Iterator[int]:
        """Take steps; yields how many are done, now and then."""
        done = 0
        if self.weights.is_cuda and steps >= _WARM_UP + _STEPS_A_GRAPH:
            if self.graph is None:
                self.graph = self._record()
                done = _WARM_UP
            for graphs in range(1, (steps - done) // _STEPS_A_GRAPH + 1):
                self.graph.replay()
                if graphs % _GRAPHS_AHEAD == 0:
                    torch.cuda.synchronize()
                    yield done + graphs * _STEPS_A_GRAPH
            done += (steps - done) // _STEPS_A_GRAPH * _STEPS_A_GRAPH
        for each in range(done, steps):
            self.step()
            yield each + 1

    def step(self) -> None:
        """One step on the next batch."""
        batch = (self.cursor + self.offsets) % len(self.labels)
        if self.rows is not None:
            batch = self.rows[:, batch]  # (M, 100)
        images, labels = self.images[batch], self.labels[batch]
        if self.rows is None:
            images, labels = images[None], labels.expand(len(self.weights), -1)
        logits = Stack(self.recipe, self.weights).logits(images)
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (self.weights.grad,) = torch.autograd.grad(total / BATCH, self.weights)
        self.optimiser.step()
        self.cursor.add_(BATCH).remainder_(len(self.labels))

    def _record(self) -> torch.cuda.CUDAGraph:
        """Take some steps, then record a graph of further ones without taking them."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self.step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_STEPS_A_GRAPH):
                self.step()
        return graph
