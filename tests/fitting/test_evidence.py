"""λ by the evidence, l2="auto", against dense determinants; what a fit with it says and does."""

from __future__ import annotations

import math
import re
import warnings
from functools import partial

import pytest
import torch
from scipy.optimize import brentq
from torch import nn

import deltabars
from deltabars.errors import BadValueError, EvidenceWarning, OptimumWarning
from deltabars.fitting.tuning import temperature_by_leaving_out
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.prediction.averaging import normal_points
from deltabars.problem.data import Batch
from tests import processes, stopping
from tests.conftest import cached_case
from tests.networks import make_case
from tests.oracles import LOSSES, Oracle
from tests.silence import randn

pytestmark = pytest.mark.filterwarnings("error::deltabars.errors.EvidenceWarning")


def fitted(case, estimator="ggn", rank=None, **options):
    rank = case.oracle.size if rank is None else rank
    given = {"progress": False, "estimator": estimator, "rank": rank, **options}
    return deltabars.fit(case.model, case.data, **given)


def exact_level(data, case, precision=lambda level, counted: 1.0) -> float:
    """The λ of Nλ Σ fω²/σ² = Σ f² from a dense matrix (P, P); 1/σ² may depend on λ and Σ f."""
    values, vectors = torch.linalg.eigh(data)
    values, squares = values.clamp(min=0), (vectors.T @ case.oracle.point).square()

    def beyond(x):
        level = math.exp(x)
        share = values / (values + level)
        weight = precision(level, float(share.sum()))
        left = case.oracle.count * level * weight * float((share * squares).sum())
        return left - float(share.square().sum())

    return math.exp(brentq(beyond, -25.0, 8.0, xtol=1e-12))


def data_part(case, estimator):
    name = "hessian" if estimator == "sandwich" else estimator
    return case.oracle.matrix(name) - case.l2 * case.oracle.eye()


