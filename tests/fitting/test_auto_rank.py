"""rank="auto": as many eigenpairs as a probe needs, and what is said of it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import ConvergenceWarning, DataError
from deltabars.recipes.digits import L2, trained_digits
from tests.conftest import cached_case
from tests.networks import make_case, train
from tests.oracles import Oracle

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")


def fitted(case, estimator="opg", **options):
    given = {"l2": case.l2, "rank": "auto", "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, **given)


def relative(out):
    return float((out.score_error / out.score).max())


@pytest.fixture(scope="module")
def wide():
    """A network of P = 483."""
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    inputs = torch.randn(60, 8, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 3, (60,), generator=draw)
    train(model, inputs, targets, 0.01, steps=200)
    return model, (inputs, targets), torch.randn(9, 8, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("solver", ["krylov", "dense"])
def test_within_the_tolerance_on_the_probe(estimator, solver):
    # Of a convex cost: no eigenvalue of its Hessian is below λ.
    case = cached_case("linear" if estimator == "sandwich" else "convolutional", l2=0.02)
    fit = fitted(case, estimator, probe=case.unseen, tolerance=0.02, solver=solver)
    told = fit.diagnostics["rank"]
    assert (told["stopped_by"], told["probe_inputs"]) == ("tolerance", len(case.unseen))
    found = relative(fit.predict(case.unseen))
    assert found <= 0.02
    assert told["relative_score_error"] == pytest.approx(found, rel=1e-6, abs=1e-6)
    assert fit.rank < case.oracle.size


@pytest.mark.parametrize("estimator", ["opg", "ggn", "hessian"])
def test_no_more_than_it_takes(estimator):
    """One pair less would not do: the dense solver knows all of them, and takes the fewest."""
    case = cached_case("dense", l2=0.02)
    fit = fitted(case, estimator, probe=case.unseen, solver="dense")
    assert relative(fit.predict(case.unseen)) <= 0.05
    assert relative(fit.predict(case.unseen, rank=fit.rank - 1)) > 0.05


@pytest.mark.parametrize(("estimator", "informative"), [("opg", 60), ("ggn", 60 * 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_more_than_the_data_can_say_and_then_it_is_exact(wide, estimator, informative, dtype):
    """Beyond N (C − 1 times as many of a softmax) directions every eigenvalue is λ."""
    model, (inputs, targets), unseen = wide
    given = {"l2": 0.01, "estimator": estimator, "progress": False}
    data = inputs.to(dtype), targets
    fit = deltabars.fit(
        model, data, rank="auto", tolerance=1e-10, probe=unseen.to(dtype), solver="krylov",
        dtype=dtype, **given,
    )  # fmt: skip
    assert fit.rank <= informative + 1
    assert float(fit.spectra[estimator].values[-1]) == pytest.approx(0.01, rel=1e-9)
    out = fit.predict(unseen.to(dtype))
    single = dtype == torch.float32
    # The interval is that of rounding: eps·λ₁/λ, with λ₁/λ some hundreds.
    assert float((out.std_error / out.std).max()) < (1e-3 if single else 1e-9)
    exact = deltabars.fit(model, wide[1], rank=483, solver="dense", **given).predict(unseen)
    torch.testing.assert_close(out.std.double(), exact.std, rtol=1e-3 if single else 1e-8, atol=0)
    assert bool(((out.std_low <= exact.std) & (exact.std <= out.std_high)).all())
    assert fit.diagnostics["rank"]["stopped_by"] == "tolerance"


def test_a_probe_is_drawn_from_the_data():
    case = cached_case("dense", l2=0.02)
    first, second, other = (fitted(case, seed=seed, solver="krylov") for seed in (1, 1, 2))
    assert first.diagnostics["rank"]["probe_inputs"] == 29  # all of them: there are no 32
    assert first.rank == second.rank
    assert relative(first.predict(case.inputs)) <= 0.05
    assert other.diagnostics["rank"]["relative_score_error"] <= 0.05


def test_sandwich_with_two_ranks():
    """Every use of the pairs bears different numbers of them."""
    case = make_case("linear", l2=0.05, seed=11)
    fit = fitted(case, "sandwich", probe=case.unseen, solver="krylov")
    outs = fit.predict(case.unseen, estimator=["hessian", "opg", "sandwich"], covariance=True)
    for name, out in outs.items():
        exact = Oracle(case.model, case.inputs, case.targets, case.l2).std(name, case.unseen)
        assert bool((out.std_low <= exact * (1 + 1e-9)).all())
        assert bool((out.std_high >= exact * (1 - 1e-9)).all())


def test_a_memory_budget_ends_it(wide):
    model, data, unseen = wide
    with pytest.warns(ConvergenceWarning, match=r"with which the memory budget is used up"):
        fit = deltabars.fit(
            model, data, l2=0.01, rank="auto", tolerance=1e-9, probe=unseen, progress=False,
            estimator="ggn", solver="krylov", memory_budget=1 << 21,
        )  # fmt: skip
    told = fit.diagnostics["rank"]
    assert told["stopped_by"] == "memory budget"
    assert told["relative_score_error"] == pytest.approx(relative(fit.predict(unseen)), rel=1e-6)
    assert 0 < fit.rank <= (1 << 21) // (4 * 483 * 8)  # a fourth of it is for the basis


def test_nothing_below_the_floor_is_taken():
    """A Hessian with eigenvalues below λ: however small the tolerance, they stay in the tail."""
    case = make_case("dense", l2=0.05, seed=11)
    fit = fitted(case, "sandwich", probe=case.unseen, tolerance=1e-13, solver="krylov")
    exact = torch.linalg.eigvalsh(case.oracle.hessian())
    assert float(exact[0]) < 0.045
    values = fit.spectra["hessian"].values
    assert len(values) == int((exact > 0.05 * (1 + 1e-9)).sum()) + 1  # and one that is λ
    assert float(values[-1]) == pytest.approx(0.05, rel=1e-9)


def test_saturated_inputs_of_a_probe_are_left_out():
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[300.0], [0.0]]))
        model.bias.zero_()
    data = torch.tensor([[1.0], [-1.0], [0.001], [-0.001]]).repeat(10, 1), torch.arange(40) % 2
    options = {"l2": 1e-3, "rank": "auto", "progress": False}
    with warnings.catch_warnings(action="ignore"):
        outcome = deltabars.fit(model, data, **options).diagnostics["rank"]
        with pytest.raises(DataError, match="their error bars are zero"):
            deltabars.fit(model, data, probe=torch.ones(3, 1), **options)
    assert outcome["probe_inputs_left_out"] > 0


def test_new_inputs_are_within_the_tolerance_of_a_probe_of_the_data():
    """The error is larger on inputs that the probe has not seen: less is aimed at.

    (Without the margin the worst of the test digits is at 1.2 times the tolerance.)
    """
    digits, model, train = trained_digits()
    fit = deltabars.fit(model, train, l2=L2, rank="auto", tolerance=0.05, progress=False)
    told = fit.diagnostics["rank"]
    assert (told["tolerance"], told["target"]) == (0.05, pytest.approx(0.03))
    assert told["relative_score_error"] <= told["target"]
    assert relative(fit.predict(digits.test_images, moderation=None)) <= 0.05
