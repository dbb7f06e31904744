"""Gaussian regression: closed forms, noise given and estimated, intervals that cover."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import BadValueError
from deltabars.fitting.tuning import log_evidence
from deltabars.likelihoods.gaussian import Gaussian
from tests.conftest import cached_case
from tests.networks import make_case

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
EXACT = {"rtol": 0, "atol": 1e-8}


class Line:
    """Bayesian linear regression with prior N(0, τ⁻¹I) and noise σ, in closed form.

    The posterior of the weights is N((XᵀX/σ² + τI)⁻¹ Xᵀy/σ², (XᵀX/σ² + τI)⁻¹). The cost
    mean ½r² + (λ/2)‖ω‖² is −log posterior times σ²/N, with τ = Nλ/σ².
    """

    def __init__(self, seed, count=40, size=5, outputs=1, noise=0.3, l2=0.02):
        generator = torch.Generator().manual_seed(seed)
        new = {"generator": generator, "dtype": torch.float64}
        self.l2, self.count, self.outputs = l2, count, outputs
        self.inputs, self.unseen = torch.randn(count, size, **new), torch.randn(9, size, **new)
        self.truth = torch.randn(outputs, size, **new)
        self.targets = self.inputs @ self.truth.T + noise * torch.randn(count, outputs, **new)
        gram = self.inputs.T @ self.inputs
        penalised = gram + count * l2 * torch.eye(size, dtype=torch.float64)
        self.weights = torch.linalg.solve(penalised, self.inputs.T @ self.targets)
        self.inverse = torch.linalg.inv(penalised)  # the posterior covariance over σ²
        self.parameters = outputs * float((gram @ self.inverse).trace())  # γ
        self.model = nn.Linear(size, outputs, bias=False).double()
        with torch.no_grad():
            self.model.weight.copy_(self.weights.T)

    def estimate(self):
        squares = float((self.targets - self.inputs @ self.weights).square().sum())
        return math.sqrt(squares / (self.count * self.outputs - self.parameters))

    def std(self, noise):
        variance = ((self.unseen @ self.inverse) * self.unseen).sum(1)
        return noise * variance.sqrt()[:, None].expand(-1, self.outputs)

    def fit(self, estimator="ggn", likelihood="gaussian", **options):
        return deltabars.fit(
            self.model, (self.inputs, self.targets),
            **{"l2": self.l2, "rank": self.model.weight.numel(), "progress": False, **options},
            estimator=estimator, likelihood=likelihood,
        )  # fmt: skip


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("estimator", ["hessian", "ggn"])
@pytest.mark.parametrize("noise", [1.0, 0.3, 7.0])
def test_known_noise_is_the_closed_form(estimator, outputs, noise):
    line = Line(0, outputs=outputs)
    fit = line.fit(estimator, Gaussian(noise))
    out = fit.predict(line.unseen)
    exact = line.std(noise)
    torch.testing.assert_close(out.mean, line.unseen @ line.weights, **EXACT)
    torch.testing.assert_close(out.std, exact, **EXACT)
    torch.testing.assert_close(out.total_std, (exact.square() + noise**2).sqrt(), **EXACT)
    assert fit.noise == noise
    assert fit.effective_parameters == pytest.approx(line.parameters, abs=1e-8)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("estimator", ["hessian", "ggn"])
def test_estimated_noise_is_the_closed_form(estimator, outputs):
    line = Line(0, outputs=outputs)
    noise = line.estimate()
    module = nn.MSELoss()  # r² over N·C: (2/C) times mean ½‖r‖²
    for likelihood, l2 in (
        (Gaussian(None), line.l2),
        (Gaussian("estimate"), line.l2),
        (module, line.l2 * 2 / outputs),
    ):
        fit = line.fit(estimator, likelihood, l2=l2)
        assert fit.noise == pytest.approx(noise, abs=1e-8)
        out = fit.predict(line.unseen)
        torch.testing.assert_close(out.std, line.std(noise), **EXACT)
        total = (line.std(noise).square() + noise**2).sqrt()
        torch.testing.assert_close(out.total_std, total, **EXACT)


@cache
def network(seed=0):
    return make_case("dense", count=29, l2=0.1, seed=seed, likelihood="gaussian")


def exact_covariance(case, estimator, noise):
    """Σ of the cost ½‖r‖²/σ² + (λ/σ²)/2·‖ω‖², with its own dense matrices."""
    oracle, eye = case.oracle, case.oracle.eye()
    data = {name: oracle.matrix(name) - case.l2 * eye for name in ("hessian", "opg", "ggn")}
    at = {name: part / noise**2 + case.l2 / noise**2 * eye for name, part in data.items()}
    at["opg"] = data["opg"] / noise**4 + case.l2 / noise**2 * eye
    if estimator == "sandwich":
        inverse = torch.linalg.inv(at["hessian"])
        return inverse @ at["opg"] @ inverse / oracle.count
    return torch.linalg.inv(at[estimator]) / oracle.count


@pytest.mark.parametrize("noise", [0.4, 2.5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_noise_of_a_network_is_exact(estimator, noise):
    case = network()
    assert float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
    options = {"l2": case.l2, "estimator": estimator, "progress": False}
    rows = case.oracle.sensitivity(case.unseen, "probability")
    exact = (rows @ exact_covariance(case, estimator, noise) @ rows.mT).diagonal(dim1=1, dim2=2)
    whole = deltabars.fit(
        case.model, case.data, likelihood=Gaussian(noise), rank=case.oracle.size, **options
    )
    torch.testing.assert_close(whole.predict(case.unseen).std, exact.sqrt(), **EXACT)
    # The spectrum of a Hessian below λ is corrected, see docs/numbers.md.
    for rank in () if estimator == "hessian" else (1, 20):
        out = whole.predict(case.unseen, rank=rank)
        assert bool((out.std_low - 1e-9 <= exact.sqrt()).all())
        assert bool((exact.sqrt() <= out.std_high + 1e-9).all())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_with_noise_is_the_fit_of_that_noise(estimator):
    case = network()
    options = {"l2": case.l2, "estimator": estimator, "rank": 9, "progress": False}
    unit = deltabars.fit(case.model, case.data, likelihood="gaussian", **options)
    unit.predict(case.unseen)
    moved = unit.with_noise(0.4)
    fresh = deltabars.fit(case.model, case.data, likelihood=Gaussian(0.4), **options)
    assert unit.noise == 1.0
    for name in ("std", "std_error", "total_std", "score"):
        there, here = (getattr(f.predict(case.unseen), name) for f in (moved, fresh))
        torch.testing.assert_close(there, here, rtol=1e-12, atol=0)
    estimated = deltabars.fit(case.model, case.data, likelihood=Gaussian(None), **options)
    assert unit.with_noise("estimate").noise == estimated.noise


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_estimate_solves_its_equation(estimator):
    case = network(1)
    fit = deltabars.fit(
        case.model, case.data, likelihood=Gaussian(None), l2=case.l2, estimator=estimator,
        rank=case.oracle.size, progress=False,
    )  # fmt: skip
    residuals = case.model(case.inputs).detach() - case.targets
    main = "hessian" if estimator == "sandwich" else estimator
    data = case.oracle.matrix(main) - case.l2 * case.oracle.eye()
    scale = fit.noise**2 if main == "opg" else 1.0
    values = torch.linalg.eigvalsh(data / scale)
    gamma = float((values / (values + case.l2)).sum())
    assert fit.effective_parameters == pytest.approx(gamma, abs=1e-6)
    left = residuals.numel() - gamma
    assert fit.noise**2 * left == pytest.approx(float(residuals.square().sum()), rel=1e-9)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")  # of other λs
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_another_l2_has_its_own_estimated_noise(estimator, tmp_path):
    """Its noise, error bars and evidence are those of a fit with that λ; a given noise stays."""
    case = network()
    options = {"estimator": estimator, "rank": 9, "progress": False}
    fit = deltabars.fit(case.model, case.data, l2=0.1, likelihood=nn.MSELoss(), **options)
    assert fit.l2 == pytest.approx(0.1 * case.targets.shape[1] / 2)
    fit.save(tmp_path / "fit")
    tuned = fit.tune_l2()
    for l2 in (0.02, tuned.l2):
        again = deltabars.fit(case.model, case.data, l2=l2, likelihood=Gaussian(None), **options)
        assert again.noise != pytest.approx(fit.noise, rel=1e-6)
        moved = fit.with_l2(l2)
        for other in (
            moved,
            deltabars.load(tmp_path / "fit", case.model).with_l2(l2),
            fit.with_noise(3.0).with_noise("estimate").with_l2(l2),
        ):
            assert other.noise == pytest.approx(again.noise, rel=1e-10)
            there, here = (each.predict(case.unseen) for each in (other, again))
            torch.testing.assert_close(there.std, here.std, rtol=1e-10, atol=0)
            torch.testing.assert_close(there.total_std, here.total_std, rtol=1e-10, atol=0)
        level = torch.tensor([l2], dtype=torch.float64)
        for one, own in zip(log_evidence(fit, level), log_evidence(again, level), strict=True):
            torch.testing.assert_close(one, own, rtol=1e-10, atol=0)
    assert tuned.fit.noise == pytest.approx(again.noise, rel=1e-10)
    for noise in (0.4, fit.noise):
        assert fit.with_noise(noise).with_l2(3.0).noise == noise


@pytest.mark.parametrize("estimator", ["ggn", "hessian"])
def test_the_tuned_l2_is_the_best_of_l2_and_noise_together(estimator):
    """MacKay's two conditions hold at once: λN‖ω̂‖²/σ² = γ and σ² = RSS/(N·C − γ)."""
    line = Line(3, count=25, size=8, noise=0.8, l2=0.05, outputs=2)
    tuned = line.fit(estimator, Gaussian(None)).tune_l2()
    assert not tuned.at_edge
    best, square = tuned.fit, float(line.weights.square().sum())
    share = best.effective_parameters
    assert best.l2 * 25 * square / best.noise**2 == pytest.approx(share, rel=1e-4)
    residuals = line.targets - line.inputs @ line.weights
    assert best.noise**2 * (50 - share) == pytest.approx(float(residuals.square().sum()), rel=1e-9)


