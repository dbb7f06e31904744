"""Retrained networks: samples of data, the level of the bars, and whether the bars are true."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from scipy import special, stats
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import deltabars
from deltabars import checking
from deltabars.errors import (
    BadValueError,
    DataError,
    DataWarning,
    DeltaBarsError,
    ModelError,
    StorageError,
)
from deltabars.fitting.replicas import small_sample
from tests.fitting.test_evidence import averaged
from tests.networks import make_case, train
from tests.oracles import Oracle
from tests.silence import randn

C4 = {count: math.sqrt(2 / (count - 1)) for count in range(2, 50)}
C4 = {n: c * math.exp(special.gammaln(n / 2) - special.gammaln((n - 1) / 2)) for n, c in C4.items()}


@cache
def line():
    """A linear network of real outputs: its predictions are exactly linear in the weights."""
    return make_case("linear", count=40, l2=0.1, seed=4, likelihood="gaussian")


@cache
def line_fit():
    case = line()
    options = {"l2": case.l2, "likelihood": "gaussian", "estimator": "ggn", "progress": False}
    return deltabars.fit(case.model, case.data, rank=case.oracle.size, **options)


def drawn(count, seed, spread="sampling"):
    """State dicts of that network, drawn from what the fit says of retraining."""
    fit = line_fit()
    vectors = fit.sample(count, seed=seed, spread=spread)
    parts = map(fit.network.parameters.unflatten, vectors)
    return [{name: value.clone() for name, value in part.items()} for part in parts]


INPUTS = randn(60, 4, seed=9)


class TestResample:
    def test_as_many_examples_with_replacement(self):
        inputs, targets = randn(300, 2), torch.arange(300)
        one, labels = deltabars.resample((inputs, targets), seed=3)
        assert torch.equal(one, inputs[labels])
        assert len(labels) == 300
        assert 0.58 < len(labels.unique()) / 300 < 0.68  # 1 − 1/e, and its scatter
        again, other = (deltabars.resample((inputs, targets), seed=seed)[1] for seed in (3, 4))
        assert torch.equal(again, labels)
        assert not torch.equal(other, labels)
        dataset = deltabars.resample(TensorDataset(inputs, targets), seed=3)
        assert isinstance(dataset, Subset)
        assert [int(label) for _, label in dataset] == labels.tolist()

    def test_refused(self):
        data = randn(5, 2), torch.arange(5)
        loader = DataLoader(TensorDataset(*data))
        for given, seed, match in (
            (data, -1, "seed: expected a whole number from 0 on"),
            (data, 0.5, "seed: expected a whole number from 0 on"),
            (loader, 0, r"got DataLoader\. Give its dataset"),
            ((), 0, "resample: expected a Dataset"),
            (3, 0, "resample: expected a Dataset"),
            ((data[0], data[1][:3]), 0, r"expected tensors of one length, got \[3, 5\]"),
            (iter([data]), 0, "resample: expected a Dataset"),
        ):
            with pytest.raises(DeltaBarsError, match=match):
                deltabars.resample(given, seed)


class TestCalibrate:
    def test_replicas_that_the_fit_describes_leave_its_bars_alone(self):
        found = line_fit().calibrate(drawn(300, seed=1), INPUTS).calibration
        own = found["sampling"]
        assert own.replicas == 300
        assert abs(own.factor - 1) < 3 * own.standard_error
        assert own.standard_error < 0.05
        assert own.r_squared > 0.9
        # The other one is off by what the two spreads differ by.
        bars = [
            line_fit().predict(INPUTS, spread=s).std.flatten() for s in ("posterior", "sampling")
        ]
        expected = float(bars[0] @ bars[1] / (bars[0] @ bars[0]))
        other = found["posterior"]
        assert abs(other.factor - expected) < 3 * other.standard_error
        posterior = line_fit().calibrate(drawn(300, 2, "posterior"), INPUTS).calibration
        own = posterior["posterior"]
        assert abs(own.factor - 1) < 3 * own.standard_error

    @pytest.mark.filterwarnings("ignore:calibrate. expected replicas that scatter")  # by chance
    @pytest.mark.parametrize("count", [2, 5])
    def test_the_factor_is_the_slope_and_its_error_is_how_it_scatters(self, count):
        """Over 200 calibrations of so few replicas each; a scatter of 200 is known to 5 %."""
        fit = line_fit()
        replicas = drawn(200 * count, seed=7)
        predicted = torch.stack(
            [INPUTS @ each["weight"].T + each["bias"] for each in replicas]
        ).unflatten(0, (200, count))
        std = fit.predict(INPUTS, spread="sampling").std
        factors, errors = [], []
        for number, means in enumerate(predicted):
            scatter = means.std(0) / C4[count]
            expected = float((std * scatter).sum() / std.square().sum())
            if number < 3 or number % 20 == 0:
                some = replicas[number * count : (number + 1) * count]
                found = fit.calibrate(some, INPUTS).calibration["sampling"]
                assert found.factor == pytest.approx(expected, rel=1e-9)
                assert found.replicas == count
                r2 = stats.linregress(std.flatten(), scatter.flatten()).rvalue ** 2
                assert found.r_squared == pytest.approx(r2, rel=1e-9)
                errors.append(found.standard_error / found.factor)
            factors.append(expected)
        factors = torch.tensor(factors)
        # Unbiased, within three standard errors of the mean of 200.
        assert abs(float(factors.mean()) - 1) < 3 * float(factors.std()) / 200**0.5
        # It is relative to the factor, which scatters itself.
        assert len({round(error, 9) for error in errors}) == 1
        assert errors[0] == pytest.approx(float(factors.std()), rel=0.25)

    def test_all_that_a_spread_gives_is_multiplied(self):
        fit, data = line_fit(), line().data
        known = fit.calibrate(drawn(6, seed=3), INPUTS)
        close = {"rtol": 1e-12, "atol": 0}
        for spread in ("posterior", "sampling"):
            factor, asked = known.calibration[spread].factor, {"spread": spread}
            assert abs(factor - 1) > 1e-3
            for options in ({}, {"rank": 4}, {"space": "logit"}):
                options = {"covariance": True, **options, **asked}
                plain, found = (each.predict(INPUTS, **options) for each in (fit, known))
                for part in ("std", "std_low", "std_high", "score", "score_low", "score_high"):
                    ours, theirs = getattr(found, part), getattr(plain, part)
                    torch.testing.assert_close(ours, factor * theirs, **close)
                close_error = {"rtol": 1e-9, "atol": 1e-15}
                torch.testing.assert_close(found.std_error, factor * plain.std_error, **close_error)
                torch.testing.assert_close(found.covariance, factor**2 * plain.covariance, **close)
            plain, found = (each.sample(3, seed=2, **asked) for each in (fit, known))
            point = line().oracle.point
            torch.testing.assert_close(found - point, factor * (plain - point), rtol=0, atol=1e-12)
            plain, found = (
                each.certify(INPUTS[:2], data, tolerance=1e-6, **asked) for each in (fit, known)
            )
            torch.testing.assert_close(found.std_low, factor * plain.std_low, **close)
            torch.testing.assert_close(found.std_high, factor * plain.std_high, **close)

    def test_replicas_that_have_nothing_to_do_with_the_bars(self):
        """A warning, and a verdict that does not rest on them."""
        case = make_case("dense", l2=0.02, seed=20)
        fit = deltabars.fit(case.model, case.data, progress=False)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            odd = [copy.deepcopy(case.model) for _ in range(2)]
            for each in odd:
                for part in each.parameters():
                    nn.init.normal_(part, std=0.01)
        with pytest.warns(DataWarning, match=r"scatter as the bars say, got R² 0\.0"):
            found = fit.calibrate(odd, case.unseen)
        assert found.calibration["sampling"].r_squared < 0.1
        asked = {"spread": "sampling"}
        ours, plain = (each.predict(case.unseen, **asked).judgement for each in (found, fit))
        assert (ours.level, ours.evidence.calibrated) == (plain.level, 0)

    def test_replicas_of_a_network_with_frozen_parameters(self):
        case = make_case("dense", l2=0.02, seed=20)
        case.model[0].requires_grad_(False)
        last = {"params": deltabars.last_layer(), "progress": False}
        fit = deltabars.fit(case.model, case.data, **last)
        replicas = []
        for seed in (1, 2):
            sample = deltabars.resample(case.data, seed)
            replicas.append(deltabars.polish(case.model, sample, fit.l2, progress=False))
        modules = fit.calibrate(replicas, case.unseen).calibration
        states = fit.calibrate([each.state_dict() for each in replicas], case.unseen).calibration
        assert modules == states
        assert modules["sampling"].factor > 0

    @pytest.mark.filterwarnings("ignore:calibrate. expected replicas that scatter")  # by chance
    def test_averages_are_over_the_calibrated_scatter(self):
        case = make_case("dense", l2=0.02, seed=5)
        fit = deltabars.fit(case.model, case.data, rank=43, progress=False)
        replicas = [make_case("dense", l2=l2, seed=5).model for l2 in (0.01, 0.02, 0.05)]
        known = fit.calibrate(replicas, case.unseen)
        own = Oracle(case.model, case.inputs, case.targets, fit.l2)
        scatter = own.covariance("ggn", case.unseen, "logit", "sampling")
        scatter = known.calibration["sampling"].factor ** 2 * scatter
        outputs = case.model(case.unseen).detach()
        expected = averaged(outputs, scatter, fit.temperature, "categorical", 512)
        found = known.predict(case.unseen).moderated
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)

    def test_another_lambda_has_another_level(self):
        """Either it is calibrated anew or not at all: the replicas say nothing of these bars."""
        replicas = drawn(40, seed=5)
        moved = line_fit().calibrate(replicas, INPUTS).with_l2(1.0)
        anew = line_fit().with_l2(1.0).calibrate(replicas, INPUTS).calibration["sampling"]
        assert moved.calibration in ({}, anew) or (
            moved.calibration["sampling"].factor == pytest.approx(anew.factor)
        )

    def test_it_starts_from_the_bars_of_the_fit(self):
        replicas = drawn(4, seed=5)
        once = line_fit().calibrate(replicas, INPUTS)
        assert once.calibrate(replicas, INPUTS).calibration == once.calibration
        assert dict(line_fit().calibration) == {}

    def test_modules_state_dicts_and_files_are_the_same(self, tmp_path):
        replicas = drawn(3, seed=6)
        modules = []
        for number, weights in enumerate(replicas):
            modules.append(nn.Linear(4, 3).double())
            modules[-1].load_state_dict(weights)
            torch.save(weights, tmp_path / f"{number}.pt")
            save_file(weights, tmp_path / f"{number}.safetensors")
        ways = [replicas, modules]
        ways += [[tmp_path / f"{k}.{end}" for k in range(3)] for end in ("pt", "safetensors")]
        ways += [[modules[0], str(tmp_path / "1.pt"), replicas[2]]]
        loader = DataLoader(TensorDataset(INPUTS, torch.zeros(60)), batch_size=7)
        found = [line_fit().calibrate(way, INPUTS).calibration for way in ways]
        assert all(each == found[0] for each in found)
        own = line_fit().calibrate(replicas, loader).calibration["sampling"]
        assert own.factor == pytest.approx(found[0]["sampling"].factor, rel=1e-12)

    def test_refused(self, tmp_path):
        fit, replicas = line_fit(), drawn(2, seed=8)
        other = make_case("dense", seed=1).model.state_dict()
        lost = {**replicas[0], "weight": replicas[0]["weight"] * torch.nan}
        (tmp_path / "bad.pt").write_bytes(b"x" * 100)
        for given, inputs, error, match in (
            (replicas[:1], INPUTS, BadValueError, "replicas: expected at least two, got 1"),
            ([], INPUTS, BadValueError, r"replicas: expected a list .* got \[\]"),
            ("weights.pt", INPUTS, BadValueError, "replicas: expected a list .* got 'weights.pt'"),
            (replicas[0], INPUTS, BadValueError, "replicas: expected a list .* got dict"),
            (
                [replicas[0], 3],
                INPUTS,
                BadValueError,
                "expected a module, a state dict .* got a int",
            ),
            (
                [replicas[0], other],
                INPUTS,
                ModelError,
                "replica 1: expected the weights of the fitted model",
            ),
            ([replicas[0], "no.pt"], INPUTS, ModelError, r"expected a file of weights, got no\.pt"),
            ([replicas[0], tmp_path / "bad.pt"], INPUTS, ModelError, "expected a file of weights"),
            ([replicas[0], lost], INPUTS, ModelError, "Expected finite weights"),
            (replicas, INPUTS[:0], DataError, "at least one"),
            (replicas, INPUTS[:, :3], DataError, "Inputs: expected"),
            ([replicas[0]] * 2, INPUTS, DataError, "do not scatter"),
        ):
            with pytest.raises(error, match=match) as raised:
                fit.calibrate(given, inputs)
            assert "\n" not in str(raised.value)


def small(seed=3):
    return make_case("linear", count=60, l2=0.05, seed=seed)


def trainer(case, trained: list):
    """A function that trains a network as that of the case was, and notes what it was given."""

    def work(sample):
        model = nn.Linear(4, 3).double()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        train(model, *sample, case.l2, steps=60)
        trained.append(sample[1])
        return model

    return work


class TestBootstrap:
    def test_it_is_the_scatter_of_networks_that_are_retrained(self, tmp_path):
        case, trained = small(), []
        fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=15, progress=False)
        options = {"replicas": 6, "seed": 4, "progress": False}
        work = trainer(case, trained)
        for spread in ("sampling", "posterior"):
            found = checking.bootstrap_check(
                fit,
                work,
                case.data,
                case.unseen,
                spread=spread,
                folder=tmp_path / "kept",
                **options,
            )
            bars = fit.predict(case.unseen, spread=spread).std
            torch.testing.assert_close(found.std, bars, rtol=1e-12, atol=0)
            assert (found.spread, found.replicas) == (spread, 6)
        assert len(trained) == 6  # the second time none
        models = [work(deltabars.resample(case.data, 4 + k)) for k in range(6)]
        assert all(map(torch.equal, trained[:6], trained[6:]))
        means = torch.stack([model(case.unseen).detach().softmax(1) for model in models])
        torch.testing.assert_close(found.scatter, means.std(0) / C4[6], rtol=1e-12, atol=0)
        states = [model.state_dict() for model in models]
        again = checking.compare_with_replicas(fit, states, case.unseen, spread="posterior")
        torch.testing.assert_close(again.scatter, found.scatter, rtol=1e-12, atol=0)
        assert again.agreement.slope == pytest.approx(found.agreement.slope, rel=1e-12)
        assert found.agreement == checking.agreement(found.std, found.scatter)
        assert checking.as_dict(found)["replicas"] == 6
        assert "6 retrained networks, 7 inputs" in repr(found)

    def test_sampling_bars_are_the_scatter_of_a_convex_network(self):
        """To what 24 replicas of 300 examples allow; those of the posterior are another number."""
        case = make_case("linear", count=300, l2=0.01, seed=2)
        fit = deltabars.fit(
            case.model, case.data, l2=0.01, estimator="ggn", rank=15, progress=False
        )
        inputs = randn(100, 4, seed=5)
        found = checking.bootstrap_check(
            fit, trainer(case, []), case.data, inputs, replicas=24, progress=False
        )
        # 1/√(2·24) = 14 % for one direction of weights, less for several.
        assert 0.75 < found.agreement.slope < 1.25
        assert found.agreement.spearman > 0.6

    @pytest.mark.parametrize("stopped", [KeyboardInterrupt, RuntimeError])
    def test_it_is_resumed_where_it_was_stopped(self, tmp_path, stopped):
        case, trained = small(), []
        fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=15, progress=False)
        work, options = trainer(case, trained), {"replicas": 5, "progress": False}

        def tired(sample):
            if len(trained) == 2:
                raise stopped("no more")
            return work(sample).state_dict()

        kept = tmp_path / "new" / "kept"
        with pytest.raises(stopped):
            checking.bootstrap_check(fit, tired, case.data, case.unseen, folder=kept, **options)
        assert len(list(kept.glob("*.pt"))) == 2
        (kept / "replica-02.part").write_bytes(b"half")  # as if it was killed while it was written
        found = checking.bootstrap_check(fit, work, case.data, case.unseen, folder=kept, **options)
        assert len(trained) == 5
        whole = checking.bootstrap_check(fit, work, case.data, case.unseen, **options)
        assert torch.equal(found.scatter, whole.scatter)
        assert len(trained) == 10
        some = {**options, "replicas": 3}
        few = checking.bootstrap_check(fit, work, case.data, case.unseen, folder=kept, **some)
        assert (few.replicas, len(trained)) == (3, 10)

    def test_refused(self, tmp_path):
        case, other, trained = small(), small(seed=9), []
        fit, another = (
            deltabars.fit(each.model, each.data, l2=each.l2, rank=15, progress=False)
            for each in (case, other)
        )
        work = trainer(case, trained)
        kept, mine = tmp_path / "kept", tmp_path / "mine"
        options = {"replicas": 2, "progress": False}
        args = case.data, case.unseen
        checking.bootstrap_check(fit, work, *args, folder=kept, **options)
        mine.mkdir()
        (mine / "notes.txt").write_text("mine")
        for refused, error, match in (
            (
                lambda: checking.bootstrap_check(another, work, *args, folder=kept, **options),
                StorageError, "replicas of this network, data and seed, got those of another",
            ),
            (
                lambda: checking.bootstrap_check(fit, work, *args, folder=kept, seed=1, **options),
                StorageError, "replicas of this network, data and seed, got those of another",
            ),
            (
                lambda: checking.bootstrap_check(fit, work, *args, folder=mine, **options),
                StorageError, "expected a new or empty folder",
            ),
            (
                lambda: checking.bootstrap_check(fit, work, *args, replicas=1),
                BadValueError, "replicas: expected a whole number from 2 on",
            ),
            (
                lambda: checking.bootstrap_check(fit, "train", *args, **options),
                BadValueError, "train_function: expected a function",
            ),
            (
                lambda: checking.bootstrap_check(fit, lambda sample: None, *args, **options),
                BadValueError, "train_function: expected a module, a state dict .* got a NoneType",
            ),
            (
                lambda: checking.bootstrap_check(fit, work, DataLoader([1]), args[1], **options),
                DataError, "Give its dataset",
            ),
            (
                lambda: checking.compare_with_replicas(fit, [case.model], case.unseen),
                BadValueError, "at least two, got 1",
            ),
        ):  # fmt: skip
            with pytest.raises(error, match=match) as raised:
                refused()
            assert "\n" not in str(raised.value)
        assert len(trained) == 2
        assert [path.name for path in mine.iterdir()] == ["notes.txt"]

    def test_a_spread_of_another_name_is_refused_before_anything_is_trained(self):
        case, trained = small(), []
        fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=15, progress=False)
        options = {"spread": "bootstrap", "replicas": 2, "progress": False}
        with pytest.raises(BadValueError, match="spread: expected one of"):
            checking.bootstrap_check(fit, trainer(case, trained), case.data, case.unseen, **options)
        assert not trained

    def test_replicas_of_other_data_are_refused(self, tmp_path):
        case, options = small(), {"replicas": 2, "progress": False, "folder": tmp_path / "kept"}
        fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=15, progress=False)
        other = 2 * case.inputs, case.targets
        checking.bootstrap_check(fit, trainer(case, []), other, case.unseen, **options)
        with pytest.raises(StorageError):
            checking.bootstrap_check(fit, trainer(case, []), case.data, case.unseen, **options)


class TestAgreement:
    def test_it_is_what_scipy_says(self):
        for seed in range(5):
            x = randn(30, 3, seed=seed).abs()
            y = (x + (0.1 + seed) * randn(30, 3, seed=seed + 50)).abs()
            if seed % 2:  # with ties
                x, y = (x * 4).round(), (y * 4).round()
            found = checking.agreement(x, y)
            rho = stats.spearmanr(x.flatten(), y.flatten()).statistic
            line = stats.linregress(x.flatten(), y.flatten())
            slope = torch.linalg.lstsq(x.reshape(-1, 1), y.reshape(-1, 1)).solution
            assert found.spearman == pytest.approx(rho, abs=1e-12)
            assert found.r_squared == pytest.approx(line.rvalue**2, abs=1e-12)
            assert found.slope == pytest.approx(float(slope), rel=1e-12)
        falling = checking.agreement(x, x.max() - x)
        assert falling.spearman == pytest.approx(-1)

    def test_what_does_not_vary_agrees_with_nothing(self):
        found = checking.agreement(torch.ones(5), torch.arange(5.0))
        assert math.isnan(found.spearman)
        assert math.isnan(found.r_squared)
        assert math.isnan(checking.agreement(torch.zeros(5), torch.ones(5)).slope)

    @pytest.mark.parametrize("count", [2, 3, 7, 30])
    def test_the_standard_deviation_of_few_is_too_small_by_c4(self, count):
        assert small_sample(count) == pytest.approx(C4[count], rel=1e-12)
        scatter = randn(40_000, count).std(1).mean()
        assert float(scatter) == pytest.approx(small_sample(count), abs=0.01)


@pytest.mark.parametrize("data", [torch.rand(4, 2), (), [], (torch.rand(0, 2), torch.rand(0))])
def test_what_cannot_be_resampled_is_refused_in_one_line(data):
    with pytest.raises(DataError, match="resample: expected") as raised:
        deltabars.resample(data, 1)
    assert "\n" not in str(raised.value)
