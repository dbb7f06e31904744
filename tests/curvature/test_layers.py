"""Rows of derivatives through layers, against plain autograd of one example at a time.

In float64 both are sums of some hundred terms of O(1): 1e-12 is rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deltabars.curvature.pullback import Pullback
from deltabars.problem.data import map_leaves
from deltabars.problem.network import Network
from tests.architectures import ARCHITECTURES, Wired, cached_sample

PRECISION = {"rtol": 0, "atol": 1e-12}
IMAGE, LINE, WORDS = (2, 3, 4), (3, 4), (5,)


def mixed(outputs):
    """One row a class, and one more: R is not C."""
    rows = torch.eye(outputs.shape[1], dtype=outputs.dtype).expand(len(outputs), -1, -1)
    return torch.cat([rows, outputs.unsqueeze(1) * rows.sum(1, keepdim=True)], 1)


def single(outputs):
    return outputs.sin().unsqueeze(1)


def exact_rows(model, inputs, cotangents, names):
    """Rows (B, R, P): each example through the model on its own, each row by plain autograd."""
    weights = dict(model.requires_grad_(False).named_parameters())
    for name in names:
        weights[name].requires_grad_()
    chosen = [weights[name] for name in names]
    count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
    rows = []
    for n in range(count):
        example = map_leaves(lambda leaf, n=n: leaf[n : n + 1], inputs)
        outputs = model(**example) if isinstance(example, dict) else model(example)
        for back in cotangents(outputs.detach())[0]:
            parts = torch.autograd.grad(
                outputs[0], chosen, back, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows).unflatten(0, (count, -1))


def check(model, inputs, params=None, pullback=None) -> tuple[str, ...]:
    """Compare the rows of several kinds; return the names that were taken one by one."""
    model.eval()
    pullback = pullback or Pullback(Network.capture(model, params))
    for cotangents in (single, mixed):
        exact = exact_rows(model, inputs, cotangents, pullback.network.parameters.names)
        out = torch.full_like(exact, torch.nan)
        with pullback.network.evaluation():
            torch.testing.assert_close(pullback.rows(inputs, cotangents), exact, **PRECISION)
            assert pullback.rows(inputs, cotangents, out, again=True) is out
        torch.testing.assert_close(out, exact, **PRECISION)
    return list(pullback._rests.values())[-1]


def built(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double()


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


NOT_FOLLOWED = {
    "convolution in groups": ("2.weight", "2.bias"),
    "convolution, same": ("2.weight", "2.bias"),
    "convolution of a line": ("0.weight", "0.bias", "3.weight", "3.bias"),
}


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_every_kind_of_network(kind):
    sample = cached_sample(kind)
    one_by_one = check(sample.model, sample.inputs)
    assert kind == "transposed convolution" or one_by_one == NOT_FOLLOWED.get(kind, ())


# Norms, embeddings and terms that examples share.


def terms(net, x):
    """Parameters that all examples share, in every way that they are put to them."""
    x = torch.cat([net.token.expand(x.shape[0], -1, -1), x], 1)
    x = net.scale * (x + net.places).tanh() + net.shift
    return net.head(x.mul(net.scale).mean(1)) * net.temperature


def parameter(*shape):
    return lambda: nn.Parameter(torch.randn(shape))


def words(net, x):
    """Words with padding, and their positions, which all examples share."""
    positions = net.positions(torch.arange(x.shape[1])[None])
    return net.head(net.norm(net.words(x) + positions).tanh().mean(1))


def flat(*layers, features):
    return lambda: nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


def wired(forward, **layers):
    return lambda: Wired(forward, **{name: build() for name, build in layers.items()})


def trained_norm():
    """With statistics other than the initial ones."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))
    model(torch.randn(6, *IMAGE))
    return model


