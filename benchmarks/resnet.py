"""ResNet-18 for small images (CIFAR-10's 32×32), and a training whose cost is that of eval mode.

He, Zhang, Ren and Sun, Deep residual learning for image recognition (2016), in the variant that is
usual for CIFAR-10: a 3×3 stem of stride 1, no pooling behind it, 11,173,962 parameters.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltabars.errors import BadValueError
from deltabars.runtime.progress import Progress

L2 = 5e-4  # the weight decay that is usual for this network
_AT_ONCE = 512  # images, where nothing is learnt


class Block(nn.Module):
    """Two 3×3 convolutions with batch norm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H/stride, W/stride)."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of blocks, each of half the resolution of the one before, and a head.

    Args:
        classes: C.
        channels: of the input.
        width: channels of the first stage; 64 for ResNet-18.
        blocks: of each stage; two each for ResNet-18.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: int = 64,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                stages.append(Block(inputs, outputs, stride))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, H, W) -> logits (B, C)."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def resnet(seed: int = 0, **sizes: Any) -> ResNet:
    """Make a ResNet of `sizes` (see `ResNet`) with He's initial weights drawn from `seed`."""
    network = ResNet(**sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                fan = module.out_channels * math.prod(module.kernel_size)
                module.weight.normal_(0, math.sqrt(2 / fan), generator=generator)
            elif isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.zero_()
    return network


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        loss: the mean loss over the steps of the last epoch.
        accuracy: of the training examples in eval mode, at the end.
    """

    loss: float
    accuracy: float


def train(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    l2: float = L2,
    epochs: int = 30,
    closing: int = 5,
    batch_size: int = 128,
    rate: float = 0.1,
    seed: int = 0,
    progress: bool = True,
) -> Trained:
    """Train a network in place, to near an optimum of the cost that a fit takes curvatures of.

    SGD with momentum 0.9 and one rise and fall of the rate (a tenth of `rate`, `rate`, 0), with λ
    as weight decay of *all* parameters, norms and biases too, and no augmentation: the cost is
    mean loss + (λ/2)·‖ω‖² of these very images. The last `closing` epochs run in eval mode, so that
    batch norm has the statistics that it has at prediction: else the weights are near the optimum
    of another cost.

    Args:
        network: on the device to train on; left in eval mode.
        images: (N, channels, H, W), on any device; a GPU's own memory is the quickest.
        labels: (N,).
        l2: λ.
        epochs: in training mode.
        closing: epochs in eval mode, with a rate that falls from a tenth of `rate` to 0. An epoch
            after which the cost is above that before all of them is undone, and those after it
            have a tenth of its rate: without the statistics of batches nothing else keeps large
            steps in bounds.

    """
    if epochs < 0 or closing < 0 or not epochs + closing:
        raise BadValueError(
            f"epochs and closing: expected whole numbers from 0 on, not both 0, got {epochs!r} "
            f"and {closing!r}."
        )
    device = next(network.parameters()).device
    images, labels = images.to(device), labels.to(device)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, weight_decay=l2)
    loss, most, factor = math.nan, math.inf, 1.0
    with Progress("Training", epochs + closing, "epoch", progress) as bar:
        for epoch in range(epochs + closing):
            network.train(epoch < epochs)
            if epoch == epochs:
                optimiser.state.clear()  # momentum of another cost
                most = _cost(network, images, labels, l2)
            before = None if epoch < epochs else copy.deepcopy(network.state_dict())
            parts = torch.randperm(len(images), generator=generator).to(device).split(batch_size)
            total = torch.zeros((), device=device)
            for step, chosen in enumerate(parts):
                for group in optimiser.param_groups:
                    share = _rate(epoch + step / len(parts), epochs, closing)
                    group["lr"] = factor * rate * share
                optimiser.zero_grad(set_to_none=True)
                mean = F.cross_entropy(network(images[chosen]), labels[chosen])
                mean.backward()
                optimiser.step()
                total += mean.detach() * len(chosen)
            loss = float(total) / len(images)
            bar.show(epoch + 1, f"loss {loss:.4f}")
            if before is not None and not _cost(network, images, labels, l2) <= most:
                network.load_state_dict(before)
                optimiser.state.clear()
                factor /= 10
    optimiser.zero_grad(set_to_none=True)
    network.eval()
    return Trained(loss, accuracy(network, images, labels))


def _cost(network: nn.Module, images: Tensor, labels: Tensor, l2: float) -> float:
    """Return the cost of a network as it is."""
    with torch.no_grad():
        parts = zip(images.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True)
        total = sum(
            float(F.cross_entropy(network(part), truth, reduction="sum")) for part, truth in parts
        )
        squares = sum(float(weight.square().sum()) for weight in network.parameters())
    return total / len(images) + l2 / 2 * squares


def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that a network, in its mode, labels rightly."""
    device = next(network.parameters()).device
    right = 0
    with torch.no_grad():
        for part, truth in zip(images.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True):
            right += int((network(part.to(device)).argmax(1) == truth.to(device)).sum())
    return right / len(images)


def _rate(epoch: float, epochs: int, closing: int) -> float:
    """Return the rate at a moment of the training, in parts of the highest one."""
    if epoch >= epochs:
        return 0.1 * (1 - (epoch - epochs) / closing)
    rise = 0.2 * epochs
    if epoch < rise:
        return 0.1 + 0.9 * epoch / rise
    return (epochs - epoch) / (epochs - rise)
