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
from torch.nn.utils.rnn import pack_padded_sequence

from tests.architectures import Wired
from tests.networks import make_targets
from tests.oracles import Oracle

COUNT = 5  # examples; with three classes there are never as many rows as examples
TOKENS = 6


@dataclass(frozen=True)
class Member:
    """A network, what goes into it, and which of its parameters count."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]  # of a number of examples
    params: Any = None
    # Another network with the same parameters in the same places, for the oracle.
    plain: Callable[[nn.Module], nn.Module] = lambda model: model
    slow: tuple[str, ...] = ()  # the estimators that fall back, and warn


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
        model.train()(
            *(inputs if isinstance(inputs, tuple) else (inputs,))
        )  # gives batch-norm its running statistics
    targets = make_targets("categorical", COUNT, generator)
    names = [n for n, _ in model.named_parameters() if member.params is None or "lora" in n]
    oracle = Oracle(member.plain(model.eval()), inputs, targets, l2, names)
    data = (*inputs, targets) if isinstance(inputs, tuple) else (inputs, targets)
    return Specimen(member, model, data, unseen, oracle)


def numbers(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda count, generator: torch.randn(
        count, *shape, generator=generator, dtype=torch.float64
    )


def tokens(length: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda count, generator: torch.randint(0, TOKENS, (count, length), generator=generator)


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def wired(forward: Callable[..., Any], **layers: Callable[[], nn.Module]) -> Callable[[], Wired]:
    return lambda: Wired(forward, **{name: build() for name, build in layers.items()})


def head(size: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(size, 3)


def recurrent(kind: type, ways: int = 1, hidden: int = 3, **options: Any) -> Member:
    core = wired(
        lambda net, x: net.head(net.core(x)[0][:, -1]),
        core=lambda: kind(2, hidden, batch_first=True, bidirectional=ways == 2, **options),
        head=head(options.get("proj_size", hidden) * ways),
    )
    return Member(core, numbers(3, 2))


def _with_lengths(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return numbers(4, 2)(count, generator), torch.arange(count) % 4 + 1


def _bag() -> Member:
    def plain(model: nn.Module) -> nn.Module:
        """The bag by hand: torch has no second derivatives of its own one."""

        def forward(net: nn.Module, x: Tensor) -> Tensor:
            kept = (x != 0).to(net.table.weight.dtype).unsqueeze(-1)
            rows = F.embedding(x, net.table.weight) * kept
            return net.head((rows.sum(1) / kept.sum(1)).tanh())

        return Wired(forward, table=model.table, head=model.head)

    table = lambda: nn.EmbeddingBag(TOKENS, 3, mode="mean", padding_idx=0)  # noqa: E731
    bagged = wired(lambda net, x: net.head(net.table(x).tanh()), table=table, head=head(3))
    return Member(bagged, tokens(5), plain=plain)


def pair(*shapes: tuple[int, ...]) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    return lambda count, generator: tuple(numbers(*shape)(count, generator) for shape in shapes)


def steps(net: nn.Module, x: Tensor) -> Tensor:
    h = None
    for step in x.unbind(1):
        h = net.core(step, h)
    return net.head(h)


def packed(net: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return net.head(net.core(packed)[1][-1])


def block(net: nn.Module, x: Tensor) -> Tensor:
    x = net.stem(x).relu_()
    out = net.norm2(net.conv2(F.relu(net.norm1(net.conv1(x)), inplace=True)))
    out += net.shortcut(x)
    return net.head(F.relu(out, inplace=True).mean((2, 3)))


def masked(net: nn.Module, x: Tensor) -> Tensor:
    padding = torch.zeros_like(x[..., 0], dtype=torch.bool)
    padding[:, -1] = x[:, -1, 0] > 0
    return net.head(net.core(x, src_key_padding_mask=padding)[:, 0])


def weight_norm_by_hand(net: nn.Module, x: Tensor) -> Tensor:
    """Weight norm as a formula: torch's second derivatives of it are wrong (in 2.13)."""
    first, last = (dict(net.named_children())[name] for name in ("0", "2"))
    length, direction = first.parametrizations.weight.parameters()
    weight = direction * length / direction.square().sum(1, keepdim=True).sqrt()
    return last(F.linear(x, weight, first.bias).tanh())


