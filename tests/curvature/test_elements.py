"""Norms, embeddings and shared terms: reached for all examples at once, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.architectures import Wired
from tests.curvature.test_layers import built, check, numbers

IMAGE, LINE, WORDS = (2, 3, 4), (3, 4), (5,)


def head(size):
    return nn.Linear(size, 3)


class Terms(nn.Module):
    """Parameters that all examples share, in every way that they are put to them."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.places = nn.Parameter(torch.randn(1, 4, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(4, 1))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(2))
        self.head = head(4)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = self.scale * (x + self.places).tanh() + self.shift
        return self.head(x.mul(self.scale).mean(1)) * self.temperature


class Places(nn.Module):
    """Words, their places, which all examples share, and a start that is the same for all."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(6, 4, padding_idx=0), nn.Embedding(5, 4)
        self.norm, self.head = nn.LayerNorm(4), head(4)

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1])[None])
        return self.head(self.norm(self.words(x) + places).tanh().mean(1))


def flat(*layers, features):
    return lambda: nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), head(features))


def trained_norm():
    """With statistics other than the initial ones."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), head(24))
    with torch.no_grad():
        model(torch.randn(6, *IMAGE))
    return model


MODELS = {
    "layer norm": (flat(nn.LayerNorm(4), features=12), LINE),
    "layer norm of planes": (flat(nn.LayerNorm((3, 4)), features=24), IMAGE),
    "layer norm without bias": (flat(nn.LayerNorm(4, bias=False), features=12), LINE),
    "RMS norm": (flat(nn.RMSNorm(4), features=12), LINE),
    "batch norm": (trained_norm, IMAGE),
    "batch norm of a line": (flat(nn.BatchNorm1d(3), features=12), LINE),
    "group norm": (flat(nn.GroupNorm(2, 2), features=24), IMAGE),
    "norm used twice": (
        lambda: Wired(
            lambda net, x: net.head(net.norm(net.norm(x).sin()).mean(1)),
            norm=nn.LayerNorm(4), head=head(4),
        ),
        LINE,
    ),
    "terms": (Terms, LINE),
    "places": (Places, WORDS),
}  # fmt: skip


def examples(shape, count):
    if shape == WORDS:
        return torch.randint(0, 6, (count, 5), generator=torch.Generator().manual_seed(0))
    return numbers(count, *shape)


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("kind", list(MODELS))
def test_all_examples_at_once(kind, count):
    build, shape = MODELS[kind]
    assert check(built(build), examples(shape, count)) == ()


def test_a_table_with_a_held_norm_goes_one_by_one():
    model = built(
        lambda: Wired(
            lambda net, x: net.head(F.embedding(x, net.table.weight, max_norm=9.0).mean(1)),
            table=nn.Embedding(6, 4), head=head(4),
        )
    )  # fmt: skip
    with pytest.warns(UserWarning, match="example by example"):
        assert check(model, examples(WORDS, 4)) == ("table.weight",)
