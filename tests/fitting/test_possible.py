"""What plain torch can do works here too: against dense matrices of plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def in_place(net, x):
    x -= 0.5
    x[:, 0].mul_(2)
    return plain(net, x)


def sorted_inside(net, x):
    order = x[:, 0].argsort()
    return plain(net, x[order])[order.argsort()]


def by_rows(net, x):
    return plain(net, x) * torch.stack([row[row > 0].sum() for row in net.a(x)])[:, None]


def slice_assignment(net, x):
    hidden = net.a(x).tanh().clone()
    hidden[:, 0] = 0
    return net.c(net.b(hidden))


def wired(operation):
    return lambda net, x: net.c(
        operation(net.a(x).tanh(), torch.ones(4).double()) * net.b.weight[0]
    )


WIRINGS = {
    "checkpoint": checkpointed(reentrant=False),
    "reentrant checkpoint": checkpointed(reentrant=True),
    "view_as_complex": complex_weights,
    "in place": in_place,
    "sorted inside": sorted_inside,
    "by rows": by_rows,
    "slice assignment": slice_assignment,
    "by item": lambda net, x: plain(net, x) * float(net.a.in_features),
    # Each of these ended the process in a trace.
    "ldexp": wired(lambda h, one: torch.ldexp(h, torch.tensor([1]))),
    "addcmul": wired(lambda h, one: torch.addcmul(h, h, one, value=0.5)),
    "addcdiv": wired(lambda h, one: torch.addcdiv(h, h, 2 + one)),
    "index_add": wired(lambda h, one: h.index_add(1, torch.tensor([0]), one[:1].expand(len(h), 1))),
    "mse_loss": wired(lambda h, one: F.mse_loss(h, one.expand_as(h), reduction="none")),
}
# The same function, as plain autograd can take it.
INSTEAD = {"checkpoint": plain, "reentrant checkpoint": plain}


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
    same = INSTEAD.get(kind, WIRINGS[kind])
    oracle = Oracle(build(lambda net, x: same(net, x.clone())), INPUTS, TARGETS, L2)
    for operator, exact in ((OPGOperator, oracle.opg()), (HessianOperator, oracle.hessian())):
        torch.testing.assert_close(operator(problem).to_dense(), exact, rtol=0, atol=1e-9)
    assert torch.equal(inputs, INPUTS)
