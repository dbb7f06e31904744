"""Models that do with a batch what the first one did not show: against one example at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deltabars
from deltabars.curvature.opg import OPGOperator
from deltabars.curvature.pullback import Pullback, read_graph
from deltabars.errors import ModelError
from deltabars.problem.network import Network
from tests.curvature.test_layers import exact_rows, mixed, single
from tests.oracles import Oracle

EXACT = {"rtol": 0, "atol": 1e-12}  # float64, sums of some ten terms of O(1)
L2 = 0.05
REFUSED = "not to depend on the rest of its batch"


class Product(torch.autograd.Function):
    """x·wᵀ as in fused layers, out of torch's sight."""

    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, signal):
        x, w = ctx.saved_tensors
        return signal @ w, signal.transpose(-1, -2) @ x


class Mapped(Product):
    """The same, which vmap supports."""

    generate_vmap_rule = True


class AddBackward0(torch.autograd.Function):
    """The batch in reverse, under the name of an operation that keeps its order."""

    @staticmethod
    def forward(ctx, x):
        return x.flip(0)

    @staticmethod
    def backward(ctx, signal):
        return signal.flip(0)


class Net(nn.Module):
    def __init__(self, wiring):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.w, self.v = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(6))
        self.wiring = wiring

    def forward(self, x):
        return self.wiring(self, x)


def order(x):
    return x[:, 0].argsort(descending=True)


def sorted_in_the_middle(net, x):
    places = order(x)
    return net.c(net.b(net.a(x).tanh()[places]).tanh()[places.argsort()])


def by_product(net, x):
    places = torch.eye(len(x), dtype=x.dtype)[order(x)]
    return net.c(places.t() @ net.b(places @ net.a(x).tanh()).tanh())


def in_two_parts(net, x):
    hidden, k = net.a(x).tanh(), int((x[:, 0] > 0).sum())
    hidden = net.b(torch.cat([hidden[k:], hidden[:k]])).tanh()
    return net.c(torch.cat([hidden[-k:], hidden[:-k]]) if k else hidden)


def main(net, x):
    return net.c(net.b(net.a(x).tanh()))


def product_behind_a_gate(net, x):
    return main(net, x) + (x[:, :1] < 0) * Product.apply(x, net.w)


def routed(net, x):
    first, out = x[:, 0] > 0, x.new_zeros(len(x), 6)
    out[first], out[~first] = net.a(x[first]), F.linear(x[~first], net.b.weight[:, :4])
    return net.c(out.tanh())


TURN = AddBackward0.apply
WIRINGS = {
    function.__name__: function
    for function in (sorted_in_the_middle, by_product, in_two_parts, product_behind_a_gate, routed)
}
WIRINGS |= {
    "turned by its own": lambda net, x: net.c(TURN(net.b(TURN(net.a(x).tanh())).tanh())),
    # A table of as many rows as a batch may have.
    "prototypes": lambda net, x: net.c(
        net.b(net.a(x).tanh()) @ net.a(torch.eye(6, 4, dtype=x.dtype)).tanh().t()
    ),
    "twice": lambda net, x: F.linear(x, net.w) + (x[:, :1] < 0) * Mapped.apply(x, net.w),
    "by number": lambda net, x: (
        net.c(net.a(x)) if len(x) % 2 else net.a(x) @ net.c.weight.t() + net.c.bias
    ),
}


def named(function):
    return function.__name__


def built(wiring):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(wiring).double().eval()


