"""Hard numbers: each answer is right to its stated tolerance, or there is a warning or an error."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import BadValueError, DataError, OptimumWarning, SpectrumWarning
from tests.networks import Case, train
from tests.oracles import Oracle

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
MATRICES = ("opg", "ggn")  # whose interval is a theorem


def fitted(case, estimator="opg", rank=None, **options):
    """A fit at full rank by default. Where the weights are is not what these tests are about."""
    options = {"l2": case.l2, "rank": rank or case.oracle.size, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimumWarning)
        return deltabars.fit(case.model, case.data, estimator=estimator, **options)


def case_of(model, inputs, targets, unseen, l2=0.1) -> Case:
    oracle = Oracle(copy.deepcopy(model).double(), _wide(inputs), _wide(targets), l2)
    return Case(model, inputs, targets, l2, unseen, oracle)


def _wide(values):
    return values.double() if values.is_floating_point() else values


def small(kind="dense", count=12, l2=0.1, trained=True):
    """A network in float64 with a little data of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)]
        model = (nn.Sequential(*layers) if kind == "dense" else nn.Linear(3, 3)).double()
        inputs, unseen = torch.randn(count, 3).double(), torch.randn(5, 3).double()
        targets = torch.randint(0, 3, (count,))
    if trained:
        train(model, inputs, targets, l2, steps=200)
    return case_of(model, inputs, targets, unseen, l2)


def precise_std(case, estimator):
    """The oracle's std, with 1 − p as the sum of the others, right to the last digits.

    In float64 the oracle's own diag(p) − p pᵀ is rounding where a probability is 1 − 1e-17.
    """
    oracle, unseen = case.oracle, _wide(case.unseen)
    p = oracle.outputs(oracle.point, unseen).detach().softmax(1)
    slopes = -p[:, :, None] * p[:, None]  # (B, C, C)
    slopes.diagonal(dim1=1, dim2=2).zero_().sub_(slopes.sum(-1))
    size = slopes.abs().amax(-1, keepdim=True).clamp(min=1e-300)  # squares must not underflow
    f = (slopes / size) @ oracle.jacobian(unseen)
    covariance = f @ oracle.parameter_covariance(estimator) @ f.mT
    return covariance.diagonal(dim1=1, dim2=2).sqrt() * size.squeeze(-1)


def assert_contains(out, exact, slack):
    slack = slack * exact + 1e-150  # the square root of what float64 takes for zero
    assert bool(((out.std_low - slack <= exact) & (exact <= out.std_high + slack)).all())
    assert bool(((out.std - exact).abs() <= out.std_error + slack).all())