class Adapted(nn.Module):
    """A frozen dense layer and a low-rank addition to it."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.randn(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + 0.5 * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Cubed(torch.autograd.Function):
    """An operation that knows neither vmap nor forward derivatives."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, signal):
        return 3 * ctx.saved_tensors[0] ** 2 * signal


ZOO: dict[str, Member] = {
    "LSTM": recurrent(nn.LSTM),
    "LSTM, two layers both ways": recurrent(nn.LSTM, 2, 2, num_layers=2, dropout=0.3, bias=False),
    "LSTM, projected": recurrent(nn.LSTM, proj_size=2),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN, num_layers=2, nonlinearity="relu"),
    "GRU cells": Member(wired(steps, core=lambda: nn.GRUCell(2, 3), head=head(3)), numbers(3, 2)),
    "GRU, packed": Member(
        wired(packed, core=lambda: nn.GRU(2, 3, batch_first=True), head=head(3)),
        _with_lengths,
        slow=("opg", "ggn", "hessian"),
    ),
    "ResNet": Member(
        wired(
            block,
            stem=sequence(nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)),
            conv1=lambda: nn.Conv2d(2, 3, 3, 2, 1, bias=False), norm1=lambda: nn.BatchNorm2d(3),
            conv2=lambda: nn.Conv2d(3, 3, 3, 1, 1, bias=False), norm2=lambda: nn.BatchNorm2d(3),
            shortcut=sequence(nn.Conv2d(2, 3, 1, 2, bias=False), nn.BatchNorm2d(3)), head=head(3),
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
        wired(
            lambda net, x: net.head(net.core(x, x, x, need_weights=False)[0].mean(1)),
            core=lambda: nn.MultiheadAttention(4, 2, batch_first=True), head=head(4),
        ),
        numbers(3, 4),
    ),
    "layer and RMS norm": Member(
        sequence(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.RMSNorm(5), nn.Linear(5, 3)),
        numbers(4),
    ),
    "embedding": Member(
        wired(
            lambda net, x: net.head(net.table(x).tanh().mean(1)),
            table=lambda: nn.Embedding(TOKENS, 4, padding_idx=0), head=head(4),
        ),
        tokens(5),
    ),
    "bag": _bag(),
    "tied weights": Member(  # scores every token with its own embedding
        wired(
            lambda net, x: F.linear(net.core(net.table(x).mean(1)).tanh(), net.table.weight)[:, :3],
            table=lambda: nn.Embedding(TOKENS, 4), core=lambda: nn.Linear(4, 4),
        ),
        tokens(5),
    ),
    "PReLU": Member(sequence(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)), numbers(4)),
    "line": Member(
        sequence(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)), numbers(2, 4)
    ),
    "einsum": Member(
        wired(
            lambda net, x: (
                net.scale * torch.einsum("btd,hde->bhte", x, net.queries).tanh().mean((1, 2))
                @ net.mix[0]
            ),
            queries=lambda: nn.Parameter(torch.randn(2, 4, 3)),
            mix=lambda: nn.ParameterList([torch.randn(3, 3)]),
            scale=lambda: nn.Parameter(torch.tensor(0.7)),
        ),
        numbers(3, 4),
    ),
    "bilinear": Member(
        wired(
            lambda net, x, y: net.head(net.core(x, y).tanh()),
            core=lambda: nn.Bilinear(3, 2, 4), head=head(4),
        ),
        pair((3,), (2,)),
    ),
    "weight norm": Member(
        sequence(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        numbers(4),
        plain=lambda model: Wired(weight_norm_by_hand, **dict(model.named_children())),
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
