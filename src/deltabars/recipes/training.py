"""Many copies of the paper's network as one: the same layers, one batched product each.

A convolution is a product of 3×3 patches with a matrix, so that M networks with M sets of weights
take one `bmm` where M convolutions would be launched. Every operation is a copy, a product or
elementwise: nothing is summed in an order that changes from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltabars.errors import BadValueError, DataError
from deltabars.recipes.paper import BATCH, L2, PaperNetwork, Recipe, blank_network
from deltabars.runtime.precision import float32_products
from deltabars.runtime.progress import Progress

_KERNEL = 3
_ALIGNED = 4  # numbers: 16 bytes
_POOLED = (True, True, False)  # which of the convolutions a pooling follows
_PARTS = (1, 2, 4, 5, 10, 20, 25, 50, 100)  # that a sum over patches may be taken in
_ENOUGH = 128  # products at once
_PATCH_NUMBERS = 1 << 27  # of the largest layer's patches, in the predictions of one chunk


@dataclass(frozen=True)
class Stack:
    """M networks of one recipe.

    Attributes:
        recipe: of all of them.
        weights: one row a network, (M, P and some zeros): of each layer its matrix (inputs,
            outputs), then its biases. The inputs of a convolution are in the order (row, column,
            channel) of a patch. Matrices have rows of zeros up to a multiple of four, and so have
            rows of weights: tensor cores take nothing else.
    """

    recipe: Recipe
    weights: Tensor

    @classmethod
    def of(cls, recipe: Recipe, networks: Sequence[PaperNetwork]) -> Stack:
        """The networks side by side."""
        return cls(recipe, torch.stack([_flatten(network) for network in networks]))

    def __len__(self) -> int:
        return self.weights.shape[0]

    def network(self, place: int) -> PaperNetwork:
        """One of the networks, on the CPU."""
        network = blank_network(self.recipe).to(self.weights.dtype)
        parts = self.weights[place].detach().cpu().split(_sizes(self.recipe))
        with torch.no_grad():
            for layer, part, bias in zip(_layers(network), parts[::2], parts[1::2], strict=True):
                outputs = len(layer.weight)
                matrix = part.view(-1, outputs)[: layer.weight[0].numel()]
                layer.weight.copy_(_from_matrix(matrix, layer, network))
                _bias(layer).copy_(bias[:outputs])
        return network

    def logits(self, images: Tensor) -> Tensor:
        """The logits (M, B, 10) of images (M or 1, B, side, side, channels)."""
        count, batch = len(self), images.shape[1]
        parts = iter(self.weights.split(_sizes(self.recipe), dim=1))
        x = images.expand(count, -1, -1, -1, -1)
        for pooled in _POOLED:
            x = _convolve(x, next(parts), pooled)
            x = (x + next(parts)[:, None, None, None]).relu()
        x = x.reshape(count, batch, -1)
        x = _dense(x, next(parts), next(parts)).relu()
        return _dense(x, next(parts), next(parts))

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """The class probabilities (M, n, 10) of images (n, channels, side, side)."""
        largest = 9 * 32 * (self.recipe.side // 2) ** 2 * len(self)
        chunks = images.split(max(1, _PATCH_NUMBERS // largest))
        parts = [self.logits(channels_last(chunk)[None]).softmax(-1) for chunk in chunks]
        return torch.cat(parts, dim=1)


def channels_last(images: Tensor) -> Tensor:
    """Images (n, channels, side, side) as (n, side, side, channels)."""
    return images.permute(0, 2, 3, 1).contiguous()


def _layers(network: PaperNetwork) -> list[nn.Conv2d | nn.Linear]:
    return cast(list[nn.Conv2d | nn.Linear], list(network.children()))


def _bias(layer: nn.Conv2d | nn.Linear) -> Tensor:
    assert layer.bias is not None
    return layer.bias


@cache
def _sizes(recipe: Recipe) -> list[int]:
    """The numbers of each layer's matrix and biases in a row of weights, padding included."""
    layers = _layers(blank_network(recipe))
    shapes = [(layer.weight[0].numel(), len(layer.weight)) for layer in layers]
    sizes = [(_padded(inputs) * outputs, _padded(outputs)) for inputs, outputs in shapes]
    return [size for pair in sizes for size in pair]


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _flatten(network: PaperNetwork) -> Tensor:
    parts = []
    for layer in _layers(network):
        matrix = _to_matrix(layer.weight.detach(), layer, network)
        inputs, outputs = matrix.shape
        rows = matrix.new_zeros(_padded(inputs), outputs)
        rows[:inputs] = matrix
        biases = matrix.new_zeros(_padded(outputs))
        biases[:outputs] = _bias(layer).detach()
        parts += [rows.flatten(), biases]
    return torch.cat(parts)


def _to_matrix(weight: Tensor, layer: nn.Module, network: PaperNetwork) -> Tensor:
    """(outputs, channels, …) as (pixels·channels, outputs)."""
    pixels = _pixels(layer, network)
    return weight.reshape(len(weight), -1, pixels).permute(2, 1, 0).reshape(-1, len(weight))


