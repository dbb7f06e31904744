"""The networks that are the study's own: a CNN, a vision transformer, an MLP, a text classifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.true_bars.texts import WORDS


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a network whose initial weights are drawn from a seed; the caller's numbers stay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def cnn() -> nn.Module:
    """Two convolutions, two poolings, two dense layers for images of 28×28; P = 421,642."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def small_cnn() -> nn.Module:
    """Two convolutions of 8 and 16 channels, two dense layers; P = 6,218."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(16 * 3 * 3, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """Two hidden layers of 50 for ten inputs and one target; P = 3,151."""
    return nn.Sequential(
        nn.Linear(10, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, 1)
    )


class Encoder(nn.Module):
    """A layer of a transformer: attention and two dense layers, with layer norm before each."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dense1 = nn.Linear(width, inner)
        self.dense2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, width)."""
        x = x + self._attend(self.norm1(x))
        inner = functional.gelu(self.dense1(self.norm2(x)))
        return cast(Tensor, x + self.dense2(inner))

    def _attend(self, x: Tensor) -> Tensor:
        """Attend by plain products, which vmap supports."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for layer in (self.query, self.key, self.value)
        )  # (B, heads, T, width / heads)
        shares = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        return cast(Tensor, self.out((shares @ value).transpose(-3, -2).flatten(-2)))


class ViT(nn.Module):
    """A vision transformer for images of 28×28 in patches of 7×7.

    It has the sizes of the benchmarks' one: P = 805,130.
    """

    def __init__(
        self, width: int = 128, depth: int = 6, heads: int = 4, inner: int = 256, patch: int = 7
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embedding = nn.Linear(patch**2, width)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (28 // patch) ** 2, width))
        self.layers = nn.Sequential(*(Encoder(width, heads, inner) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 1, 28, 28) -> logits (B, 10)."""
        parts = images.squeeze(1).unflatten(1, (-1, self.patch)).unflatten(3, (-1, self.patch))
        patches = parts.transpose(2, 3).flatten(1, 2).flatten(2)  # (B, patches, pixels)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), self.embedding(patches)], 1)
        x = self.layers(tokens + self.positions)
        return cast(Tensor, self.head(self.norm(x[:, 0])))


class TextClassifier(nn.Module):
    """The mean of the words' embeddings, and two dense layers with dropout between them."""

    def __init__(self, classes: int = 8, width: int = 64, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + words, width, padding_idx=0)
        self.dense1 = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)
        self.dense2 = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T), 0 for padding -> logits (B, C)."""
        words = (tokens > 0).unsqueeze(-1)
        total = (self.embedding(tokens) * words).sum(1)
        mean = total / words.sum(1).clamp(min=1)
        return cast(Tensor, self.dense2(self.dropout(self.dense1(mean).relu())))


def cnn_by_products(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Compute the logits (R, B, 10) of R `cnn`s, each of its own images (R, B, 1, 28, 28)."""
    x = images.transpose(1, 2)
    for layer in ("0", "3"):
        x = convolve(functional.pad(x, (1, 1, 1, 1)), weights, layer)
        x = _halve(x).relu()
    x = dense(_flat(x), weights, "7").relu()
    return dense(x, weights, "9")


def paper_by_products(weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Compute the logits (R, B, 10) of R of the paper's networks, as `cnn_by_products`."""
    x = images.transpose(1, 2)
    for layer in ("conv1", "conv2"):
        x = _halve(convolve(x, weights, layer)).relu()
    x = convolve(x, weights, "conv3").relu()
    x = dense(_flat(x), weights, "fc1").relu()
    return dense(x, weights, "fc2")


def convolve(x: Tensor, weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """Convolve x (R, I, B, H, W) with R weights (R, O, I, k, k): one batched matrix product."""
    weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
    side = weight.shape[-1]
    windows = x.unfold(3, side, 1).unfold(4, side, 1)  # (R, I, B, H', W', k, k)
    columns = windows.permute(0, 1, 5, 6, 2, 3, 4).flatten(4).flatten(1, 3)
    y = torch.baddbmm(bias.unsqueeze(2), weight.flatten(2), columns)
    return y.unflatten(2, windows.shape[2:5])  # (R, O, B, H', W')


def dense(x: Tensor, weights: Mapping[str, Tensor], layer: str) -> Tensor:
    """Multiply x (R, B, I) by R weights (R, O, I)."""
    bias = weights[f"{layer}.bias"].unsqueeze(1)
    return torch.baddbmm(bias, x, weights[f"{layer}.weight"].mT)


def _halve(x: Tensor) -> Tensor:
    """Pool the maxima of 2×2 pixels; before a ReLU it is cheaper than behind it."""
    return functional.max_pool2d(x.flatten(0, 1), 2).unflatten(0, x.shape[:2])


def _flat(x: Tensor) -> Tensor:
    """(R, C, B, H, W) -> (R, B, C·H·W)."""
    return x.transpose(1, 2).flatten(2)