@pytest.mark.parametrize(("estimator", "runs"), [("ggn", 60), ("sandwich", 25)])
def test_intervals_of_simulated_data_cover_as_they_say(estimator, runs):
    """Training sets, noise and targets are drawn anew; few examples, so that both parts count."""
    found = {0.5: [], 0.9: []}
    epistemic = []
    for seed in range(runs):
        line = Line(seed, count=60, size=8, noise=0.7, l2=1e-4)
        generator = torch.Generator().manual_seed(10_000 + seed)
        new = {"generator": generator, "dtype": torch.float64}
        inputs = torch.randn(100, 8, **new)
        out = line.fit(estimator, Gaussian("estimate")).predict(inputs)
        targets = inputs @ line.truth.T + 0.7 * torch.randn(100, 1, **new)
        for level, shares in found.items():
            low, high = out.interval(level)
            shares.append(float(((low <= targets) & (targets <= high)).double().mean()))
        epistemic.append(float((out.std / out.total_std).square().mean()))
    assert sum(epistemic) / runs > 0.1  # of the variance: leaving it out would show
    for level, shares in found.items():
        # The 100 targets of a run share weights and σ̂; the runs are independent. Binomially a run
        # has a std of up to 0.05, and σ̂, known to 1/√(2·52) = 10 %, moves the coverage by up to
        # 0.043: at most 0.066 together, and three of its kind over √runs.
        assert sum(shares) / runs == pytest.approx(level, abs=3 * 0.066 / runs**0.5)