class TestLevel:
    @pytest.mark.parametrize(
        ("kind", "estimator", "likelihood"),
        [
            ("dense", "ggn", "categorical"), ("convolutional", "opg", "categorical"),
            ("linear", "hessian", "categorical"), ("linear", "sandwich", "bernoulli"),
            ("dense", "ggn", "bernoulli"), ("rectified", "ggn", "categorical"),
        ],
    )  # fmt: skip
    def test_with_all_pairs_it_is_the_dense_one(self, kind, estimator, likelihood):
        """Of a Hessian that of a convex cost, whose data part has no eigenvalue below zero."""
        case = make_case(kind, l2=0.02, seed=20, likelihood=likelihood)
        fit = fitted(case, estimator, likelihood=likelihood)
        exact = exact_level(data_part(case, estimator), case)
        assert fit.l2 == fit.level == pytest.approx(exact, rel=1e-4)
        known = fit.diagnostics["l2"]
        assert known["how"] == "auto"
        assert known["value"] == known["evidence"] == fit.l2
        assert known["evidence_low"] == pytest.approx(fit.l2, rel=1e-6)
        assert known["evidence_high"] == pytest.approx(fit.l2, rel=1e-6)
        # It is the fit that is made with that λ.
        other = fitted(case, estimator, likelihood=likelihood, l2=fit.l2)
        for spread in ("posterior", "sampling"):
            asked = {"moderation": None, "spread": spread}
            ours, theirs = (each.predict(case.unseen, **asked).std for each in (fit, other))
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=0)

    @pytest.mark.parametrize("noise", [0.5, "estimate"])
    @pytest.mark.parametrize("estimator", ["ggn", "hessian", "opg"])
    def test_of_regression(self, estimator, noise):
        """With σ the root of RSS/(N·C − γ) where it is estimated; G's data part is over σ²."""
        case = make_case("linear", count=40, l2=0.02, seed=3, likelihood="gaussian")
        fit = fitted(case, estimator, likelihood=Gaussian(noise))
        own = Oracle(case.model, case.inputs, case.targets, 0.0, likelihood="gaussian")
        squares = 2 * float(own.losses(own.point).sum())  # RSS
        data = own.matrix(estimator)

        def precision(level, counted):
            left = case.targets.numel() - counted
            return noise**-2 if noise == 0.5 else left / squares

        if estimator == "opg":  # at the noise of the fit, whose level it is
            data, precision = data * fit.noise**-2, lambda level, counted: fit.noise**-2
        exact = exact_level(data, case, precision)
        assert fit.l2 == pytest.approx(exact, rel=1e-4)
        values = torch.linalg.eigvalsh(data)
        counted = float((values / (values + exact)).sum())
        expected = 0.5 if noise == 0.5 else (squares / (case.targets.numel() - counted)) ** 0.5
        assert fit.noise == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("times", [1.0, 30.0])
    def test_weights_that_no_data_touch_do_not_count(self, times):
        """Inputs that are always zero, with weights of any size: λ stays."""
        case = make_case("linear", l2=0.02, seed=3)
        wide = nn.Linear(case.inputs.shape[1] + 5, case.model.out_features).double()
        with torch.no_grad():
            wide.weight.mul_(times)
            wide.weight[:, : case.inputs.shape[1]] = case.model.weight
            wide.bias.copy_(case.model.bias)
        inputs = torch.cat([case.inputs, case.inputs.new_zeros(len(case.inputs), 5)], 1)
        fit = deltabars.fit(wide, (inputs, case.targets), progress=False)
        assert fit.l2 == pytest.approx(fitted(case).l2, rel=1e-6)

    @pytest.mark.parametrize("estimator", ["opg", "ggn"])
    @pytest.mark.parametrize("solver", ["krylov", "dense"])
    def test_the_interval_holds_it_at_every_rank(self, estimator, solver):
        for seed, kind in enumerate(("dense", "rectified", "convolutional")):
            case = make_case(kind, l2=(0.05, 0.005, 0.02)[seed], seed=seed)
            exact, widths = exact_level(data_part(case, estimator), case), []
            for rank in (1, 4, 12, 25):
                found = fitted(case, estimator, rank, solver=solver).diagnostics["l2"]
                low, value, high = (
                    found[name] for name in ("evidence_low", "evidence", "evidence_high")
                )
                assert low * (1 - 1e-6) <= exact <= high * (1 + 1e-6), (kind, rank)
                assert low * (1 - 1e-9) <= value <= high * (1 + 1e-9), (kind, rank)
                widths.append(math.log(high / low))
            assert widths == sorted(widths, reverse=True)
            assert widths[-1] < 0.2 < widths[0]

    @pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
    def test_the_interval_holds_it_where_an_incremental_svd_drops_much(self):
        case = make_case("linear", count=400, l2=0.001)
        exact = exact_level(data_part(case, "ggn"), case)
        for rank in (2, 4, 6):
            options = {"solver": "incremental", "memory_budget": 200_000}
            found = fitted(case, "ggn", rank, **options).diagnostics["l2"]
            assert found["evidence_low"] <= exact <= found["evidence_high"], rank

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"tolerance": 0.02},
            {"probe": randn(9, 4)},
        ],
        ids=["", "tolerance", "probe"],
    )
    def test_with_an_automatic_rank(self, options):
        """The rank is chosen at the λ that is found, not at the one to begin with."""
        case = make_case("dense", l2=0.02, seed=20)
        fit = fitted(case, rank="auto", **options)
        exact = exact_level(data_part(case, "ggn"), case)
        assert fit.l2 == pytest.approx(exact, rel=0.05)
        known = fit.diagnostics["l2"]
        assert known["evidence_low"] <= exact <= known["evidence_high"]
        assert fit.rank < case.oracle.size
        out = fit.predict(case.inputs)
        assert float((out.score_error / out.score).max()) < 0.1
        given = fitted(case, rank="auto", l2=fit.l2, **options)
        assert abs(fit.rank - given.rank) <= 2

    @pytest.mark.parametrize("l2", ["auto", 0.01])
    def test_of_a_regression_with_no_fewer_pairs_than_targets(self, l2):
        """The noise cannot be estimated below some λ, where the pairs explain every target."""
        case = make_case("dense", count=12, l2=0.02, likelihood="gaussian")
        options = {"likelihood": Gaussian("estimate"), "l2": l2}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = fitted(case, "opg", **options)
        assert fit.rank >= case.targets.numel()
        known = fit.diagnostics["l2"]
        assert 0 < known["evidence_low"] <= known["evidence"] * (1 + 1e-9)
        assert 0 < fit.noise < math.inf


