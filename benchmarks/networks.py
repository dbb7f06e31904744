"""The networks of `architectures`: how they are trained and called, and their images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import resnet
from benchmarks.context import Bench
from benchmarks.peers import find_peers
from benchmarks.plain import Data
from benchmarks.sizes import Network
from deltabars.recipes.images import read_cifar10

_VIT_L2 = 1e-4
_VIT_RATE = 1e-3
_CLASSES = 10
_NO_CIFAR10 = "ResNet-18 left out: needs --cifar10"


@dataclass(frozen=True, eq=False)
class Setting:
    """A network, how it is trained and called, and its images, on the device.

    Attributes:
        name: as the table has it.
        size: of its training and of its fit.
        train: trains the model in place.
        logits: those of images (B, …) by a model of this kind.
        inputs: images as `predict` takes them.
        examples: the same with their labels, as `fit` takes them.
    """

    name: str
    size: Network
    l2: float
    model: nn.Module
    data: Data
    test: Data
    train: Callable[[], object]
    logits: Callable[[nn.Module, Tensor], Tensor]
    inputs: Callable[[Tensor], Any]
    examples: Callable[[Tensor, Tensor], Any]


def resnet_setting(bench: Bench) -> Setting | str:
    """ResNet-18 on CIFAR-10; at the small size a narrow one, on other images if need be."""
    size, folder = bench.size.resnet, bench.sources.cifar10
    if folder is not None:
        parts = (("train", size.images), ("test", size.test_images))
        data, test = (read_cifar10(folder, part, count) for part, count in parts)
    elif bench.size.name == "gpu":
        return _NO_CIFAR10
    else:
        data, test = bench.subject.train(size.images), bench.subject.test(size.test_images)
    data, test = _on(bench.device, data), _on(bench.device, test)
    network = resnet.resnet(classes=_CLASSES, channels=data[0].shape[1], **size.shape)
    network = network.to(bench.device)
    return Setting(
        name="narrow ResNet" if size.shape else "ResNet-18",
        size=size,
        l2=resnet.L2,
        model=network,
        data=data,
        test=test,
        train=lambda: resnet.train(
            network,
            *data,
            epochs=size.epochs,
            closing=size.closing,
            batch_size=size.batch,
            progress=False,
        ),
        logits=lambda model, images: model(images),
        inputs=lambda images: images,
        examples=lambda images, labels: (images, labels),
    )


def vit_setting(bench: Bench) -> Setting | str:
    """Return a vision transformer of Hugging Face on the images of the other works."""
    peers = find_peers("transformers")
    if not peers.complete:
        return f"ViT left out: {peers.absent[0]}"
    size, subject = bench.size.vit, bench.subject
    transformers = peers.modules["transformers"]
    config = transformers.ViTConfig(
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=_CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **size.shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config).eval()
    model = model.to(bench.device)
    data, test = subject.train(size.images), subject.test(size.test_images)

    def logits(model: nn.Module, images: Tensor) -> Tensor:
        found: Tensor = model(pixel_values=images).logits
        return found

    return Setting(
        name="ViT",
        size=size,
        l2=_VIT_L2,
        model=model,
        data=data,
        test=test,
        train=lambda: _train_vit(model, logits, data, size),
        logits=logits,
        inputs=lambda images: {"pixel_values": images},
        examples=lambda images, labels: {"pixel_values": images, "labels": labels},
    )


def _train_vit(
    model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor], data: Data, size: Network
) -> None:
    """Adam with λ in the gradient, at a rate that falls to 0, without dropout."""
    images, labels = data
    optimiser = torch.optim.Adam(model.parameters(), lr=_VIT_RATE, weight_decay=_VIT_L2)
    steps = size.epochs * -(-len(labels) // size.batch)
    falling = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(size.epochs):
        order = torch.randperm(len(labels), generator=generator).to(labels.device)
        for chosen in order.split(size.batch):
            optimiser.zero_grad()
            found = logits(model, images[chosen])
            nn.functional.cross_entropy(found, labels[chosen]).backward()
            optimiser.step()
            falling.step()
    optimiser.zero_grad()


def _on(device: torch.device, data: Data) -> Data:
    return data[0].to(device), data[1].to(device)
