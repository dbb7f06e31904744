"""The architectures that people train, as small as they can be, in float64 and untrained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.architectures import Wired
from tests.networks import make_targets
from tests.oracles import Oracle
from tests.zoo_models import (
    TOKENS,
    Adapted,
    BasicBlock,
    Cubed,
    Einsum,
    Tied,
    attended,
    bagged,
    looked_up,
    masked,
    named_inputs,
    packed,
    states,
    steps,
    two_inputs,
    weight_norm_by_hand,
)

COUNT = 5  # examples; with three classes there are never as many rows as examples


@dataclass(frozen=True)
class Member:
    """A network, what goes into it, and which of its parameters count.

    Attributes:
        build: the network.
        inputs: of a number of examples.
        params: as for `deltabars.fit`.
        plain: another network with the same parameters in the same places, for the oracle.
        slow: the estimators that fall back, and warn.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    params: Any = None
    plain: Callable[[nn.Module], nn.Module] = lambda model: model
    slow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Specimen:
    """A member of the zoo with data, inputs to predict, and the oracle that knows the answers."""

    member: Member
    model: nn.Module
    data: Any
    unseen: Any
    oracle: Oracle = field(repr=False)


@cache
def specimen(kind: str, l2: float = 1.0) -> Specimen:
    member = ZOO[kind]
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = member.build().double()
    inputs, unseen = (member.inputs(count, generator) for count in (COUNT, 3))
    with torch.no_grad():
        call(model.train(), inputs)  # gives batch-norm its running statistics
    targets = make_targets("categorical", COUNT, generator)
    names = _names(model, member.params)
    oracle = Oracle(member.plain(model.eval()), inputs, targets, l2, names)
    if isinstance(inputs, dict):
        data: Any = {**inputs, "labels": targets}
    else:
        data = (*inputs, targets) if isinstance(inputs, tuple) else (inputs, targets)
    return Specimen(member, model, data, unseen, oracle)


