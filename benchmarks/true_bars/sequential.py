"""Training of a residual network with batch norm on one sample after the other.

SGD with Nesterov's momentum, a rate that rises and falls, random crops and flips. All of it is on
the device; on a GPU products are in bfloat16, and a step is recorded once as a CUDA graph, which
every network replays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.true_bars.stacked import Say, State, recorded

_WARM_UP = 5  # steps before a graph is recorded
_MOMENTUM = 0.9
_PADDING = 4
_AHEAD = 200  # steps launched before the GPU is waited for


@dataclass(frozen=True)
class SgdPlan:
    """How a network is trained: λ as weight decay of all parameters, batches of a fixed size."""

    epochs: float = 15
    batch: int = 256
    peak: float = 0.2  # of the rate
    rise: float = 0.2  # the share of the training until the peak
    decay: float = 5e-4

    def scaled(self, scale: float) -> SgdPlan:
        """Return a plan of as many epochs, times a factor."""
        return replace(self, epochs=self.epochs * scale)

    def rate(self, share: float) -> float:
        """Return the learning rate at a share of the training."""
        if share < self.rise:
            return self.peak * (0.05 + 0.95 * share / self.rise)
        return self.peak * (1 - share) / (1 - self.rise)


def train_one_by_one(
    networks: Sequence[nn.Module],
    examples: tuple[Tensor, Tensor],
    samples: Sequence[Tensor],
    plan: SgdPlan,
    *,
    device: torch.device,
    orders: Sequence[int],
    keep: Callable[[int, State], object] = lambda number, state: None,
    say: Say = lambda line: None,
) -> list[State]:
    """Train networks with their batch norms; return their states on the CPU, in float32.

    Args:
        networks: with their initial weights; they stay as they are.
        examples: images (N, channels, side, side) and labels (N,).
        samples: the indices (N,) of each network's examples.
        orders: the seed of each network's order of batches, crops and flips.
        keep: called with the number and the state of every network as soon as it is trained.
        say: called with lines on how far it is.
    """
    with _quick_convolutions():
        training = _Training(networks[0], *examples, plan, device)
        states = []
        for number, (network, sample, order) in enumerate(
            zip(networks, samples, orders, strict=True)
        ):
            states.append(training.run(network, sample, order, say))
            keep(number, states[-1])
            say(f"network {number + 1} of {len(networks)}")
    return states


class _Training:
    """A network on the device, the buffers of its training at fixed addresses, and its steps."""

    def __init__(
        self,
        network: nn.Module,
        images: Tensor,
        labels: Tensor,
        plan: SgdPlan,
        device: torch.device,
    ) -> None:
        self.plan, self.device = plan, device
        self.network = copy.deepcopy(network).to(device, memory_format=torch.channels_last).train()
        self.parameters = list(self.network.parameters())
        self.momenta = [torch.zeros_like(value) for value in self.parameters]
        self.side = images.shape[-1]
        padded = functional.pad(images.to(device), (_PADDING,) * 4)
        self.images = padded.permute(0, 2, 3, 1).contiguous()  # (N, side + 8, side + 8, channels)
        self.labels = labels.to(device)
        count = len(labels)
        self.per_epoch = count // plan.batch
        self.steps = max(1, round(plan.epochs * self.per_epoch))
        rates = [plan.rate(step / self.steps) for step in range(self.steps)]
        self.rates = torch.tensor(rates, device=device)
        self.done = torch.zeros(1, dtype=torch.long, device=device)  # steps
        self.cursor = torch.zeros((), dtype=torch.long, device=device)  # in the queue
        self.offsets = torch.arange(plan.batch, device=device)
        self.pixels = torch.arange(self.side, device=device)
        # The examples in the order of the epoch, each with its crop and flip: (N, 4).
        self.queue = torch.zeros(count, 4, dtype=torch.long, device=device)
        self.take: Callable[[], object] | None = None

    def run(self, network: nn.Module, sample: Tensor, order: int, say: Say) -> State:
        """Train from the weights of a network on a sample; return the state on the CPU."""
        with torch.no_grad():
            self.network.load_state_dict(network.state_dict())
            for momentum in self.momenta:
                momentum.zero_()
        self.done.zero_()
        generator = torch.Generator().manual_seed(order)
        sample = sample.to(self.device)
        for number in range(self.steps):
            if number % self.per_epoch == 0:
                self._refill(sample, generator)
            if self.take is None and self.device.type == "cuda" and number == _WARM_UP:
                self.take = recorded(self._step, say)
            (self.take or self._step)()
            if self.device.type == "cuda" and number % _AHEAD == 0:
                torch.cuda.synchronize()
        return {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in self.network.state_dict().items()
        }

    def _refill(self, sample: Tensor, generator: torch.Generator) -> None:
        """Draw the order of an epoch, its crops and its flips: the same for every sample."""
        count = len(sample)
        order = torch.randperm(count, generator=generator)
        corners = torch.randint(0, 2 * _PADDING + 1, (count, 2), generator=generator)
        flips = torch.randint(0, 2, (count, 1), generator=generator)
        drawn = torch.cat([order[:, None], corners, flips], 1).to(self.device)
        self.queue.copy_(torch.cat([sample[drawn[:, :1]], drawn[:, 1:]], 1))
        self.cursor.zero_()

    def _step(self) -> None:
        """Take a step; nothing in it waits for the GPU or depends on values."""
        images, labels = self._next()
        is_gpu = self.device.type == "cuda"
        with (
            torch.enable_grad(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=is_gpu, cache_enabled=False),
        ):
            loss = functional.cross_entropy(self.network(images).float(), labels)
        gradients = list(torch.autograd.grad(loss, self.parameters))
        with torch.no_grad():
            self._update(gradients)
        self.done.add_(1).clamp_(max=self.steps - 1)
        self.cursor.add_(self.plan.batch)

    def _update(self, gradients: list[Tensor]) -> None:
        """Step as torch's SGD does with Nesterov's momentum, with a rate on the device."""
        torch._foreach_add_(gradients, self.parameters, alpha=self.plan.decay)
        torch._foreach_mul_(self.momenta, _MOMENTUM)
        torch._foreach_add_(self.momenta, gradients)
        torch._foreach_add_(gradients, self.momenta, alpha=_MOMENTUM)
        rate = self.rates.index_select(0, self.done).squeeze(0)
        torch._foreach_mul_(gradients, rate)
        torch._foreach_sub_(self.parameters, gradients)

    def _next(self) -> tuple[Tensor, Tensor]:
        """Return the next images, cropped and flipped, channels last in memory, and labels."""
        number, top, left, flip = self.queue.index_select(0, self.cursor + self.offsets).unbind(1)
        rows = top[:, None] + self.pixels  # (B, side)
        columns = torch.where(flip[:, None] > 0, self.side - 1 - self.pixels, self.pixels)
        columns = left[:, None] + columns
        images = self.images[number[:, None, None], rows[:, :, None], columns[:, None, :]]
        return images.permute(0, 3, 1, 2), self.labels[number]


@contextmanager
def _quick_convolutions() -> Iterator[None]:
    """Let cuDNN choose the fastest convolutions by trial."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
