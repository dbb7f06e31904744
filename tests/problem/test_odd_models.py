"""Models that see their examples, or their values, in unusual ways: against plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from tests.architectures import L2, Wired

EXACT = {"rtol": 0, "atol": 1e-10}


def sorted_inside(net, x):
    order = x[:, 0].argsort()
    return net.b(net.a(x[order]).tanh())[order.argsort()]


def mean_of_a_part(net, x):
    kept = [row[row > 0].sum().expand(1) for row in net.a(x).tanh()]
    return net.b(torch.stack(kept) * x[:, :1].expand(-1, 1) + net.a(x).tanh())


def counts_its_examples(net, x):
    return net.b(net.a(x).tanh()) + int(x.shape[0] > 0) * x[:, :3]


def by_item(net, x):
    return net.b(net.a(x).tanh()) * float(net.scale)


def slice_assignment(net, x):
    hidden = net.a(x).tanh().clone()
    hidden[:, 0] = 0
    return net.b(hidden)


MODELS = [sorted_inside, mean_of_a_part, counts_its_examples, by_item, slice_assignment]


def build(wiring):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Wired(wiring, a=nn.Linear(4, 5), b=nn.Linear(5, 3))
        model.register_buffer("scale", torch.tensor(1.5))
        model.double()
        inputs = torch.randn(9, 4, dtype=torch.float64)
        inputs[:3] = inputs[:3][inputs[:3, 0].argsort()]  # in order, as far as a glance goes
        return model, (inputs, torch.randint(0, 3, (9,)))


def exact(problem, model, data):
    """G and H by plain autograd."""

    def losses(point):
        parts = problem.parameters.unflatten(point)
        outputs = torch.func.functional_call(model, parts, (data[0],))
        return nn.functional.cross_entropy(outputs, data[1], reduction="none")

    point = problem.network.point
    eye = torch.eye(len(point), dtype=point.dtype)
    rows = torch.autograd.functional.jacobian(losses, point)
    gram = rows.T @ rows / len(rows) + L2 * eye
    return gram, torch.autograd.functional.hessian(lambda at: losses(at).mean(), point) + L2 * eye


@pytest.mark.parametrize("wiring", MODELS, ids=lambda function: function.__name__)
def test_operators_equal_plain_autograd(wiring):
    model, data = build(wiring)
    problem = Problem(model, data, l2=L2, chunk_size=4)
    gram, curvature = exact(problem, model, data)
    torch.testing.assert_close(OPGOperator(problem).to_dense(), gram, **EXACT)
    torch.testing.assert_close(HessianOperator(problem).to_dense(), curvature, **EXACT)


def test_prelu_has_gradients_of_single_examples():
    model, data = build(lambda net, x: net.b(net.slope(net.a(x))))
    model.slope = nn.PReLU(5).double()
    problem = Problem(model, data, l2=L2)
    gram, _ = exact(problem, model, data)
    torch.testing.assert_close(OPGOperator(problem).to_dense(), gram, **EXACT)
