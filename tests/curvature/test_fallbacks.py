"""Models that torch's transforms do not support: a slower way, with one warning, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import deltabars
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.curvature.pullback import Pullback
from deltabars.errors import ModelError, ModelWarning, NotEnoughMemoryError
from deltabars.problem.network import Network
from tests.architectures import Wired
from tests.curvature.test_batches_inside import Product
from tests.curvature.test_layers import built, check, numbers
from tests.zoo import specimen

SLOW = "an operation of one's own"


class Once(torch.autograd.Function):
    """An operation with first derivatives alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, signal):
        return 2 * ctx.saved_tensors[0] * signal


class WronglyMapped(Product):
    """x·wᵀ, whose derivatives under vmap are wrong without an error."""

    @staticmethod
    def vmap(info, in_dims, x, w):
        x, w = (part.movedim(d or 0, 0) for part, d in zip((x, w), in_dims, strict=True))
        return torch.matmul(x, w.mT) * (1 + torch.arange(len(x)))[:, None, None], 0


def squared():
    def forward(net, x):
        return net.head(Once.apply(net.line(net.first(x)[:, None])[:, 0]))

    layers = {"first": nn.Linear(4, 5), "line": nn.Conv1d(1, 1, 3), "head": nn.Linear(3, 3)}
    return Wired(forward, **layers)


def model_warnings(said):
    return [str(warning.message) for warning in said if warning.category is ModelWarning]


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
@pytest.mark.parametrize("estimator", ["opg", "hessian"])
def test_a_fit_of_many_chunks_says_it_once(estimator, recwarn):
    case = specimen(SLOW)
    fit = deltabars.fit(
        case.model, case.data, l2=1.0, rank=4, batch_size=2, estimator=estimator, progress=False
    )
    (message,) = model_warnings(recwarn)
    assert "slower" in message
    recwarn.clear()
    fit.predict(case.unseen, batch_size=1)
    fit.predict(case.unseen, batch_size=2)
    (message,) = model_warnings(recwarn)
    assert "example by example for 2 of 6 parameters (line.weight, …)" in message


def test_derivatives_that_are_wrong_under_vmap_are_not_taken():
    def forward(net, x):
        return net.head(WronglyMapped.apply(x, net.w).tanh())

    model = built(lambda: Wired(forward, w=nn.Parameter(torch.randn(5, 4)), head=nn.Linear(5, 3)))
    with pytest.warns(ModelWarning, match="not those of autograd"):
        assert check(model, numbers(6, 4)) == ("w",)


def short(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")


def test_rows_that_memory_is_short_for_are_not_given_up(monkeypatch):
    case = specimen("line")
    pullback = Pullback(Network.capture(case.model))
    with pullback.network.evaluation():
        pullback.rows(case.data[0], lambda outputs: outputs[:, None])
        monkeypatch.setattr(torch.func, "vjp", short)
        with pytest.raises(RuntimeError, match="can't allocate"):
            pullback.rows(case.data[0], lambda outputs: outputs[:, None])


def test_products_that_memory_is_short_for_are_not_given_up(monkeypatch):
    case = specimen(SLOW)
    operator = HessianOperator(deltabars.Problem(case.model, case.data, l2=1.0))
    monkeypatch.setattr(operator, "_derivative", short)
    with pytest.raises(NotEnoughMemoryError), pytest.warns(deltabars.errors.MemoryWarning):
        operator.matmat(torch.ones(1, operator.shape[0], dtype=torch.float64))


def test_operations_without_second_derivatives_are_refused_for_the_hessian_alone():
    data = numbers(9, 4), torch.arange(9) % 3
    problem = deltabars.Problem(built(squared), data, l2=0.1)
    vector = torch.ones(1, problem.num_parameters, dtype=torch.float64)
    with (
        pytest.warns(ModelWarning, match="gradients of gradients"),
        pytest.raises(ModelError, match=r"second derivatives.*wrong ones.*'ggn' or 'opg'"),
    ):
        HessianOperator(problem).matmat(vector)
    with pytest.warns(ModelWarning, match="example by example"):
        OPGOperator(problem).matmat(vector)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_the_last_layer_is_found_behind_what_vmap_cannot_do():
    case = specimen("GRU, packed")
    fit = deltabars.fit(
        case.model, case.data, l2=1.0, params=deltabars.last_layer(), progress=False
    )
    assert fit.network.parameters.names == ("head.weight", "head.bias")
    fit.predict(case.unseen)  # reached through its layer: nothing to warn of


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_in_float32(kind):
    """torch's own LSTM of float32 on a CPU is another one than that of float64."""
    case = specimen(kind)
    problem = deltabars.Problem(case.model, case.data, l2=1.0, dtype=torch.float32)
    found = HessianOperator(problem).to_dense().double()
    torch.testing.assert_close(found, case.oracle.hessian(), rtol=0, atol=1e-5)
