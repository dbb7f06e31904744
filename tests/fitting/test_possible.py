"""What plain torch can do works here too, and what cannot be is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.errors import DeltaBarsError, ModelError
from tests.architectures import L2, Wired
from tests.problem.test_odd_models import exact
from tests.problem.test_private import DATA, INPUTS, fit

EXACT = {"rtol": 0, "atol": 1e-9}


def complex_weights(net, x):
    return net.c(net.b(torch.fft.irfft(torch.fft.rfft(net.a(x)) * torch.view_as_complex(net.w))))


def gradient_inside(net, x):
    def energy(row):
        return net.b(net.a(row).tanh()).square().sum()

    return torch.func.vmap(torch.func.grad(energy))(x)[:, :3]


def in_place(net, x):
    x -= 0.5
    x[:, 0].mul_(2)
    return net.c(net.b(net.a(x).tanh()).tanh())


def wired(operation):
    return lambda net, x: net.c(operation(net.a(x).tanh(), net.b.weight[0]))


WIRINGS = {
    "view_as_complex": complex_weights,
    "torch.func in forward": gradient_inside,
    "in place": in_place,
    # Each of these ended the process in a trace.
    "ldexp": wired(lambda h, w: torch.ldexp(h, torch.tensor([1])) * w),
    "addcmul": wired(lambda h, w: torch.addcmul(h, h, torch.ones(4).double(), value=0.5) * w),
    "addcdiv": wired(lambda h, w: torch.addcdiv(h, h, 2 + torch.ones(4).double()) * w),
    "index_add": wired(
        lambda h, w: h.index_add(1, torch.tensor([0]), torch.ones(len(h), 1).double()) * w
    ),
    "mse_loss": wired(
        lambda h, w: F.mse_loss(h, torch.ones(4).double().expand_as(h), reduction="none") * w
    ),
}


def build(wiring):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Wired(wiring, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))
        net.w = nn.Parameter(torch.randn(3, 2))
        net.odd = nn.Parameter(torch.randn(len(list(net.parameters())) % 2 + 1))
        return net.double().eval()


@pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")
@pytest.mark.parametrize("kind", WIRINGS)
def test_operators_equal_plain_autograd(kind):
    data = (INPUTS[:9].clone(), DATA[1][:9])
    model = build(WIRINGS[kind])
    problem = Problem(model, data, l2=L2, chunk_size=4)
    clones = (data[0].clone(), data[1])
    plain = build(in_place_of(kind))
    gram, curvature = exact(problem, plain, clones)
    torch.testing.assert_close(OPGOperator(problem).to_dense(), gram, **EXACT)
    torch.testing.assert_close(HessianOperator(problem).to_dense(), curvature, **EXACT)
    assert torch.equal(data[0], INPUTS[:9])


def in_place_of(kind):
    """The same function, as plain autograd can take it."""
    if kind == "in place":
        return lambda net, x: in_place(net, x.clone())
    return WIRINGS[kind]


@pytest.mark.parametrize("number", [1, 2])
def test_data_are_as_they_were_where_only_some_are_changed(number):
    def sometimes(net, x):
        large = x.abs().amax(1, keepdim=True) > 1.5
        if bool(large.any()):
            x.mul_(torch.where(large, 0.5, 1.0))
        return net.c(net.b(net.a(x).tanh()))

    inputs = INPUTS.clamp(-1, 1)
    inputs[20:] *= number
    given = inputs.clone()
    done = fit(build(sometimes), (inputs, DATA[1]), batch_size=1, params=["c.*"])
    done.predict(inputs * 2, batch_size=1)
    done.predict(inputs, batch_size=1)
    assert torch.equal(inputs, given)


def test_saturated_inputs_of_a_probe_are_left_out():
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[300.0], [0.0]]))
        model.bias.zero_()
    data = (torch.tensor([[1.0], [-1.0], [0.001], [-0.001]]).repeat(10, 1),
            torch.tensor([0, 1, 0, 1]).repeat(10))  # fmt: skip
    found = fit(model, data, l2=1e-3, rank="auto", tolerance=0.05)
    outcome = found.diagnostics["rank"]
    assert outcome["probe_inputs_left_out"] > 0
    assert outcome["relative_score_error"] <= 0.05
    with pytest.raises(DeltaBarsError, match="their error bars are zero"):
        fit(model, data, l2=1e-3, rank="auto", probe=torch.ones(3, 1))


def without_a_layer():
    model = build(gradient_inside)
    del model.b
    return model


REFUSED = {
    "meta": (lambda: build(in_place).to("meta"), "tensors without values"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "tensors without values"),
    "deleted": (without_a_layer, "deleted or renamed"),
    "scripted": (lambda: build_scripted(), "TorchScript"),
}


def build_scripted():
    return torch.jit.script(nn.Linear(4, 3).double())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(kind):
    make, match = REFUSED[kind]
    with pytest.raises(ModelError, match=match):
        fit(make())