def test_a_prediction_of_real_numbers():
    line = Line(0, outputs=2)
    out = line.fit("ggn", Gaussian(0.3)).predict(line.unseen)
    for level in (0, 1, -0.1, 90, "0.9", True, math.nan):
        with pytest.raises(BadValueError, match="level: expected a number between 0 and 1"):
            out.interval(level)
    assert out.label is None
    assert torch.equal(out.noise, torch.full((9, 2), 0.3, dtype=torch.float64))
    low, high = out.interval()
    quantile = 1.6448536269514722  # of the normal distribution at 0.95
    torch.testing.assert_close(high - out.mean, quantile * out.total_std, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.mean - low, quantile * out.total_std, rtol=1e-12, atol=0)
    assert torch.equal(out[2:5].interval()[0], low[2:5])
    joined = deltabars.Prediction.concatenate([out[:4], out[4:]])
    assert torch.equal(joined.total_std, out.total_std)
    assert "label" not in out.numpy()


def test_classes_have_neither_noise_nor_intervals():
    case = cached_case("dense")
    fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=3, progress=False)
    out = fit.predict(case.unseen)
    assert fit.noise is out.noise is out.total_std is None
    with pytest.raises(BadValueError, match=r"interval: expected .*Gaussian.*got one of classes"):
        out.interval()
    with pytest.raises(BadValueError, match=r"noise: expected .*Gaussian.*got categorical"):
        fit.with_noise(0.3)


def test_noise_that_cannot_be_estimated():
    line = Line(0, count=40)
    exact = line.inputs @ line.model.weight.detach().T
    options = {"rank": 5, "progress": False, "likelihood": Gaussian(None), "estimator": "ggn"}
    with pytest.raises(BadValueError, match=r"got none: every target is met exactly. Give it"):
        deltabars.fit(line.model, (line.inputs, exact), l2=1e-3, **options)
