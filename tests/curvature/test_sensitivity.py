"""F reduced layer by layer, in either order of its products, against F whole by plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deltabars.curvature.pullback import Pullback
from deltabars.curvature.sensitivity import sensitivities
from deltabars.likelihoods.base import get_likelihood
from deltabars.problem.network import Network
from tests.oracles import Oracle

PRECISION = {"rtol": 0, "atol": 1e-11}  # rounding, in float64, of sums of some hundred terms


def randn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def network(classes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 2, stride=2), nn.BatchNorm2d(2),
            nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, classes),
        ).double().eval()  # fmt: skip


@pytest.mark.parametrize("space", ["probability", "logit"])
@pytest.mark.parametrize(
    ("classes", "shared"),
    [(1, 0), (2, 2), (7, 2), (8, 3), (80, 4)],  # convolutions of 16 and 4 positions, dense layers
)
def test_either_order_gives_the_same(classes, shared, space):
    model = network(classes)
    inputs = randn(3, 1, 6, 6)
    likelihood = "bernoulli" if classes == 1 else "categorical"
    targets = torch.zeros(3, 1) if classes == 1 else torch.zeros(3, dtype=torch.long)
    exact = Oracle(model, inputs, targets, 0.1, likelihood=likelihood).sensitivity(inputs, space)
    bases = {
        name: torch.linalg.qr(randn(exact.shape[2], rank))[0].T
        for name, rank in (("hessian", 9), ("opg", 1))
    }
    pullback = Pullback(Network.capture(model))
    with pullback.network.evaluation():
        pulled = pullback.pull(inputs, get_likelihood(likelihood).mean_jacobian)
        outputs, found = sensitivities(
            pullback, get_likelihood(likelihood), inputs, bases, space, with_gram=True
        )
    assert sum(factors.is_cheaper_shared for factors in pulled.layers.values()) == shared
    assert len(pulled.layers) == 4
    torch.testing.assert_close(outputs, model(inputs).detach(), **PRECISION)
    slope = found.slope.unsqueeze(-1)  # from the rows of log p to those of p
    squares, gram = found.slope.square() * found.squares, slope * found.gram * slope.mT
    torch.testing.assert_close(squares, exact.square().sum(-1), **PRECISION)
    torch.testing.assert_close(gram, exact @ exact.mT, **PRECISION)
    for name, basis in bases.items():
        projected = slope * found.projections[name]
        torch.testing.assert_close(projected, exact @ basis.T, **PRECISION)


def reduced(model, inputs, dtype=torch.float64, **options):
    """F whole, a basis, and what is found of the two."""
    oracle = Oracle(model, inputs, torch.zeros(len(inputs), dtype=torch.long), 0.1)
    exact = oracle.sensitivity(inputs, "logit")
    basis = torch.linalg.qr(randn(exact.shape[2], 9))[0].T
    pullback = Pullback(Network.capture(model, dtype=dtype))
    given = inputs.to(dtype), {"opg": basis.to(dtype)}, "logit"
    with pullback.network.evaluation():
        _, found = sensitivities(pullback, get_likelihood("categorical"), *given, **options)
    return exact, basis, found


def test_float32_sums_are_kept_in_float64():
    """Only the rows are rounded to float32: sums of many squares lose nothing more."""
    exact, basis, found = reduced(network(8), randn(3, 1, 6, 6), torch.float32)
    assert found.squares.dtype == found.projections["opg"].dtype == torch.float64
    assert found.gram is None
    # Some units of float32's rounding (6e-8) of a forward and a backward pass.
    scale = float(exact.norm(dim=-1).max())
    torch.testing.assert_close(found.squares, exact.square().sum(-1), rtol=3e-6, atol=0)
    torch.testing.assert_close(found.projections["opg"], exact @ basis.T, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("classes", [2, 40])
def test_silent_units_and_zero_inputs(classes):
    """Layers of which little is left, or nothing at all."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, classes)
        ).double()
    inputs = randn(3, 6)
    inputs[:, 2:4] = 0.0
    with torch.no_grad():
        for silent in ([0, 3], [0, 1, 2, 3, 4]):  # some, or all that the head sees
            model[2].bias[silent] = -100.0
            exact, basis, found = reduced(model, inputs, with_gram=True)
            torch.testing.assert_close(found.gram, exact @ exact.mT, **PRECISION)
            torch.testing.assert_close(found.projections["opg"], exact @ basis.T, **PRECISION)
