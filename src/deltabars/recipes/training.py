"""Training of several networks of the same kind at once, by `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from deltabars.errors import BadValueError, DataError
from deltabars.recipes.paper import BATCH, L2, PaperNetwork
from deltabars.runtime.precision import float32_products, without_noise
from deltabars.runtime.progress import Progress

_WARM_UP = 5  # steps before a graph is recorded: libraries set themselves up in the first ones
_AHEAD = 1_000  # steps launched before the GPU is waited for
_AT_ONCE = 500  # images to predict


def train(
    start: Sequence[PaperNetwork],
    images: Tensor,
    labels: Tensor,
    *,
    steps: int,
    schedule: tuple[tuple[int, float], ...],
    rows: Tensor | None = None,
    progress: bool = True,
) -> list[PaperNetwork]:
    """Minimise mean cross-entropy + (λ/2)·‖ω‖² for each of M networks.

    Adam on batches of 100 examples, in order and cyclically. On a GPU a step is recorded once as a
    CUDA graph and replayed, and products are in TF32 (torch's default for convolutions).

    Args:
        start: the networks, on the device to train on; they stay as they are.
        images, labels: (N, channels, side, side) and (N,).
        schedule: the learning rate from a step on: (step, rate) pairs, the first for step 0.
        rows: the indices (M, N) of each network's examples, such as a bootstrap's; all by default.
    """
    first = [step for step, _ in schedule]
    if steps < 1 or first[:1] != [0] or first != sorted(set(first)):
        raise BadValueError(
            f"schedule: expected one step or more and rates from step 0 on, in their order, got "
            f"{steps} steps and {schedule}."
        )
    if rows is not None and rows.shape != (len(start), len(labels)):
        raise DataError(
            f"rows: expected ({len(start)}, {len(labels)}), a row of indices for each network, "
            f"got {tuple(rows.shape)}."
        )
    stacked, _ = stack_module_state(list(start))
    weights = {name: value.detach() for name, value in stacked.items()}
    device = next(iter(weights.values())).device
    images, labels = images.to(device), labels.to(device)
    rows = None if rows is None else rows.to(device)
    rate, cursor = torch.zeros((), device=device), torch.zeros((), dtype=torch.long, device=device)
    offsets = torch.arange(BATCH, device=device)
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {"weight_decay": L2, "fused": True, "capturable": on_gpu}
    adam = torch.optim.Adam(weights.values(), lr=rate, **options)

    def loss(own: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(start[0], own, (inputs,)), targets)

    shared = 0 if rows is not None else None
    gradients = vmap(grad(loss), in_dims=(0, shared, shared))

    def step() -> None:
        batch = (cursor + offsets) % len(labels)
        if rows is not None:
            batch = rows[:, batch]  # (M, 100)
        for name, gradient in gradients(weights, images[batch], labels[batch]).items():
            weights[name].grad = gradient
        adam.step()
        cursor.add_(BATCH).remainder_(len(labels))

    rates, take = dict(schedule), step
    title = "Training" if len(start) == 1 else f"Training {len(start)} networks"
    with (
        torch.cuda.device(device) if on_gpu else nullcontext(),
        float32_products(device, "tf32"),
        without_noise(),
        Progress(title, steps, "step", progress) as bar,
    ):
        for number in range(steps):
            if number in rates:
                rate.fill_(rates[number])
            if on_gpu and number == _WARM_UP:
                take = _recorded(step)
            take()
            if on_gpu and number % _AHEAD == 0:
                torch.cuda.synchronize()
            if not on_gpu or number % _AHEAD == 0:
                bar.show(number + 1)
    trained = deepcopy(list(start))
    for index, network in enumerate(trained):
        network.eval().load_state_dict({name: value[index] for name, value in weights.items()})
    return trained


def _recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step as a CUDA graph without taking it; return its replay."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def probabilities(network: PaperNetwork, images: Tensor) -> Tensor:
    """Return the class probabilities (n, C) of images (n, channels, side, side)."""
    return torch.cat([network(part).softmax(-1) for part in images.split(_AT_ONCE)])