def call(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _names(model: nn.Module, params: Any) -> list[str]:
    named = dict(model.named_parameters())
    if params is None:
        return list(named)
    if callable(params):
        return [name for name, value in named.items() if params(name, value)]
    return [name for name in named if any(part.strip("*") in name for part in params)]


def numbers(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda count, generator: torch.randn(
        count, *shape, generator=generator, dtype=torch.float64
    )


def tokens(length: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda count, generator: torch.randint(0, TOKENS, (count, length), generator=generator)


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def images(*layers: nn.Module, features: int) -> Callable[[], nn.Module]:
    return sequence(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


def wired(forward: Callable[..., Any], **layers: Callable[[], nn.Module]) -> Callable[[], Wired]:
    return lambda: Wired(forward, **{name: build() for name, build in layers.items()})


def head(size: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(size, 3)


def recurrent(kind: type, ways: int = 1, hidden: int = 3, **options: Any) -> Member:
    def last(net: nn.Module, x: Tensor) -> Tensor:
        return net.head(net.core(x)[0][:, -1])

    core = wired(
        last,
        core=lambda: kind(2, hidden, batch_first=True, bidirectional=ways == 2, **options),
        head=head(options.get("proj_size", hidden) * ways),
    )
    return Member(core, numbers(3, 2))


def _with_lengths(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return numbers(4, 2)(count, generator), torch.arange(count) % 4 + 1


def _bag_of(mode: str, padding: int | None = None) -> Member:
    def plain(model: nn.Module) -> nn.Module:
        """The bag by hand: torch has no second derivatives of its own one."""

        def forward(net: nn.Module, x: Tensor) -> Tensor:
            rows = F.embedding(x, net.table.weight)
            if mode == "max":
                return net.head(rows.max(1).values.tanh())
            kept = (x != padding).to(rows.dtype).unsqueeze(-1)
            total = (rows * kept).sum(1)
            return net.head((total / kept.sum(1) if mode == "mean" else total).tanh())

        return Wired(forward, table=model.table, head=model.head)

    table = lambda: nn.EmbeddingBag(TOKENS, 3, mode=mode, padding_idx=padding)  # noqa: E731
    return Member(wired(bagged, table=table, head=head(3)), tokens(5), plain=plain)


def pair(*shapes: tuple[int, ...]) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    return lambda count, generator: tuple(numbers(*shape)(count, generator) for shape in shapes)


ROWS = ("opg", "ggn")
ZOO: dict[str, Member] = {
    "LSTM": recurrent(nn.LSTM),
    "LSTM, two layers both ways": recurrent(nn.LSTM, 2, 2, num_layers=2, dropout=0.3, bias=False),
    "LSTM, projected": recurrent(nn.LSTM, proj_size=2),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN, num_layers=2, nonlinearity="relu"),
    "LSTM, states": Member(
        wired(states, core=lambda: nn.LSTM(2, 3), start=lambda: nn.Linear(2, 3), head=head(3)),
        numbers(4, 2),
    ),
    "GRU cells": Member(wired(steps, core=lambda: nn.GRUCell(2, 3), head=head(3)), numbers(3, 2)),
    "GRU, packed": Member(
        wired(packed, core=lambda: nn.GRU(2, 3, batch_first=True), head=head(3)),
        _with_lengths,
        slow=("opg", "ggn", "hessian"),
    ),
    "ResNet": Member(
        sequence(
            nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU(),
            BasicBlock(2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3),
        ),
        numbers(1, 6, 6),
    ),
    "transformer, masked": Member(
        wired(
            masked,
            core=lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 2, 4, batch_first=True, activation="gelu"), 1
            ),
            head=head(4),
        ),
        numbers(3, 4),
    ),
    "attention": Member(
        wired(attended, core=lambda: nn.MultiheadAttention(4, 2, batch_first=True), head=head(4)),
        numbers(3, 4),
    ),
    "instance norm": Member(
        images(
            nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
            features=8,
        ),
        numbers(1, 3, 3),
    ),
    "layer and RMS norm": Member(
        sequence(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.RMSNorm(5), nn.Linear(5, 3)),
        numbers(4),
    ),
    "embedding": Member(
        wired(looked_up, table=lambda: nn.Embedding(TOKENS, 4, padding_idx=0), head=head(4)),
        tokens(5),
    ),
    "embedding, sparse": Member(
        wired(looked_up, table=lambda: nn.Embedding(TOKENS, 3, sparse=True), head=head(3)),
        tokens(4),
        plain=lambda model: Wired(
            lambda net, x: net.head(F.embedding(x, net.table.weight).tanh().mean(1)),
            table=model.table, head=model.head,
        ),
    ),
    "bag, mean": _bag_of("mean", 0),
    "bag, max": _bag_of("max"),
    "tied weights": Member(Tied, tokens(5)),
    "PReLU": Member(sequence(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)), numbers(4)),
    "line": Member(images(nn.Conv1d(2, 3, 2), features=9), numbers(2, 4)),
    "einsum": Member(Einsum, numbers(3, 4)),
    "bilinear": Member(
        wired(two_inputs, core=lambda: nn.Bilinear(3, 2, 4), head=head(4)), pair((3,), (2,))
    ),
    "named inputs": Member(
        wired(named_inputs, a=lambda: nn.Linear(3, 4), b=lambda: nn.Linear(2, 4), head=head(4)),
        lambda count, generator: dict(
            zip(("left", "right"), pair((3,), (2,))(count, generator), strict=True)
        ),
    ),
    "weight norm": Member(
        sequence(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        numbers(4),
        plain=lambda model: Wired(weight_norm_by_hand, **dict(model.named_children())),
    ),
    "spectral norm": Member(
        sequence(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        numbers(4),
    ),
    "low-rank adapters": Member(
        lambda: nn.Sequential(Adapted(nn.Linear(4, 5)), nn.Tanh(), Adapted(nn.Linear(5, 3))),
        numbers(4),
        params=["*lora*"],
    ),
    "an operation of one's own": Member(
        wired(
            lambda net, x: net.head(Cubed.apply(net.line(net.core(x)[:, None])[:, 0])),
            core=lambda: nn.Linear(4, 5), line=lambda: nn.Conv1d(1, 1, 3), head=head(3),
        ),
        numbers(4),
        slow=("opg", "ggn", "hessian"),
    ),
}  # fmt: skip