SHARED = {
    "layer norm": (flat(nn.LayerNorm(4), features=12), LINE),
    "layer norm of planes": (flat(nn.LayerNorm((3, 4)), features=24), IMAGE),
    "RMS norm": (flat(nn.RMSNorm(4), features=12), LINE),
    "batch norm": (trained_norm, IMAGE),
    "group norm": (flat(nn.GroupNorm(2, 2), features=24), IMAGE),
    "norm used twice": (
        wired(
            lambda net, x: net.head(net.norm(net.norm(x).sin()).mean(1)),
            norm=lambda: nn.LayerNorm(4), head=lambda: nn.Linear(4, 3),
        ),
        LINE,
    ),
    "terms": (
        wired(
            terms, token=parameter(1, 1, 4), places=parameter(1, 4, 4), scale=parameter(4),
            shift=parameter(4, 1), temperature=parameter(), unused=parameter(2),
            head=lambda: nn.Linear(4, 3),
        ),
        LINE,
    ),
    "words": (
        wired(
            words, words=lambda: nn.Embedding(6, 4, padding_idx=0),
            positions=lambda: nn.Embedding(5, 4), norm=lambda: nn.LayerNorm(4),
            head=lambda: nn.Linear(4, 3),
        ),
        WORDS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", list(SHARED))
def test_norms_embeddings_and_terms_are_followed(kind, count):
    build, shape = SHARED[kind]
    tokens = torch.randint(0, 6, (count, *WORDS), generator=torch.Generator().manual_seed(0))
    assert check(built(build), tokens if shape == WORDS else numbers(count, *shape)) == ()


# Unusual uses of layers.


def layers(**others):
    return {"a": nn.Linear(3, 4), "b": nn.Linear(4, 3), "c": nn.Linear(4, 3), **others}


def twice(net, x):
    return net.b(net.a(net.c(net.a(x).tanh())).tanh())


def tied_elsewhere(net, x):
    return net.b(F.linear(net.a(x).tanh(), net.a.weight.t() * 2).tanh()[:, :1] * net.a(x))


def keywords(net, x):
    x = F.linear(input=x, weight=net.a.weight, bias=net.a.bias).tanh()
    return F.linear(x, bias=net.b.bias, weight=net.b.weight)


def output_changed(net, x):
    y, z = net.a(x), net.a(2 * x)
    z[:, 0] *= 3.0
    return net.b(y.relu_() + z)


def without_gradient(net, x):
    with torch.no_grad():
        y = net.a(x).tanh()
    return net.b(y)


def shared_by_all(net, x):
    """A layer of what is no example's own."""
    return net.b((net.a(x) + F.linear(x.new_ones(1, 3), net.c.weight.t())).tanh())


def own_input(net, x):
    """A weight that is its own layer's input too."""
    return net.b((net.a(x) + F.linear(net.square, net.square).sum(0)).tanh())


def held_norm(net, x):
    return net.b(F.embedding(x[:, 0].abs().long(), net.square, max_norm=9.0) + net.a(x))


SPECIAL = {
    twice: (), tied_elsewhere: ("a.weight",), keywords: (), output_changed: (),
    without_gradient: None,  # zeros, either way
    shared_by_all: ("c.weight",), own_input: ("square",), held_norm: ("square",),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")  # of the norm that is held
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("forward", list(SPECIAL), ids=lambda function: function.__name__)
def test_unusual_uses_of_weights(forward, count):
    model = built(lambda: Wired(forward, **layers(square=nn.Parameter(torch.randn(4, 4)))))
    found = check(model, numbers(count, 3))
    assert SPECIAL[forward] is None or sorted(found) == sorted(SPECIAL[forward])


def test_an_input_that_is_changed_after_the_call():
    """Plain autograd has no derivative by the weight then, but one by the bias."""

    def forward(net, x):
        x = x * 1.0
        y = net.a(x)
        x.mul_(3.0).sub_(1.0)
        return net.b(y.tanh()) + x

    check(built(lambda: Wired(forward, **layers())), numbers(5, 3), ["a.bias"])


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "length first"])
def test_sequences(first, length):
    """Also where there are as many positions as examples, so that shapes do not tell."""

    def forward(net, x):
        x = x if first else x.transpose(0, 1)
        return net.b(net.a(x).tanh()).mean(1 if first else 0)

    model = built(lambda: Wired(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 3)))
    inputs = numbers(5, length, 3)
    for examples in (inputs, inputs[:3], inputs[:1]):
        rest = check(model, examples)
        assert rest == (() if first else ("a.weight", "a.bias", "b.weight", "b.bias"))


@pytest.mark.parametrize("names", [["a.bias"], ["a.weight"], ["b.*"], ["*.weight"]], ids="".join)
def test_parts_of_layers(names):
    assert check(built(lambda: Wired(twice, **layers())), numbers(5, 3), names) == ()


# What was found out on the first inputs must hold for others, or be found out again.


def by_example_and_position(net, x):
    """All positions of all examples as one batch: with one position it is that of the examples."""
    flat = net.a(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2])
    return net.b(flat.mean(1))


def sometimes_more(net, x):
    x = x.mean(1) if x.shape[1] > 2 else net.c(net.a(x.mean(1)))
    return net.b(net.a(x).tanh())


@pytest.mark.parametrize(
    ("forward", "first", "then"),
    [
        (shared_by_all, (1, 3), (5, 3)),
        (own_input, (4, 3), (1, 3)),
        (by_example_and_position, (4, 1, 3), (4, 6, 3)),
        (sometimes_more, (4, 2, 3), (4, 6, 3)),
        (sometimes_more, (4, 6, 3), (4, 2, 3)),
    ],
)
def test_other_inputs_after_the_first(forward, first, then):
    model = built(lambda: Wired(forward, **layers(square=nn.Parameter(torch.randn(4, 4)))))
    pullback = Pullback(Network.capture(model))
    for shape in (first, then, first):
        check(model, numbers(*shape), pullback=pullback)
