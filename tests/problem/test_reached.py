"""The parameters that the examples reach: which they are, and matrices that leave out the rest."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from deltabars import Problem
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from tests.architectures import L2, Wired
from tests.oracles import Oracle
from tests.silence import (
    PRECISION,
    check_products,
    checked,
    conv_net,
    labels,
    left_out,
    randn,
    seeded,
    silence,
)

OPERATORS = {"hessian": HessianOperator, "opg": OPGOperator, "ggn": GGNOperator}


def sizes_of(part, *shape):
    """The flat places of some rows and columns among parameters of a shape."""
    mask = torch.zeros(*shape, dtype=torch.bool)
    mask[part] = True
    return mask.flatten()


def by_hand():
    """What of `conv_net` counts: rows of live units, columns of live inputs."""
    rows, second, third = torch.tensor([1, 3]), torch.tensor([0, 2]), torch.tensor([0, 2, 3])
    features = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])  # channels 0 and 2, of 2·2 places each
    masks = [
        sizes_of(rows, 4, 4), sizes_of(rows, 4),
        sizes_of((second[:, None], rows), 3, 4, 4), sizes_of(second, 3),
        sizes_of((third[:, None], features), 6, 12), sizes_of(third, 6),
        sizes_of((slice(None), third), 3, 6), sizes_of(slice(None), 3),
    ]  # fmt: skip
    return torch.cat(masks).nonzero().squeeze(1)


@pytest.mark.parametrize("budget", [1, None])
@pytest.mark.parametrize("kind", list(OPERATORS))
def test_a_convolutional_network(kind, budget):
    model, inputs = seeded(conv_net), randn(12, 1, 7, 7)
    oracle = Oracle(model, inputs, labels(12), L2)
    problem = Problem(model, (inputs, labels(12)), l2=L2, memory_budget=budget, chunk_size=5)
    assert problem.reached.tolist() == by_hand().tolist()
    exact, operator = oracle.matrix(kind), OPERATORS[kind](problem)
    torch.testing.assert_close(operator.to_dense(), exact, **PRECISION)
    rows = randn(3, len(problem.reached))
    block = exact[problem.reached][:, problem.reached]
    torch.testing.assert_close(operator.reached_matmat(rows), rows @ block, **PRECISION)
    if kind == "hessian":
        return
    assert (operator.kept_bytes > 0) == (budget is None)
    whole = torch.cat(list(operator.row_blocks()))
    part = torch.cat(list(operator.reached_row_blocks()))
    assert whole.shape[1] == oracle.size
    torch.testing.assert_close(part, whole[:, problem.reached], **PRECISION)
    assert operator.kept_bytes in (0, part.nbytes)
    if kind == "opg":
        torch.testing.assert_close(whole, oracle.gradients(), **PRECISION)
    else:
        gram = whole.T @ whole / 12 + L2 * oracle.eye()
        torch.testing.assert_close(gram, exact, **PRECISION)


def nearly_silent():
    """Unit 1 is switched on by a fifth input of 50 alone."""
    model = nn.Sequential(silence(nn.Linear(5, 4), 1, 3), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[1, 4] = 10.0
        model[0].weight[3, 4] = 1.0
    return model


@cache
def switched_on():
    """A network, inputs of which the last alone switches unit 1 on, and the exact matrices."""
    model, inputs = seeded(nearly_silent), randn(71, 5)
    before = checked(model, inputs)
    assert left_out(before, "0.weight", [1, 3]) == [1, 3]
    inputs[-1, 4] = 50.0
    oracle = Oracle(model, inputs, labels(71), L2)
    return model, inputs, {kind: oracle.matrix(kind) for kind in ("opg", "hessian")}


@pytest.mark.parametrize("budget", [1, None])
@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 70, 1000])
def test_one_example_is_enough(chunk_size, loader, budget):
    """The last one of 71, of which the first 64 are what the model is tried out on."""
    model, inputs, exact = switched_on()
    data = inputs, labels(71)
    if loader:
        data = DataLoader(TensorDataset(*data), batch_size=4)
    problem = Problem(model, data, l2=L2, chunk_size=chunk_size, memory_budget=budget)
    assert left_out(problem, "0.weight", [1, 3]) == [3]
    rows = randn(2, problem.num_parameters)
    kinds = ("opg", "hessian") if chunk_size in (8, 1000) else ("opg",)  # a trace takes a while
    for kind in kinds:
        found = OPERATORS[kind](problem).matmat(rows)
        torch.testing.assert_close(found, rows @ exact[kind], **PRECISION)


@pytest.mark.parametrize("flatten", [False, True])
def test_pixels_that_are_always_zero(flatten):
    inputs = randn(7, 1, 3, 4)
    inputs[..., 0] = 0.0
    inputs[:, :, 2, 3] = 0.0
    dead = [0, 4, 8, 11]
    if not flatten:
        inputs = inputs.flatten(1)
    model = seeded(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))
    )
    problem = checked(model, inputs)
    expected = torch.ones(4, 12, dtype=torch.bool)
    expected[:, dead] = False
    rest = torch.ones(problem.num_parameters - 48, dtype=torch.bool)
    assert (
        problem.reached.tolist() == torch.cat([expected.flatten(), rest]).nonzero()[:, 0].tolist()
    )


def test_nothing_is_left_out_where_all_counts():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    problem = checked(model, randn(7, 4))
    assert problem.reached is None
    kept = OPGOperator(problem)
    kept.matmat(randn(1, 43))
    assert kept.kept_bytes == 7 * 43 * 8


def test_layers_all_of_whose_units_are_silent():
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.ReLU(), silence(nn.Linear(5, 4), 0, 1, 2, 3), nn.ReLU(),
            nn.Linear(4, 3),
        )
    )  # fmt: skip
    assert left_out(checked(model, randn(7, 4)), "2.weight", range(4)) == [1, 2, 3]  # one stays


def test_units_exactly_at_zero():
    """The derivative that torch gives a ReLU at zero is zero."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    with torch.no_grad():
        model[0].weight[1:3] = 0.0
        model[0].bias[1:3] = 0.0
    assert left_out(checked(model, randn(7, 4)), "0.weight", range(5)) == [1, 2]