def examples(count=24):
    """In the order that models here put them in; and as they come."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return found[order(found)], found


@pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")
@pytest.mark.parametrize("cotangents", [mixed, single], ids=named)
@pytest.mark.parametrize("wiring", list(WIRINGS))
def test_rows_are_those_of_single_examples_in_every_batch(wiring, cotangents):
    model, (in_order, as_they_come) = built(WIRINGS[wiring]), examples()
    names = list(dict(model.named_parameters()))
    pullback = Pullback(Network.capture(model))
    nearly = in_order[[1, 0, *range(2, 24)]]
    # What the first batches show is harmless: one example, some in order, and behind a closed gate.
    for inputs in (in_order[:1], in_order[:3], in_order, nearly, as_they_come[:2], as_they_come):
        with pullback.network.evaluation():
            found = pullback.rows(inputs, cotangents)
        torch.testing.assert_close(found, exact_rows(model, inputs, cotangents, names), **EXACT)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
@pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")
@pytest.mark.parametrize("wiring", [sorted_in_the_middle, product_behind_a_gate], ids=named)
def test_predictions_do_not_depend_on_what_came_before(wiring):
    model, (in_order, as_they_come) = built(wiring), examples()
    fit = deltabars.fit(
        model, (in_order, torch.arange(24) % 3), l2=L2, rank=20, batch_size=8, progress=False
    )
    one_by_one = torch.cat([fit.predict(as_they_come[n : n + 1]).std for n in range(24)])
    torch.testing.assert_close(fit.predict(as_they_come).std, one_by_one, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_predictions_that_depend_on_the_batch_are_refused():
    model, (_, inputs) = built(of_rare_examples), examples()
    fit = deltabars.fit(model, (inputs, torch.arange(24) % 3), l2=L2, rank=5, progress=False)
    with pytest.raises(ModelError, match=REFUSED):
        fit.predict(inputs + 5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_units_that_are_used_out_of_sight_are_not_left_out():
    def gate(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum(1, keepdim=True)

    scripted = torch.jit.script(gate)

    def seen_before_its_relu(net, x):
        hidden = net.a(x)
        return net.c(hidden.relu()) + (x[:, :1] < 0) * scripted(hidden) * x[:, 1:] / 100

    model = built(seen_before_its_relu)
    with torch.no_grad():
        model.a.bias[:3] = -20.0  # never on, so that only the gate lets something through
    inputs, _ = examples(100)
    inputs[:, 0] = inputs[:, 0].abs() * torch.where(torch.arange(100) < 70, 1.0, -1.0)
    targets = torch.arange(100) % 3
    operator = OPGOperator(deltabars.Problem(model, (inputs, targets), l2=L2))
    exact = Oracle(model, inputs, targets, L2).opg()
    torch.testing.assert_close(operator.to_dense(), exact, rtol=1e-12, atol=1e-12)


# Outputs that depend on the rest of the batch.


def capacity(net, x):
    """Half of the batch at most goes to the expert, those that come first."""
    places = (x[:, 0] > 0).cumsum(0)
    chosen = (x[:, 0] > 0) & (places <= max(1, len(x) // 3))
    return net.c(torch.where(chosen[:, None], net.b(net.a(x).tanh()), net.a(x)))


def of_rare_examples(net, x):
    return main(net, x - x.mean(0) if bool((x[:, 0] > 4).any()) else x)


DEPENDENT = {
    "GRU": lambda net, x: net.c(net.gru(x.unflatten(1, (2, 2)))[0][:, -1]),
    "attention": lambda net, x: net.c(net.attention(*[net.a(x)] * 3)[0]),
    "centred": lambda net, x: main(net, x - 1e-3 * x.mean(0)),
    "running sums": lambda net, x: main(net, x.cumsum(0)),
    "the one before": lambda net, x: main(net, x + 0.1 * x.roll(1, 0)),
    "the first": lambda net, x: main(net, x + 0.1 * x[:1]),
    "softmax": lambda net, x: net.c(net.a(x).softmax(0)),
    "scaled by the number": lambda net, x: main(net, x) * (1 + 1 / len(x)),
    "ranked": lambda net, x: main(net, x + x[:, :1].argsort(0).argsort(0) / len(x)),
    "norm": lambda net, x: net.c(F.layer_norm(net.a(x), (len(x), 6))),
    "capacity": capacity,
    "rare examples": of_rare_examples,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wiring", list(DEPENDENT))
def test_outputs_that_depend_on_the_batch_are_refused(wiring, dtype):
    model, (_, inputs) = built(DEPENDENT[wiring]), examples(100)
    model.gru, model.attention = nn.GRU(2, 6), nn.MultiheadAttention(6, 2)
    inputs[80, 0] = 5.0  # beyond the examples that the model is tried out on
    data = inputs.to(dtype), torch.arange(100) % 3
    with pytest.raises(ModelError, match=REFUSED):
        deltabars.Problem(model.to(dtype), data, l2=L2)


def in_half_precision(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = net.b(net.a(x).tanh()).tanh()
    return net.c(hidden.to(x.dtype))


@pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")  # of bfloat16 under vmap
@pytest.mark.parametrize(
    "wiring", [in_half_precision, lambda net, x: (main(net, x) * 1e3 + 1e4 - 1e4).sin()]
)
def test_rounding_is_no_dependence(wiring):
    model, (_, inputs) = built(wiring).float(), examples(100)
    problem = deltabars.Problem(model, (inputs.float(), torch.arange(100) % 3), l2=L2)
    assert OPGOperator(problem).matmat(torch.ones(1, problem.num_parameters)).isfinite().all()


@pytest.mark.parametrize(
    ("apart", "forward"),
    [
        (True, lambda x: F.max_pool2d(x.view(-1, 1, 2, 3), 2).flatten(1).softmax(-1)),
        (True, lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 2, 3)] * 3).flatten(1)),
        (True, lambda x: torch.cat([x[:, None].transpose(1, 2)[..., 0], x], 1).sum(1)[:, None]),
        (False, lambda x: x.softmax(0)),
        (False, lambda x: x - x.mean(0, keepdim=True)),
        (False, lambda x: F.batch_norm(x, None, None, training=True)),
        (False, lambda x: AddBackward0.apply(x)),
    ],
)  # fmt: skip
def test_graphs_that_keep_examples_apart(apart, forward):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hidden = x.tanh()
    assert read_graph(forward(hidden), {hidden.grad_fn}) == ({id(x)}, apart)
