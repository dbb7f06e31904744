"""λ from the data: the log marginal likelihood against dense determinants."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

import deltabars
from deltabars.errors import BadValueError
from deltabars.fitting.tuning import TUNING_SAMPLES, log_evidence
from tests.conftest import cached_case
from tests.networks import make_case, train
from tests.silence import randn, seeded


def fitted(case, estimator="opg", rank=None, **options):
    options = {"l2": case.l2, "progress": False, **options}
    rank = case.oracle.size if rank is None else rank
    return deltabars.fit(case.model, case.data, estimator=estimator, rank=rank, **options)


def dense_evidence(case, estimator):
    """log p(data | λ) by determinants of prior and posterior precisions, both times 1/N."""
    data_part = case.oracle.matrix(estimator) - case.l2 * case.oracle.eye()
    loss = float(case.oracle.losses(case.oracle.point).sum())
    square = float(case.oracle.point.square().sum())

    def evidence(level):
        posterior = torch.linalg.slogdet(data_part + level * case.oracle.eye()).logabsdet
        prior = case.oracle.size * torch.log(torch.tensor(level, dtype=torch.float64))
        return -loss - 0.5 * case.oracle.count * level * square + 0.5 * float(prior - posterior)

    return evidence


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [("linear", "opg"), ("linear", "hessian"), ("dense", "ggn"), ("convolutional", "opg")],
)
def test_with_all_pairs_it_is_the_dense_one(kind, estimator):
    """Of a sandwich it is that of the Hessian, here of a convex cost."""
    case = cached_case(kind, l2=0.05)
    exact = dense_evidence(case, estimator)
    own = fitted(case, "sandwich" if estimator == "hessian" else estimator)
    levels = torch.logspace(-4, 2, 15, dtype=torch.float64)
    expected = torch.tensor([exact(float(level)) for level in levels], dtype=torch.float64)
    for found in log_evidence(own, levels):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("estimator", ["opg", "ggn"])
@pytest.mark.parametrize("solver", ["dense", "incremental"])
def test_intervals_hold_at_every_rank(estimator, solver):
    levels = torch.logspace(-6, 3, 10, dtype=torch.float64)
    for seed, kind in enumerate(("dense", "rectified")):
        case = make_case(kind, l2=(0.05, 0.005)[seed], seed=seed)
        exact = dense_evidence(case, estimator)
        expected = torch.tensor([exact(float(level)) for level in levels], dtype=torch.float64)
        widths = []
        for rank in (1, 4, 12, 25):
            fit = fitted(case, estimator, rank, solver=solver)
            value, low, high = log_evidence(fit, levels)
            assert bool(((low <= expected + 1e-7) & (expected <= high + 1e-7)).all())
            assert bool(((low <= value) & (value <= high)).all())
            widths.append(float((high - low).sum()))
        assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("estimator", ["opg", "ggn"])
def test_it_finds_the_lambda_that_a_dense_computation_finds(estimator):
    case = make_case("dense", l2=0.02, seed=20)
    evidence = dense_evidence(case, estimator)
    best = minimize_scalar(lambda x: -evidence(math.exp(x)), bracket=(-5, -3), tol=1e-9)
    expected, found = math.exp(best.x), fitted(case, estimator).tune_l2()
    assert found.l2 == pytest.approx(expected, rel=1e-5)
    assert float(found) == found.l2 == found.fit.l2
    assert not found.at_edge
    few = fitted(case, estimator, 12).tune_l2()
    assert few.l2 == pytest.approx(expected, rel=0.2)
    # MacKay: at the maximum λN‖ω̂‖² is the number of well-determined parameters.
    square = float(case.oracle.point.square().sum())
    number = found.fit.effective_parameters
    assert found.l2 * case.oracle.count * square == pytest.approx(number, rel=1e-4)
    assert bool((found.low <= found.values).all() & (found.values <= found.high).all())
    assert f"l2 = {found.l2}" in repr(found)


def test_several_lambdas_are_tuned_by_a_common_factor():
    case = cached_case("dense", l2=0.05)
    one = fitted(case).tune_l2()
    several = fitted(case, l2={"*": 0.05}).tune_l2()
    assert several.l2 == {"*": pytest.approx(one.l2, rel=1e-6)}
    torch.testing.assert_close(several.values.max(), one.values.max(), rtol=1e-9, atol=1e-7)
    with pytest.raises(BadValueError, match="expected one number, got several"):
        float(several)


def test_a_search_that_ends_at_its_edge_says_so():
    """Weights of zero: the larger λ, the better."""
    model = torch.nn.Linear(4, 3).double().requires_grad_()
    model.load_state_dict({name: 0 * value for name, value in model.state_dict().items()})
    data = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 3
    with pytest.warns(deltabars.errors.OptimumWarning):
        fit = deltabars.fit(model, data, l2=0.1, rank=15, progress=False)
    found = fit.tune_l2()
    assert found.at_edge
    assert "at the edge" in repr(found)


def mean_loss(out, targets, likelihood) -> float:
    """The mean −log p of targets by averaged probabilities, or by the total std of numbers."""
    if likelihood == "gaussian":
        scatter = torch.distributions.Normal(out.mean, (1 + out.variance).sqrt())
    elif likelihood == "bernoulli":
        scatter = torch.distributions.Bernoulli(out.moderated)
    else:
        scatter = torch.distributions.Categorical(out.moderated)
    targets = targets if likelihood == "categorical" else targets.double()
    return float(-scatter.log_prob(targets).reshape(len(targets), -1).sum(1).mean())


@pytest.mark.parametrize("l2", [0.05, "auto"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_validation_finds_the_least_loss(likelihood, l2):
    """Each point of the curve is the best of 15 temperatures of predictions with that λ."""
    case = make_case("dense", l2=0.05, seed=30, likelihood=likelihood)
    other = make_case("dense", l2=0.05, seed=31, likelihood=likelihood)
    fit = fitted(case, "ggn", likelihood=likelihood, l2=l2)
    found = fit.tune_l2([other.data], method="validation")
    assert "validation loss" in repr(found)
    # Of those that 29 examples hardly tell apart, by two nats of all, that nearest to the fit's.
    alike = (found.values <= found.values.min() + 2 / 29).nonzero()[:, 0]
    best = int(alike[(found.levels[alike] / fit.level).log().abs().argmin()])
    assert found.l2 == pytest.approx(float(found.levels[best]))
    assert len(found.levels) == len(found.temperatures) == 61
    assert found.fit.temperature == float(found.temperatures[best])
    assert found.fit.averages == fit.averages
    tried = torch.logspace(-0.4, 0.4, 15).double() if likelihood != "gaussian" else torch.ones(1)
    for place in (0, 47, best, 60):
        moved = fit.with_l2(float(found.levels[place]))
        losses = [
            mean_loss(
                moved.moved(temperature=float(t)).predict(
                    other.inputs, samples=TUNING_SAMPLES
                ),
                other.targets, likelihood,
            )
            for t in tried
        ]  # fmt: skip
        # The points of the average are turned by the root of V, which is another one at each T
        # where log p is what scatters: as many points differ by so much of the loss.
        near = 1e-4 if likelihood == "categorical" else 1e-8
        assert float(found.values[place]) == pytest.approx(min(losses), rel=near)
        at = float(tried[losses.index(min(losses))])
        assert float(found.temperatures[place]) == pytest.approx(at, rel=1e-6)


@pytest.mark.parametrize("times", [0.3, 1, 3])
def test_confidence_is_a_matter_of_the_temperature_and_not_of_lambda(times):
    """Logits that are all too small or too large: λ stays within the search, and T makes up."""
    for seed in range(3):
        teacher, inputs = randn(6, 3, seed=seed), randn(400, 6, seed=seed + 10)
        generator = torch.Generator().manual_seed(seed)
        chances = (1.5 * inputs @ teacher).softmax(1)
        targets = torch.multinomial(chances, 1, generator=generator)[:, 0]
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), seed)
        train(model, inputs[:200], targets[:200], 0.005)
        with torch.no_grad():
            for part in model[2].parameters():
                part *= times
        fit = deltabars.fit(model, (inputs[:200], targets[:200]), rank=53, progress=False)
        found = fit.tune_l2((inputs[200:], targets[200:]), method="validation")
        heat = found.fit.temperature
        assert {0.3: heat < 0.7, 1: 0.6 < heat < 1.7, 3: heat > 1.5}[times], (seed, heat)
        plain = fit.moved(temperature=1.0).predict(inputs[200:])
        before = mean_loss(plain, targets[200:], "categorical")
        after = mean_loss(found.fit.predict(inputs[200:]), targets[200:], "categorical")
        assert after < before + 1e-3
        assert not found.at_edge, (seed, found)


def test_refused():
    case = cached_case("dense", l2=0.05)
    fit = fitted(case)
    wrong = case.inputs, case.targets + 3
    for data, method, match in (
        (None, "guess", "method: expected one of"),
        (None, "validation", "data: expected validation data"),
        (case.data, "marginal_likelihood", "data: expected none for method='marginal"),
        (wrong, "validation", "Targets: expected"),
    ):
        with pytest.raises(BadValueError, match=match):
            fit.tune_l2(data, method=method)