@pytest.mark.parametrize("name", ["gradient_to_noise", "distance_from_optimum"])
def test_one_lambda_or_that_of_a_pattern_is_the_same_fit(name):
    case = make_case("dense", l2=0.02, seed=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = (fitted(case, l2=l2).diagnostics[name] for l2 in (1e-3, {"*": 1e-3}))
    assert one == pytest.approx(other, rel=1e-6)


class TestResumed:
    @pytest.mark.parametrize(("way", "states"), [("ggn", 6), ("auto", 4), ("sandwich", 20)])
    def test_a_killed_fit_ends_with_the_same_bits(self, way, states, tmp_path):
        options = {**stopping.WAYS[way], "l2": "auto"}
        options.pop("tolerance", None)
        plain = stopping.fit(**options)
        stopping.kill_after(tmp_path / "kept", states, **options)
        again = stopping.fit(tmp_path / "kept", **options)
        at_once = stopping.fit(tmp_path / "kept", **options)
        for found in (again, at_once):
            assert not stopping.differing(found, plain)
            assert (found.l2, found.temperature) == (plain.l2, plain.temperature)
            assert found.diagnostics["l2"] == plain.diagnostics["l2"]
            x = stopping.subject()[1][0][:4]
            for spread in ("posterior", "sampling"):
                ours, theirs = (each.predict(x, spread=spread) for each in (found, plain))
                for part in ("std", "std_low", "std_high", "moderated"):
                    assert torch.equal(getattr(ours, part), getattr(theirs, part))


class TestSaid:
    def test_weights_of_zero_are_refused(self):
        model = nn.Linear(4, 3).double()
        model.load_state_dict({name: 0 * value for name, value in model.state_dict().items()})
        data = randn(20, 4), torch.arange(20) % 3
        with pytest.raises(BadValueError, match=r"^l2: expected weights .* Give a number") as error:
            deltabars.fit(model, data, progress=False)
        assert "\n" not in str(error.value)

    def test_targets_that_are_met_exactly_are_refused(self):
        case = make_case("linear", likelihood="gaussian")
        exact = case.inputs, case.model(case.inputs).detach()
        with pytest.raises(BadValueError, match=r"^[^\n]*every target is met exactly[^\n]*$"):
            deltabars.fit(case.model, exact, likelihood=Gaussian("estimate"), progress=False)

    def test_a_given_lambda_far_from_the_evidence_is_warned_of_with_both(self):
        case = make_case("linear", l2=1e-5, seed=3)
        with pytest.warns(EvidenceWarning) as caught:
            fit = fitted(case, l2=1e-5)
        (said,) = (str(each.message) for each in caught)
        known = fit.diagnostics["l2"]
        assert known["how"] == "given"
        assert known["value"] == fit.l2 == 1e-5
        used, exact = re.search(r"got (\S+), where the evidence says (\S+) \(", said).groups()
        assert float(used) == pytest.approx(1e-5)
        assert float(exact) == pytest.approx(known["evidence"], rel=5e-3)
        assert "l2='auto'" in said
        assert "\n" not in said
        auto = fitted(case)
        assert known["evidence"] == pytest.approx(auto.l2, rel=1e-9)

    def test_within_ten_times_nothing_is_said(self):
        """Nor of the gradient, whose size beside another λ says nothing of it."""
        case = make_case("dense", l2=0.02, seed=20)
        exact = fitted(case).l2
        for times in (0.11, 0.5, 9.0):
            with warnings.catch_warnings():
                warnings.simplefilter("error", EvidenceWarning)
                warnings.simplefilter("ignore", OptimumWarning)
                found = fitted(case, l2=times * exact)
            assert found.diagnostics["l2"]["evidence"] == pytest.approx(exact, rel=1e-6)

    def test_where_the_optimum_is_warned_of_that_names_both(self):
        case = make_case("dense", l2=0.02, seed=20)
        exact = fitted(case).l2
        with pytest.warns(OptimumWarning) as caught:
            fitted(case, l2=300 * exact)
        (said,) = (str(each.message) for each in caught)
        assert f"got {300 * exact:.3g}, where the evidence says {exact:.3g}" in said

    def test_the_default_estimator(self):
        case = cached_case("dense", l2=0.1)
        options = {"progress": False, "rank": 5}
        for given, expected in (
            ({}, "ggn"),
            ({"l2": "auto"}, "ggn"),
            ({"l2": 0.1}, "opg"),
            ({"l2": {"*": 0.1}}, "opg"),
            ({"estimator": "opg"}, "opg"),
        ):
            assert deltabars.fit(case.model, case.data, **options, **given).estimator == expected

    def test_what_is_no_lambda_is_refused(self):
        case = cached_case("dense", l2=0.1)
        for l2 in ("Auto", {"*": "auto"}, -1, float("nan"), None):
            with pytest.raises(BadValueError, match="l2: expected"):
                fitted(case, l2=l2)


def averaged(outputs, covariance, temperature, likelihood, samples):
    """The mean probabilities over the scatter of logits (B, C, C), by points of our own root."""
    points = normal_points(samples, outputs.shape[1], 0)
    natural = outputs / temperature
    if likelihood == "categorical":  # log p scatters without the direction that says nothing
        p = natural.softmax(1)
        turn = torch.eye(outputs.shape[1]).double() - p[:, None]
        covariance, natural = turn @ covariance @ turn.mT, natural.log_softmax(1)
    values, vectors = torch.linalg.eigh(covariance / temperature**2)
    root = vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT
    drawn = natural[:, None] + points @ root
    return (drawn.softmax(2) if likelihood == "categorical" else drawn.sigmoid()).mean(1)


class TestAverages:
    @pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
    @pytest.mark.parametrize("estimator", ["ggn", "opg"])
    def test_the_temperature_is_that_of_the_examples_left_out(self, estimator, likelihood):
        """41 temperatures around 1; each example's logits without it, by its own gradient."""
        case = make_case("dense", count=120, l2=0.003, seed=21, likelihood=likelihood)
        with torch.no_grad():
            for part in case.model[2].parameters():
                part *= 3  # too sure of itself, so that the best one is not 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimumWarning)  # nobody trained it to that
            fit = fitted(case, estimator, likelihood=likelihood)
        own = Oracle(case.model, case.inputs, case.targets, fit.l2, likelihood=likelihood)
        posterior = own.covariance(estimator, case.inputs, "logit")
        scatter = own.covariance(estimator, case.inputs, "logit", "sampling")
        outputs = case.model(case.inputs).detach()
        at = outputs.clone().requires_grad_()
        (pull,) = torch.autograd.grad(LOSSES[likelihood](at, case.targets).sum(), at)
        p = outputs.softmax(1) if likelihood == "categorical" else outputs.sigmoid()
        curved = p.diag_embed() - p[:, :, None] * p[:, None]
        if likelihood == "bernoulli":
            curved = (p * (1 - p)).diag_embed()
        factor = torch.linalg.inv(torch.eye(p.shape[1]).double() - posterior @ curved)
        left = outputs + (factor @ posterior @ pull[:, :, None])[:, :, 0]
        own = left.softmax(1) if likelihood == "categorical" else left.sigmoid()
        tried, losses, away = torch.logspace(-0.4, 0.4, 41).double(), [], []
        for temperature in tried.tolist():
            p = averaged(left, scatter, temperature, likelihood, 128)
            if likelihood == "categorical":
                losses.append(float(-p.gather(1, case.targets[:, None]).log().sum()))
                away.append(float(-(own * p.log()).sum()))
            else:
                losses.append(float(-torch.where(case.targets > 0, p, 1 - p).log().sum()))
                away.append(float(-(own * p.log() + (1 - own) * (1 - p).log()).sum()))
        losses, neutral = torch.tensor(losses), tried[torch.tensor(away).argmin()]
        alike = tried[losses <= losses.min() + 2]  # nats: about what chance makes
        expected = float(alike[(alike / neutral).log().abs().argmin()])
        batches = [Batch(case.inputs, case.targets)]
        assert temperature_by_leaving_out(fit, batches) == pytest.approx(expected, rel=1e-6)
        assert expected > 1
        assert fit.averages == "sampling"
        assert fit.temperature in [pytest.approx(float(each), rel=1e-6) for each in tried]

    @pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
    def test_predictions_are_averaged_over_the_sampling_scatter(self, likelihood):
        """Whatever spread the bars are of; the bars are of the network's own outputs."""
        case = make_case("dense", l2=0.003, seed=21, likelihood=likelihood)
        fit = fitted(case, likelihood=likelihood)
        own = Oracle(case.model, case.inputs, case.targets, fit.l2, likelihood=likelihood)
        outputs = case.model(case.unseen).detach()
        for temperature in (fit.temperature, 0.7):
            scatter = own.covariance("ggn", case.unseen, "logit", "sampling")
            expected = averaged(outputs, scatter, temperature, likelihood, 512)
            for spread in ("posterior", "sampling"):
                out = fit.moved(temperature=temperature).predict(case.unseen, spread=spread)
                torch.testing.assert_close(out.moderated, expected, rtol=0, atol=1e-9)
                exact = own.std("ggn", case.unseen, spread=spread)
                torch.testing.assert_close(out.std, exact, rtol=0, atol=1e-8)

    def test_a_fit_with_a_given_lambda_averages_as_the_paper_does(self):
        case = cached_case("dense", l2=0.1)
        fit = fitted(case, l2=0.1)
        assert (fit.averages, fit.temperature) == ("posterior", 1.0)
        outputs = case.model(case.unseen).detach()
        for spread in ("posterior", "sampling"):
            scatter = case.oracle.covariance("ggn", case.unseen, "logit", spread)
            expected = averaged(outputs, scatter, 1.0, "categorical", 512)
            out = fit.predict(case.unseen, spread=spread)
            torch.testing.assert_close(out.moderated, expected, rtol=0, atol=1e-9)

    def test_numbers_have_no_temperature(self):
        case = make_case("dense", l2=0.02, likelihood="gaussian")
        fit = fitted(case, likelihood=Gaussian("estimate"))
        assert (fit.averages, fit.temperature) == ("posterior", 1.0)
        assert fit.predict(case.unseen).moderated is None


def in_a_process(process: int) -> dict[str, torch.Tensor]:
    """What a fit with l2="auto" finds in this process."""
    del process
    model, data = processes.subject()
    found = {}
    for name, options in {
        "krylov": {"solver": "krylov", "rank": 20},
        "auto": {"rank": "auto", "solver": "krylov"},
        "given": {"estimator": "hessian", "l2": 0.02, "solver": "krylov"},
    }.items():
        fit = processes.fit(model, data, **{"estimator": "ggn", "l2": "auto", **options})
        noted = fit.diagnostics["l2"]
        found[f"{name} l2"] = torch.tensor(
            [noted[key] for key in ("value", "evidence", "evidence_low", "evidence_high")]
        )
        found[f"{name} temperature"] = torch.tensor([fit.temperature])
        for spread in ("posterior", "sampling"):
            out = fit.predict(data[0][:9], spread=spread)
            found[f"{name} {spread}"] = torch.stack([out.std, out.std_low, out.std_high])
            found[f"{name} {spread} mean"] = out.moderated
        found[f"{name} drawn"] = fit.sample(2, seed=1, spread="sampling")
    return found


def test_two_processes_find_what_one_does(tmp_path):
    one = in_a_process(0)
    for found in processes.results(2, partial(in_a_process), tmp_path / "two"):
        for name, expected in one.items():
            # Eigenpairs are those of one process to 1e-6, so are λ and all that follows.
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7, msg=name)