@pytest.mark.parametrize("l2", [1e-12, 1e-8, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("solver", ["dense", "krylov", "incremental"])
@pytest.mark.parametrize("estimator", MATRICES)
def test_any_l2_in_float64(estimator, solver, l2):
    """An eigenvalue λ is right to eps·‖A‖/λ of itself, 2e-4 for 1e-12, and so is a std."""
    case = small(trained=False, l2=l2)
    exact = case.oracle.std(estimator, case.unseen)
    whole = fitted(case, estimator, solver=solver)
    tolerance = max(1e-10, 2e-16 / l2)
    torch.testing.assert_close(whole.predict(case.unseen).std, exact, rtol=tolerance, atol=0)
    part = fitted(case, estimator, 9, solver=solver)
    assert_contains(part.predict(case.unseen), exact, tolerance)


@pytest.mark.parametrize("l2", [1e-8, 1e-6, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("solver", ["dense", "krylov"])
@pytest.mark.parametrize("estimator", MATRICES)
def test_any_l2_in_float32_is_right_or_warned_of(estimator, solver, l2):
    case = small(trained=False)
    case = case_of(case.model.float(), case.inputs.float(), case.targets, case.unseen.float(), l2)
    exact = case.oracle.std(estimator, case.unseen.double())
    largest = float(torch.linalg.eigvalsh(case.oracle.matrix(estimator))[-1])
    lost = torch.finfo(torch.float32).eps * largest / l2
    with pytest.warns(SpectrumWarning, match="can tell λ from") if lost > 0.05 else nullcontext():
        found = fitted(case, estimator, solver=solver).predict(case.unseen).std
    # Twice: eigenvalues and eigenvectors, each to eps·‖A‖/λ; and what float32 adds anyhow.
    assert lost > 0.05 or float((found / exact - 1).abs().max()) <= 2 * lost + 1e-5


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("estimator", MATRICES)
def test_logits_up_to_ten_thousand(estimator, scale):
    """Probabilities down to exp(-1e4) = 0; a std below 1e-154 is zero, as its square underflows."""
    case = small(trained=False)
    case.model[2].weight.data *= scale
    case = case_of(case.model, *case.data, case.unseen)
    assert float(case.model(case.unseen).detach().abs().max()) > scale / 2
    exact = precise_std(case, estimator)
    assert_contains(fitted(case, estimator, 9).predict(case.unseen), exact, 1e-9)
    out = fitted(case, estimator).predict(case.unseen)
    torch.testing.assert_close(out.std, exact, rtol=1e-9, atol=1e-150)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("solver", ["dense", "krylov"])
def test_gradients_that_are_all_zero(estimator, solver):
    """Every example is certain beyond doubt: each matrix is λI, and the interval has no width."""
    case = small(kind="linear")
    case.model.weight.data *= 1e5
    targets = case.model(case.inputs).argmax(1)
    case = case_of(case.model, case.inputs, targets, 1e-5 * case.unseen)
    assert float(case.oracle.gradients().abs().max()) < 1e-30
    exact = case.oracle.sensitivity(case.unseen, "probability").norm(dim=-1)
    exact = exact / (case.l2 * case.oracle.count) ** 0.5
    for rank in (1, 5, case.oracle.size):
        out = fitted(case, estimator, rank, solver=solver).predict(case.unseen)
        torch.testing.assert_close(out.std, exact, rtol=1e-10, atol=1e-14)
        assert float(out.std_error.max()) < 1e-12


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("solver", ["dense", "krylov", "incremental"])
@pytest.mark.parametrize("estimator", MATRICES)
def test_fewer_examples_than_pairs(estimator, solver, count):
    case = small(count=count)
    exact = case.oracle.std(estimator, case.unseen)
    for rank in (count, 10, case.oracle.size):
        out = fitted(case, estimator, rank, solver=solver).predict(case.unseen)
        assert_contains(out, exact, 1e-10)
    torch.testing.assert_close(out.std, exact, rtol=1e-9, atol=0)


class OneNumber(nn.Linear):
    def forward(self, x):
        return torch.cat([super().forward(x), -x], 1)


@pytest.mark.parametrize("solver", ["auto", "dense", "krylov"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_parameter_and_two_classes(estimator, solver):
    x = torch.linspace(-1, 2, 8, dtype=torch.float64)[:, None]
    model = OneNumber(1, 1, bias=False).double()
    case = case_of(model, x, (x[:, 0] > 0.3).long(), x[::3])
    out = fitted(case, estimator, 1, solver=solver).predict(case.unseen)
    exact = case.oracle.std(estimator, case.unseen)
    torch.testing.assert_close(out.std, exact, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(out.std[:, 0], out.std[:, 1], rtol=1e-12, atol=0)
    assert float(out.std_error.max()) < 1e-14


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_inputs_of_any_size_in_float64(estimator):
    """With λ on the scale of the matrix the answer is the unscaled one."""
    case, found = small(kind="linear"), []
    for by in (1.0, 1e-30, 1e30):
        model = nn.Linear(3, 3, bias=False).double()
        model.weight = nn.Parameter(case.model.weight.detach() / by)
        moved = case_of(model, case.inputs * by, case.targets, case.unseen * by, 0.1 * by**2)
        out = fitted(moved, estimator, 4).predict(moved.unseen)
        found.append(torch.stack([out.std, out.std_low, out.std_high]))
        torch.testing.assert_close(found[-1], found[0], rtol=1e-8, atol=1e-12)


def test_squares_beyond_float32_are_refused_or_warned_of():
    case = small(kind="linear")
    model = case.model.float()
    large = case_of(model, 1e30 * case.inputs.float(), case.targets, case.unseen.float())
    for solver in ("dense", "krylov", "arpack"):
        with pytest.raises(BadValueError, match=r"Products: .*dtype=torch.float64"):
            fitted(large, "opg", 4, solver=solver)
    model.weight.data *= 1e20
    with pytest.raises(DataError, match="Losses: expected finite values"):
        fitted(large, "opg", 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_models_of_half_precision(estimator, dtype):
    """Weights and inputs are what they are; the arithmetic is float32, or float64 if asked."""
    case = small(kind="linear")
    half = case_of(case.model.to(dtype), case.inputs.to(dtype), case.targets, case.unseen.to(dtype))
    exact = half.oracle.std(estimator, half.unseen.double())
    found = fitted(half, estimator).predict(half.unseen)
    assert found.std.dtype == torch.float32
    torch.testing.assert_close(found.std.double(), exact, rtol=1e-4, atol=0)
    found = fitted(half, estimator, dtype=torch.float64).predict(half.unseen)
    torch.testing.assert_close(found.std, exact, rtol=1e-9, atol=0)
