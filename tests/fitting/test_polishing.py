"""polish(): a copy at the optimum that plain torch finds, and a model that stays as it was."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from deltabars.errors import ConvergenceWarning, DataError, DeltaBarsError
from deltabars.fitting.polishing import _on_features, polish
from deltabars.problem.parameters import last_layer
from deltabars.problem.problem import Problem
from deltabars.runtime.distributed import alone
from tests.networks import dense, make_case, make_targets, minimise, untrained
from tests.oracles import LOSSES
from tests.problem.test_model_untouched import model_state, torch_state
from tests.processes import results

L2 = 0.02
EXACT = 1e-6  # of the largest weight: the tolerance below leaves a gradient of 1e-8 of its parts
QUIET = {"tolerance": 1e-8, "progress": False}


def weights(model, names=None):
    found = dict(model.named_parameters())
    return torch.cat([found[name].detach().double().flatten() for name in names or found])


def assert_same(found, expected, names=None, limit=EXACT):
    a, b = weights(found, names), weights(expected, names)
    assert (a - b).abs().max() <= limit * b.abs().max()


def optimum(model, inputs, targets, loss, l2=L2, names=None):
    """The optimum over the named parameters: L-BFGS, and three steps of Newton, dense."""
    best = copy.deepcopy(model).eval()
    chosen = {n: v for n, v in best.named_parameters() if n in (names or [n])}

    def cost(*values):
        outputs = torch.func.functional_call(best, dict(zip(chosen, values, strict=True)), inputs)
        return loss(outputs, targets) + 0.5 * l2 * sum(v.square().sum() for v in values)

    holder = nn.ParameterList(chosen.values())
    minimise(holder, lambda: cost(*holder), 0.0, steps=1000)
    for _ in range(3):
        values = tuple(value.detach() for value in chosen.values())
        sizes = [value.numel() for value in values]
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.functional.jacobian(cost, values)]
        )
        blocks = torch.autograd.functional.hessian(cost, values)
        rows = [
            torch.cat([b.reshape(n, -1) for b in row], 1)
            for row, n in zip(blocks, sizes, strict=True)
        ]
        step = torch.linalg.solve(torch.cat(rows), gradient).split(sizes)
        with torch.no_grad():
            for value, part in zip(chosen.values(), step, strict=True):
                value -= part.view_as(value)
    return best


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("kind", ["dense", "batch_norm"])
def test_a_last_layer_comes_to_its_optimum(kind, likelihood):
    model, inputs, targets, _ = untrained(kind, 40, 0, likelihood)
    names = last_layer(model)
    best = optimum(model, inputs, targets, lambda *a: LOSSES[likelihood](*a).mean(), names=names)
    found = polish(model, (inputs, targets), L2, likelihood=likelihood, **QUIET)
    assert_same(found, best)


@pytest.mark.parametrize("silent", [0, 10])
def test_a_single_precision_model_meets_the_tolerance_after_rounding(silent):
    """Features as of ReLU, some always zero: weights rounded one by one leave 1e-4."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 40, generator=generator) / torch.arange(1, 41) + 1
    inputs[:, 40 - silent :] = 0
    targets = torch.randint(0, 4, (300,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(40, 4)
    found = polish(model, (inputs, targets), 1e-4, progress=False)
    assert next(found.parameters()).dtype == torch.float32
    problem = Problem(found, (inputs, targets), l2=1e-4, dtype=torch.float64)
    assert problem.relative_gradient <= 1e-5


def test_the_given_model_stays_as_it_was():
    model, inputs, targets, _ = untrained("batch_norm", 40, 0, "categorical")
    model.train()
    model[1].eval()
    model[5].weight.grad = torch.ones_like(model[5].weight)
    model[0].register_forward_hook(lambda *_: None)
    before, switches = model_state(model), torch_state()
    found = polish(model, (inputs, targets), L2, **QUIET)
    assert (model_state(model), torch_state()) == (before, switches)
    assert [m.training for m in found.modules()] == [m.training for m in model.modules()]
    mine, theirs = found.state_dict(), model.state_dict()
    assert list(mine) == list(theirs)
    changed = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert changed == last_layer(model)
    assert not {v.data_ptr() for v in mine.values()} & {v.data_ptr() for v in theirs.values()}


def test_a_network_in_training_mode_is_polished_in_eval_mode():
    model, inputs, targets, _ = untrained("batch_norm", 40, 0, "categorical")
    found = polish(model.train(), (inputs, targets), L2, **QUIET)
    assert found.training
    assert_same(found, polish(model.eval(), (inputs, targets), L2, **QUIET), limit=0)


def test_a_compiled_part_keeps_its_mode():
    model, inputs, targets, _ = untrained("dense", 29, 0, "categorical")
    whole = nn.Sequential(torch.compile(model[:2], backend="eager"), model[2]).train()
    whole[0].eval()
    found = polish(whole, (inputs, targets), L2, **QUIET)
    assert found.training
    assert not found[0].training
    assert_same(found, polish(model, (inputs, targets), L2, **QUIET), limit=0)


SQUARES = nn.MSELoss()
SMOOTH = nn.CrossEntropyLoss(
    torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), label_smoothing=0.1
)


@pytest.mark.parametrize(("likelihood", "loss"), [("gaussian", SQUARES), ("categorical", SMOOTH)])
def test_the_loss_of_the_training(likelihood, loss):
    """l2 is that of the cost with the loss module's own value: a mean of elements, or weighted."""
    model, inputs, targets, _ = untrained("dense", 40, 1, likelihood)
    names = last_layer(model)
    best = optimum(model, inputs, targets, loss, names=names)
    assert_same(polish(model, (inputs, targets), L2, likelihood=loss, **QUIET), best)


def test_ridge_regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = make_targets("gaussian", 50, generator)
    found = polish(nn.Linear(4, 3).double(), (x, y), L2, likelihood="gaussian", **QUIET)
    design = torch.cat([x, torch.ones(50, 1, dtype=x.dtype)], 1)
    penalty = L2 * torch.eye(5, dtype=x.dtype)
    exact = torch.linalg.solve(design.T @ design / 50 + penalty, design.T @ y / 50).T
    torch.testing.assert_close(found.weight, exact[:, :4], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.bias, exact[:, 4], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("params", [last_layer(), None])
def test_several_l2(params):
    """By pattern; all parameters of a linear model are its last layer, by another way."""
    model, inputs, targets, _ = untrained("linear", 40, 0, "categorical")
    rates = {"*": 0.05, "bias": 0.001}
    found = polish(model, (inputs, targets), rates, params=params, **QUIET)
    root = torch.tensor(rates["bias"] / rates["*"], dtype=torch.float64).sqrt()

    class Rescaled(nn.Linear):  # bias/root has the same λ as the weights
        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias / root)

    one = Rescaled(4, 3).double()
    best = optimum(one, inputs, targets, lambda *a: LOSSES["categorical"](*a).mean(), 0.05)
    with torch.no_grad():
        best.bias /= root
    assert_same(found, best)


@pytest.mark.parametrize("params", [["2.weight"], ["2.bias"]])
def test_features_and_passes_agree(params):
    """Where a quarter of the memory budget is a byte short for the features, passes are made."""
    model, inputs, targets, _ = untrained("dense", 40, 0, "categorical")
    budget, found = 4 * 40 * 5 * 8, {}
    for memory_budget in (budget, budget - 1):
        problem = Problem(
            model, (inputs, targets), "categorical", params, L2, memory_budget=memory_budget
        )
        assert (_on_features(problem) is None) == (memory_budget < budget)
        options = {"params": params, "memory_budget": memory_budget, **QUIET}
        found[memory_budget] = polish(model, (inputs, targets), L2, **options)
    assert_same(found[budget], found[budget - 1])


class Scaled(nn.Module):
    """A last layer whose result is not yet the model's."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return 2 * self.head(self.body(x).tanh())


class Twice(nn.Module):
    """A last layer that makes its own inputs: its cost is not convex."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.head(self.body(x)).tanh())


@pytest.mark.parametrize("build", [Scaled, Twice])
def test_layers_that_only_look_like_the_last(build):
    _, inputs, targets, _ = untrained("dense", 40, 0, "categorical")
    torch.manual_seed(0)
    model = build().double()
    best = optimum(
        model, inputs, targets, lambda *a: LOSSES["categorical"](*a).mean(),
        names=["head.weight", "head.bias"],
    )  # fmt: skip
    found = polish(model, (inputs, targets), L2, params="head*", **QUIET)
    if build is Scaled:  # which is convex: one optimum
        assert_same(found, best)
    problem = Problem(found, (inputs, targets), "categorical", "head*", L2)
    assert problem.relative_gradient <= 1e-7


@pytest.mark.parametrize(
    ("kind", "most"),
    [("rectified", 3), ("batch_norm", 3), ("rectified", 25), ("dense", 500)],
)
def test_neither_the_cost_nor_the_gradient_rises(kind, most):
    """Of all parameters, from weights far from an optimum, however early the end is."""
    case = make_case(kind)
    model = copy.deepcopy(case.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.5 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    options = {"params": None, "max_iterations": most, "tolerance": 1e-6, "progress": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        found = polish(model, case.data, case.l2, **options)
    before, after = (Problem(m, case.data, l2=case.l2) for m in (model, found))
    assert after.mean_loss + after.penalty <= before.mean_loss + before.penalty
    assert after.relative_gradient <= before.relative_gradient
    if not caught:
        assert after.relative_gradient <= 1e-6
    else:  # too early, or at a kink
        assert most == 3 or any(isinstance(module, nn.ReLU) for module in model.modules())
        reached = f"1e-06 or less, got {after.relative_gradient:.2g} after"
        assert reached in str(caught[0].message)


def test_a_model_at_its_optimum_stays_there(dense_case):
    found = polish(dense_case.model, dense_case.data, dense_case.l2, params=None, progress=False)
    assert_same(found, dense_case.model, limit=0)


def test_loaders_and_mappings():
    model, inputs, targets, _ = untrained("dense", 40, 0, "categorical")
    expected = polish(model, (inputs, targets), L2, **QUIET)
    examples = torch.utils.data.TensorDataset(inputs, targets)
    loader = torch.utils.data.DataLoader(examples, batch_size=7, shuffle=True)
    assert_same(polish(model, loader, L2, **QUIET), expected)
    assert_same(polish(model, {"input": inputs, "labels": targets}, L2, **QUIET), expected)


def test_half_precision_is_warned_of():
    model, inputs, targets, _ = untrained("dense", 40, 0, "categorical")
    half = model.to(torch.bfloat16)
    with pytest.warns(ConvergenceWarning, match=r"polish model\.double"):
        found = polish(half, (inputs.float(), targets), L2, progress=False)
    assert found[2].weight.dtype == torch.bfloat16


BAD = {
    "l2: expected a finite Python number above zero": {"l2": 0},
    "l2: expected a number, got .auto.": {"l2": "auto"},
    "l2: expected patterns that match a parameter, got 'fc": {"l2": {"fc*": 0.1}},
    "params: expected a pattern that matches a parameter, got 'fc": {"params": ["fc*"]},
    "likelihood: expected one of": {"likelihood": "poisson"},
    "tolerance: expected a number above zero": {"tolerance": 0},
    "max_iterations: expected a whole number from 1 on": {"max_iterations": 0},
    "memory_budget: expected a whole number": {"memory_budget": 0},
    "batch_size: expected a whole number": {"batch_size": 0},
    "Data: expected a DataLoader": {"data": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_used_is_refused(message):
    model, inputs, targets, _ = untrained("dense", 29, 0, "categorical")
    before = model_state(model)
    options = {"data": (inputs, targets), "l2": L2, "progress": False, **BAD[message]}
    with pytest.raises(ValueError, match=message) as caught:
        polish(model, **options)
    assert isinstance(caught.value, DeltaBarsError)
    assert model_state(model) == before


def test_bad_targets_are_refused():
    with pytest.raises(DataError, match="Targets: expected class numbers from 0 to 2"):
        polish(dense(), (torch.randn(3, 4), torch.tensor([0, 1, 3])), L2, progress=False)


def test_several_processes_are_refused(tmp_path):
    model, inputs, targets, _ = untrained("linear", 20, 0, "categorical")

    def work(process):
        with pytest.raises(DeltaBarsError, match="polish: expected one process, got 2"):
            polish(model, (inputs, targets), L2)
        with alone():
            return weights(polish(model, (inputs, targets), L2, **QUIET))

    first, second = results(2, work, tmp_path / "processes")
    assert torch.equal(first, second)
