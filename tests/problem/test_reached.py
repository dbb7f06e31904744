"""The parameters that the examples reach: which they are, matrices without the rest, and fits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import deltabars
from deltabars import Problem
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from tests.architectures import L2, Wired
from tests.oracles import Oracle
from tests.silence import PRECISION, SILENT, Own, labels, randn, seeded, silence

OPERATORS = {"hessian": HessianOperator, "opg": OPGOperator, "ggn": GGNOperator}
ESTIMATORS = ("opg", "hessian", "ggn", "sandwich")
# The networks are not trained, and their silent units are far from where training takes them.
pytestmark = pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")


def derivatives(oracle: Oracle) -> torch.Tensor:
    """Which parameters have a derivative of any output for any example, by plain autograd."""
    rows = torch.autograd.functional.jacobian(
        lambda point: oracle.outputs(point, oracle.inputs), oracle.point
    )
    return rows.flatten(0, 1).any(0)


def check(problem: Problem, *oracles: Oracle, kinds=("hessian", "opg")) -> None:
    """What is reached, the matrices, and products among what is reached, against dense ones."""
    expected = torch.stack([derivatives(oracle) for oracle in oracles]).any(0)
    found = torch.ones_like(expected)
    if problem.reached is not None:
        found = torch.zeros_like(expected).index_fill(0, problem.reached, True)
    assert torch.equal(found, expected)
    total = sum(oracle.count for oracle in oracles)
    for kind in kinds:
        operator = OPERATORS[kind](problem)
        exact = sum(oracle.matrix(kind) * (oracle.count / total) for oracle in oracles)
        torch.testing.assert_close(operator.to_dense(), exact, **PRECISION)
        indices = operator.spaces.indices
        if indices is not None:
            block = exact[indices][:, indices]
            rows = randn(3, len(block))
            torch.testing.assert_close(operator.reached_matmat(rows), rows @ block, **PRECISION)
            if kind != "hessian":
                whole, part = (
                    torch.cat(list(blocks()))
                    for blocks in (operator.row_blocks, operator.reached_row_blocks)
                )
                torch.testing.assert_close(part, whole[:, indices], **PRECISION)


def in_place(net, x):
    x = net.a(x)
    x.relu_()
    x = net.b(x)
    return torch.relu_(x)


def tied(net, x):
    x = F.linear(net.a(x).relu(), net.b.weight, net.b.bias).relu()
    return F.linear(x, net.b.weight).relu()


def without_gradient(net, x):
    with torch.no_grad():
        still = net.a(x).relu()
    return net.b(still).relu()


# Of `a`, dense (4, 5), whose units SILENT are never switched on, and `b`, dense (5, 5).
DENSE = {
    "plain": lambda net, x: net.b(net.a(x).relu()).relu(),
    "in place": in_place,
    "seen by another": lambda net, x: net.b(net.a(x).relu()).relu() + net.a(x),
    "multiplied": lambda net, x: net.b(net.a(x).relu()).relu() * (1 + net.a(x).relu()),
    "tied": tied,
    "weight elsewhere": lambda net, x: net.b(net.a(x).relu()).relu() + x @ net.a.weight.T,
    "without gradient": without_gradient,
    "own function": lambda net, x: net.b(Own.apply(net.a(x))).relu(),
    "sets": lambda net, x: net.b(net.a(torch.stack([x, 2 * x], 1)).relu()).relu().sum(1),
}


@pytest.mark.parametrize("kind", DENSE)
def test_dense_layers(kind):
    model = seeded(
        lambda: Wired(
            lambda net, x: net.head(DENSE[kind](net, x)), a=silence(nn.Linear(4, 5), *SILENT),
            b=silence(nn.Linear(5, 5), 1), head=nn.Linear(5, 3),
        )
    )  # fmt: skip
    problem = Problem(model, (randn(7, 4), labels()), l2=L2)
    check(problem, Oracle(model, randn(7, 4), labels(), L2))


def conv_net():
    """Some units are silent in each layer but the last; each other one is on for some example."""
    layers = [nn.Conv2d(1, 4, 2), nn.Conv2d(4, 3, 2), nn.Linear(12, 6)]
    for layer, units in zip(layers, ([0, 2], [1], [1, 4, 5]), strict=True):
        nn.init.constant_(layer.bias, 0.5)
        silence(layer, *units)
    first, second, third = layers
    return nn.Sequential(
        first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.Flatten(), third, nn.ReLU(),
        nn.Linear(6, 3),
    )  # fmt: skip


@pytest.mark.parametrize("budget", [1, None])
def test_a_convolutional_network_in_chunks(budget):
    model, inputs = seeded(conv_net), randn(12, 1, 7, 7)
    problem = Problem(model, (inputs, labels(12)), l2=L2, memory_budget=budget, chunk_size=5)
    check(problem, Oracle(model, inputs, labels(12), L2), kinds=OPERATORS)
    assert len(problem.reached) < 0.6 * problem.num_parameters


def nearly_silent():
    """Unit 1 is switched on by a fifth input of 50 alone."""
    model = nn.Sequential(silence(nn.Linear(5, 4), 1, 3), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[1, 4] = 10.0
        model[0].weight[3, 4] = 1.0
    return model


@cache
def switched_on():
    model, inputs = seeded(nearly_silent), randn(71, 5)
    inputs[-1, 4] = 50.0
    return model, inputs, Oracle(model, inputs, labels(71), L2)


@pytest.mark.parametrize(
    ("chunk_size", "loader", "budget"), [(1, False, 1), (8, True, 1), (70, True, None), (99, 0, 1)]
)
def test_one_example_is_enough(chunk_size, loader, budget):
    """The last one of 71, of which the first 64 are what the model is tried out on."""
    model, inputs, oracle = switched_on()
    data = inputs, labels(71)
    if loader:
        data = DataLoader(TensorDataset(*data), batch_size=4)
    problem = Problem(model, data, l2=L2, chunk_size=chunk_size, memory_budget=budget)
    check(problem, oracle, kinds=["opg"])


def test_inputs_that_are_always_zero_and_several_inputs():
    model = seeded(
        lambda: Wired(
            lambda net, x, y: net.head(torch.cat([net.a(x).relu(), net.b(y).relu()], 1)),
            a=silence(nn.Linear(4, 5), 0), b=silence(nn.Linear(3, 2), 1), head=nn.Linear(7, 3),
        )
    )  # fmt: skip
    inputs = randn(7, 7)
    inputs[:, 5] = 0.0
    whole = Wired(lambda net, x: net.inner(*x.split([4, 3], dim=1)), inner=model)
    problem = Problem(model, [(*inputs.split([4, 3], dim=1), labels())], l2=L2)
    check(problem, Oracle(whole, inputs, labels(), L2))


@pytest.mark.parametrize("names", [["0.weight"], ["0.bias", "2.weight"], ["2.bias"]])
def test_subsets_of_the_parameters(names):
    model, inputs = seeded(nearly_silent), randn(7, 5)
    problem = Problem(model, (inputs, labels()), parameters=names, l2=L2)
    check(problem, Oracle(model, inputs, labels(), L2, names))


COUNT, STRONG = 20, 0.6  # an l2 that makes the Hessian positive definite


def build():
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias[:4] = -6.0  # inputs up to 2 do not make up for it: weights are up to 0.41
        model[2].bias[5:] = -6.0
    return model


@cache
def setting():
    """A network with silent units, data, and inputs of which some switch silent units on."""
    model, inputs, unseen = seeded(build), randn(COUNT, 6).clamp(-2, 2), randn(6, 6, seed=1)
    inputs[:, 2] = 0.0
    unseen[3:] *= 20
    assert bool((model[0](inputs)[:, :4] < 0).all())
    assert bool((model[0](unseen[3:])[:, :4] > 0).any())
    return model, (inputs, labels(COUNT)), unseen


@cache
def oracle(l2=STRONG):
    model, data, _ = setting()
    return Oracle(model, *data, l2)


def fitted(estimator, rank, l2=STRONG, **options):
    model, data, _ = setting()
    options = {"l2": l2, "progress": False, "solver": "krylov", **options}
    return deltabars.fit(model, data, estimator=estimator, rank=rank, **options)


def check_pairs(pairs, matrix):
    """Orthonormal eigenvectors of the largest eigenvalues of a dense matrix."""
    exact = torch.linalg.eigvalsh(matrix).flip(0)[: len(pairs)]
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-8)
    eye = torch.eye(len(pairs), dtype=torch.float64)
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-10)
    rest = pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors
    assert float(rest.norm(dim=1).max()) < 1e-8  # the solver's tolerance is 1e-10


# 9: fewer than are above λ. 50: more than those, so that unit vectors come in; fewer than P'.
# 100: more than P'.
@pytest.mark.parametrize("rank", [9, 50, 100])
@pytest.mark.parametrize("solver", ["krylov", "incremental"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_solvers_find_dense_pairs(estimator, solver, rank):
    if solver == "incremental" and estimator == "hessian":
        pytest.skip("incremental SVD is for rows")
    fit = fitted(estimator, rank, solver=solver)
    assert 50 < fit.diagnostics["parameters_reached"] == int(derivatives(oracle()).sum()) < 100
    for name, pairs in fit.spectra.items():
        check_pairs(pairs, oracle().matrix(name))
        assert (int((pairs.values > STRONG + 1e-9).sum()) < rank) == (rank > 9)


@pytest.mark.parametrize(("smallest", "l2"), [(1, 0.05), (40, 0.05), (4, STRONG)])
def test_the_lower_end_of_the_spectrum(smallest, l2):
    """Negative eigenvalues of a Hessian, those below λ, and λ itself of what is not reached."""
    fit = fitted("hessian", 9, l2=l2, smallest=smallest)
    pairs, exact = fit.spectra["hessian"], torch.linalg.eigvalsh(oracle(l2).hessian())
    check_pairs(pairs, oracle(l2).hessian())
    torch.testing.assert_close(pairs.smallest[:smallest], exact[:smallest], rtol=0, atol=1e-8)
    below = max(0.0, l2 - float(exact[0]))
    assert fit.diagnostics["hessian"]["tail_below_l2"] == pytest.approx(below, abs=1e-8)


@pytest.mark.parametrize("space", ["probability", "logit"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_error_bars_where_silent_units_are_switched_on(estimator, space, tmp_path):
    """Exact at full rank, and inside the bounds at any other; saved and loaded the same."""
    model, _, unseen = setting()
    exact = oracle().std(estimator, unseen, space)
    whole = fitted(estimator, oracle().size)
    slack = 1e-8 * (1 + float(exact.max()))
    # Eigenvalues of the Hessian are below λ here, which its bounds do not count with; those of a
    # sandwich do, where the whole spectrum is known.
    for rank in () if estimator == "hessian" else (1, 9, 50, 100):
        fit = fitted(estimator, rank) if estimator in ("opg", "ggn") else whole
        out = fit.predict(unseen, rank=rank, space=space)
        assert bool((out.std_low - slack <= exact).all())
        assert bool((exact <= out.std_high + slack).all())
    out = whole.predict(unseen, space=space)
    torch.testing.assert_close(out.std, exact, rtol=1e-8, atol=1e-8)
    assert float(out.std_error.max()) < 1e-8
    whole.save(tmp_path / "fit")
    again = deltabars.load(tmp_path / "fit", model).predict(unseen, space=space)
    assert torch.equal(again.std, out.std)