def _from_matrix(matrix: Tensor, layer: nn.Conv2d | nn.Linear, network: PaperNetwork) -> Tensor:
    pixels = _pixels(layer, network)
    parts = matrix.view(pixels, -1, matrix.shape[1]).permute(2, 1, 0)
    return parts.reshape(layer.weight.shape)


def _pixels(layer: nn.Module, network: PaperNetwork) -> int:
    """Of how many pixels the inputs of a layer are the channels."""
    if isinstance(layer, nn.Conv2d):
        return _KERNEL**2
    return network.fc1.in_features // network.conv3.out_channels if layer is network.fc1 else 1


def _dense(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    matrix = weights.view(len(weights), x.shape[-1], -1)
    return torch.baddbmm(biases[:, None, : matrix.shape[-1]], x, matrix)


def _convolve(x: Tensor, weights: Tensor, pooled: bool) -> Tensor:
    """A 3×3 convolution of x (M, B, h, w, C), and the pooling after it; biases come later.

    A pooling of 2 drops the last row and column of an odd size: they are not computed.
    """
    count, batch, side = x.shape[:3]
    outputs = side - (_KERNEL - 1)
    if pooled:
        outputs -= outputs % 2
    patches = _PATCHES(x, outputs)  # (M, B·outputs², 9·C and some zeros)
    matrix = weights.view(count, patches.shape[-1], -1)
    result = _PRODUCT(patches, matrix).view(count, batch, outputs, outputs, -1)
    return _POOL(result) if pooled else result


class _Patches(torch.autograd.Function):
    """The 3×3 patches of images (M, B, h, w, C) as rows (M, B·outputs², 9·C and some zeros)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outputs: int) -> Tensor:
        ctx.shape, ctx.outputs = x.shape, outputs
        windows = x.unfold(2, _KERNEL, 1).unfold(3, _KERNEL, 1)[:, :, :outputs, :outputs]
        rows = windows.permute(0, 1, 2, 3, 5, 6, 4)  # (M, B, i, j, row, column, C)
        size = _KERNEL**2 * x.shape[-1]
        if size % _ALIGNED == 0:
            return rows.reshape(x.shape[0], -1, size)
        result = x.new_zeros(*rows.shape[:4], _padded(size))
        result[..., :size].view_as(rows).copy_(rows)
        return result.flatten(1, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        n = ctx.outputs
        gradient = gradients[0][..., : _KERNEL**2 * ctx.shape[-1]]
        parts = gradient.view(*ctx.shape[:2], n, n, _KERNEL, _KERNEL, ctx.shape[-1])
        result = parts.new_zeros(ctx.shape)
        for row in range(_KERNEL):
            for column in range(_KERNEL):
                result[:, :, row : row + n, column : column + n] += parts[:, :, :, :, row, column]
        return result, None


class _Product(torch.autograd.Function):
    """Patches (M, R, inputs) times matrices (M, inputs, outputs).

    The gradient of a matrix is a sum over all R patches with a small result: for a few matrices it
    is summed in parts, for a GPU to have enough to do at once. (For a single one, as it is.)
    """

    @staticmethod
    def forward(ctx: Any, patches: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(patches, matrix)
        return torch.bmm(patches, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        patches, matrix = ctx.saved_tensors
        gradient, (count, rows) = gradients[0], patches.shape[:2]
        parts = next((n for n in _PARTS if n * count >= _ENOUGH and rows % n == 0), 1)
        left = patches.reshape(count * parts, rows // parts, -1)
        right = gradient.reshape(count * parts, rows // parts, -1)
        of_matrix = torch.bmm(left.mT, right).view(count, parts, *matrix.shape[1:]).sum(1)
        of_patches = torch.bmm(gradient, matrix.mT) if ctx.needs_input_grad[0] else None
        return of_patches, of_matrix


class _Pool(torch.autograd.Function):
    """The largest of each 2×2 of images (M, B, h, w, C); of equals the first, as max_pool2d."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = x.unflatten(3, (-1, 2)).unbind(4)
        rows = torch.maximum(left, right)  # (M, B, h, w/2, C)
        top, bottom = rows.unflatten(2, (-1, 2)).unbind(3)
        ctx.save_for_backward(right > left, bottom > top)
        return torch.maximum(top, bottom)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        takes_right, takes_bottom = ctx.saved_tensors
        rows = _deal(gradients[0], takes_bottom, 3).flatten(2, 3)
        return _deal(rows, takes_right, 4).flatten(3, 4)


def _deal(gradient: Tensor, takes_second: Tensor, dim: int) -> Tensor:
    """Each gradient to the one of two that was taken, and zero to the other, along a new dim."""
    result = gradient.new_empty(*gradient.shape[:dim], 2, *gradient.shape[dim:])
    first, second = result.unbind(dim)
    torch.mul(gradient, takes_second, out=second)
    torch.sub(gradient, second, out=first)
    return result


_PATCHES: Callable[[Tensor, int], Tensor] = _Patches.apply
_PRODUCT: Callable[[Tensor, Tensor], Tensor] = _Product.apply
_POOL: Callable[[Tensor], Tensor] = _Pool.apply


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
