"""What plain torch can do works here too: against dense matrices of plain autograd."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import deltabars
from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from tests.architectures import L2, Wired
from tests.oracles import Oracle

INPUTS = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.arange(9) % 3


def plain(net, x):
    return net.c(net.b(net.a(x).tanh()).tanh())


def checkpointed(reentrant):
    def wiring(net, x):
        inner = checkpoint(lambda h: net.b(h).tanh(), net.a(x).tanh(), use_reentrant=reentrant)
        return net.c(inner)

    return wiring


def complex_weights(net, x):
    return net.c(net.b(torch.fft.irfft(torch.fft.rfft(net.a(x)) * torch.view_as_complex(net.w))))


def gradient_inside(net, x):
    def energy(row):
        return net.b(net.a(row).tanh()).square().sum()

    return torch.func.vmap(torch.func.grad(energy))(x)[:, :3]


def in_place(net, x):
    x -= 0.5
    x[:, 0].mul_(2)
    return plain(net, x)


def wired(operation):
    return lambda net, x: net.c(
        operation(net.a(x).tanh(), torch.ones(4).double()) * net.b.weight[0]
    )


WIRINGS = {
    "checkpoint": checkpointed(reentrant=False),
    "reentrant checkpoint": checkpointed(reentrant=True),
    "view_as_complex": complex_weights,
    "torch.func in forward": gradient_inside,
    "in place": in_place,
    # Each of these ended the process in a trace.
    "ldexp": wired(lambda h, one: torch.ldexp(h, torch.tensor([1]))),
    "addcmul": wired(lambda h, one: torch.addcmul(h, h, one, value=0.5)),
    "addcdiv": wired(lambda h, one: torch.addcdiv(h, h, 2 + one)),
    "index_add": wired(lambda h, one: h.index_add(1, torch.tensor([0]), one[:1].expand(len(h), 1))),
    "mse_loss": wired(lambda h, one: F.mse_loss(h, one.expand_as(h), reduction="none")),
}
# The same function, as plain autograd can take it.
INSTEAD = {
    "checkpoint": plain,
    "reentrant checkpoint": plain,
    "in place": lambda net, x: in_place(net, x.clone()),
}


def build(wiring):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Wired(wiring, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))
        net.w = nn.Parameter(torch.randn(3, 2))
        return net.double().eval()


@pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")
@pytest.mark.parametrize("kind", WIRINGS)
def test_operators_equal_plain_autograd(kind):
    inputs = INPUTS.clone()
    problem = Problem(build(WIRINGS[kind]), (inputs, TARGETS), l2=L2, chunk_size=4)
    oracle = Oracle(build(INSTEAD.get(kind, WIRINGS[kind])), INPUTS.clone(), TARGETS, L2)
    for operator, exact in ((OPGOperator, oracle.opg()), (HessianOperator, oracle.hessian())):
        torch.testing.assert_close(operator(problem).to_dense(), exact, rtol=0, atol=1e-9)
    assert torch.equal(inputs, INPUTS)


@pytest.mark.parametrize("number", [1, 2])
def test_data_are_as_they_were_where_only_some_are_changed(number):
    def sometimes(net, x):
        large = x.abs().amax(1, keepdim=True) > 1.5
        if bool(large.any()):
            x.mul_(torch.where(large, 0.5, 1.0))
        return plain(net, x)

    inputs = INPUTS.clamp(-1, 1)
    inputs[5:] *= number
    given = inputs.clone()
    options = {"l2": 0.1, "rank": 6, "progress": False, "batch_size": 1, "params": ["c.*"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deltabars.errors.OptimumWarning)
        done = deltabars.fit(build(sometimes), (inputs, TARGETS), **options)
    done.predict(inputs * 2, batch_size=1)
    done.predict(inputs, batch_size=1)
    assert torch.equal(inputs, given)