def test_a_relu_at_the_end():
    model = seeded(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), silence(nn.Linear(5, 3), 1), nn.ReLU())
    )
    assert 1 in left_out(checked(model, randn(7, 4)), "2.weight", range(3))


@pytest.mark.parametrize("names", [["0.weight"], ["0.bias", "2.weight"], ["2.bias"]])
def test_subsets_of_the_parameters(names):
    model, inputs = seeded(nearly_silent), randn(7, 5)
    problem = Problem(model, (inputs, labels()), parameters=names, l2=L2)
    check_products(problem, Oracle(model, inputs, labels(), L2, names))
    assert (problem.reached is None) == (names == ["2.bias"])


def two_inputs(net, first, second):
    return net.head(torch.cat([net.a(first).relu(), net.b(second).relu()], 1))


@pytest.mark.parametrize("named", [False, True])
def test_several_inputs(named):
    model = seeded(
        lambda: Wired(
            two_inputs, a=silence(nn.Linear(4, 5), 0), b=silence(nn.Linear(3, 2), 1),
            head=nn.Linear(7, 3),
        )
    )  # fmt: skip
    inputs = randn(7, 7)
    inputs[:, 5] = 0.0
    parts = inputs.split([4, 3], dim=1)
    data = [(*parts, labels())]
    if named:
        data = [{"first": parts[0], "second": parts[1], "labels": labels()}]
    problem = Problem(model, data, l2=L2)
    whole = Wired(lambda net, x: net.inner(*x.split([4, 3], dim=1)), inner=model)
    check_products(problem, Oracle(whole, inputs, labels(), L2))
    assert left_out(problem, "a.weight", range(5)) == [0]
    assert left_out(problem, "b.weight", range(2)) == [1]
    columns = problem.reached - problem.parameters.slices["b.weight"].start
    assert 0 in columns
    assert 1 not in columns  # the input that is always zero


def means(net, x):
    return net.head(net.b(net.a(x.mean(2)).relu()).relu())


def swapped(net, x):
    first, second = (net.b, net.a) if x.shape[2] > 5 else (net.a, net.b)
    return net.head(second(first(x.mean(2)).relu()).relu())


def used_once_more(net, x):
    x, long = x.mean(2), x.shape[2] > 5
    out = net.b(net.a(x).relu()).relu()
    return net.head(out + x @ net.a.weight.T if long else out)


@pytest.mark.parametrize(
    ("forward", "expected"), [(means, [0, 1]), (swapped, []), (used_once_more, [])]
)
def test_batches_of_other_shapes(forward, expected):
    """Some of them may go another way through the network."""
    model = seeded(
        lambda: Wired(
            forward, a=silence(nn.Linear(4, 4), 0, 1), b=silence(nn.Linear(4, 4), 2),
            head=nn.Linear(4, 3),
        )
    )  # fmt: skip
    data = [(randn(4, 4, length, seed=length), labels(4)) for length in (3, 8)]
    problem = Problem(model, data, l2=L2)
    check_products(problem, *(Oracle(model, *batch, L2) for batch in data))
    assert left_out(problem, "a.weight", [0, 1]) == expected


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d])
def test_pictures_without_channels(pool):
    """To a pooling the examples are the channels then."""

    def forward(net, x):
        x = pool(x, 3) if pool is F.adaptive_avg_pool2d else pool(x, 2)
        return net.head(net.a(x.view(len(x), 9)).relu())

    model = seeded(lambda: Wired(forward, a=silence(nn.Linear(9, 5), 3), head=nn.Linear(5, 3)))
    assert left_out(checked(model, randn(7, 6, 6)), "a.weight", [3]) == [3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model():
    model = seeded(nearly_silent)
    problem = Problem(torch.compile(model, backend="eager"), (randn(7, 5), labels()), l2=L2)
    check_products(problem, Oracle(model, randn(7, 5), labels(), L2))
    assert left_out(problem, "0.weight", [1, 3]) == [1, 3]
