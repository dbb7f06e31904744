"""How far retraining would move a prediction: fits against explicit B⁻¹G₀B⁻¹/N in float64."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import BadValueError, DeltaBarsWarning
from deltabars.likelihoods.gaussian import Gaussian
from tests.conftest import cached_case
from tests.likelihoods.test_losses import MODULES, trained
from tests.networks import make_case
from tests.oracles import LOSSES, Oracle
from tests.silence import randn, seeded

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
SPACES = ("probability", "logit")
STRONG = 0.1  # an l2 that makes the Hessian of every smooth network positive definite
EXACT = {"rtol": 0, "atol": 1e-8}  # inverses of condition up to 1e3, twice, of values up to 10
KINDS = [("dense", "categorical"), ("convolutional", "categorical"), ("batch_norm", "categorical")]
KINDS += [("shared", "categorical"), ("dense", "bernoulli"), ("dense", "gaussian")]
FLOAT32 = 2.0**-22  # relative: an end of an interval is rounded to float32, and so is its middle


def fitted(case, estimator, rank=None, **options):
    options = {"l2": case.l2, "rank": rank or case.oracle.size, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, **options)


def served(fit):
    """The estimators of a fit: a sandwich has three."""
    return ["hessian", "opg", "sandwich"] if fit.estimator == "sandwich" else [fit.estimator]


def check_both_spreads(fit, oracle, unseen, posterior=None):
    """Of every estimator that a fit serves, in both spaces: std, covariance and score."""
    for space in SPACES:
        asked = {"space": space, "estimator": served(fit), "covariance": True}
        plain = fit.predict(unseen, **asked)
        for spread in ("posterior", "sampling"):
            found = fit.predict(unseen, spread=spread, **asked)
            for name, out in found.items():
                exact = (posterior or oracle).covariance(name, unseen, space, "posterior")
                if spread == "sampling":
                    exact = oracle.covariance(name, unseen, space, spread)
                std = exact.diagonal(dim1=1, dim2=2).sqrt()
                torch.testing.assert_close(out.covariance, exact, **EXACT)
                torch.testing.assert_close(out.std, std, **EXACT)
                torch.testing.assert_close(out.score, std.square().sum(1).sqrt(), **EXACT)
                assert float((out.std_error / std).max()) < 1e-10  # nothing is left out
                assert torch.equal(out.mean, plain[name].mean)
                if spread == "posterior":  # the default
                    assert torch.equal(out.std, plain[name].std)


class TestAllPairs:
    @pytest.mark.parametrize("estimator", ["sandwich", "ggn"])
    @pytest.mark.parametrize(("kind", "likelihood"), KINDS)
    def test_of_every_network(self, kind, likelihood, estimator):
        case = cached_case(kind, l2=STRONG, likelihood=likelihood)
        fit = fitted(case, estimator, likelihood=likelihood)
        check_both_spreads(fit, case.oracle, case.unseen)

    @pytest.mark.parametrize("estimator", ["hessian", "opg"])
    def test_of_an_estimator_by_itself(self, estimator):
        case = cached_case("dense", l2=STRONG)
        fit = fitted(case, estimator)
        check_both_spreads(fit, case.oracle, case.unseen)
        both = fitted(case, "sandwich").predict(case.unseen, spread="sampling", estimator=estimator)
        alone = fit.predict(case.unseen, spread="sampling")
        torch.testing.assert_close(both.std, alone.std, rtol=1e-9, atol=0)

    @pytest.mark.parametrize("estimator", ["sandwich", "ggn"])
    @pytest.mark.parametrize("kind", [kind for kind in MODULES if "MSE" not in kind])
    def test_of_every_loss(self, kind, estimator):
        """Class weights, label smoothing, weights of answers, sums in place of means."""
        case = trained(kind)
        check_both_spreads(case.fit(estimator), case.oracle, case.unseen)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("noise", [0.3, 2.5, "estimate"])
    def test_of_regression(self, estimator, noise):
        """The cost of −log p is that over σ²; only the bars of G depend on σ then."""
        case = make_case("dense", l2=STRONG, seed=7, likelihood="gaussian")
        fit = fitted(case, estimator, likelihood=Gaussian(noise=noise))
        precision = fit.noise**-2
        oracle = Oracle(
            case.model, case.inputs, case.targets, precision * case.l2, likelihood="gaussian",
            loss=lambda z, y: precision * LOSSES["gaussian"](z, y),
        )  # fmt: skip
        check_both_spreads(fit, oracle, case.unseen)
        other = fit.with_noise(3 * fit.noise).predict(case.unseen, spread="sampling").std
        same = torch.allclose(other, fit.predict(case.unseen, spread="sampling").std, rtol=1e-9)
        assert same is (estimator != "opg")

    @pytest.mark.parametrize("estimator", ["sandwich", "ggn"])
    def test_of_decays_by_pattern_and_some_of_the_parameters(self, estimator):
        case = cached_case("dense", l2=STRONG)
        several = {"*": 0.1, "*.bias": 0.4}
        parts = [
            torch.full((value.numel(),), 0.4 if name.endswith("bias") else 0.1).double()
            for name, value in case.model.named_parameters()
        ]
        own = Oracle(case.model, case.inputs, case.targets, torch.cat(parts))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeltaBarsWarning)  # another cost than the training's
            check_both_spreads(fitted(case, estimator, l2=several), own, case.unseen)
            names = ["0.bias", "2.weight", "2.bias"]
            some = fitted(case, estimator, rank=23, params=names)
        own = Oracle(case.model, case.inputs, case.targets, case.l2, names=names)
        check_both_spreads(some, own, case.unseen)

    def test_moved_to_another_l2(self):
        case = cached_case("dense", l2=STRONG)
        for estimator in ("sandwich", "ggn"):
            moved = fitted(case, estimator).with_l2(0.3)
            own = Oracle(case.model, case.inputs, case.targets, 0.3)
            check_both_spreads(moved, own, case.unseen)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_it_is_the_sum_of_squared_influences(self, estimator):
        """Of each training example on each prediction; exact to the rounding of two inverses."""
        case = cached_case("dense", l2=STRONG)
        influences = case.oracle.influences(estimator, case.unseen)
        total = influences.square().sum(2) / case.oracle.count**2
        found = fitted(case, estimator).predict(case.unseen, spread="sampling")
        torch.testing.assert_close(found.variance, total, rtol=0, atol=1e-10)

    def test_it_is_what_leaving_examples_out_does(self):
        """Least squares, where the influence of an example is that of giving it more weight."""
        case = make_case("linear", l2=0.05, likelihood="gaussian")
        fit = fitted(case, "ggn", likelihood="gaussian")
        x = torch.cat([case.inputs, torch.ones(29, 1).double()], 1)
        moved, step = [], 1e-4

        def solved(weights):
            gram = (x * weights[:, None]).T @ x / 29 + case.l2 * torch.eye(5).double()
            return torch.linalg.solve(gram, (x * weights[:, None]).T @ case.targets / 29)

        unseen = torch.cat([case.unseen, torch.ones(7, 1).double()], 1)
        for n in range(29):
            more, less = torch.ones(29).double(), torch.ones(29).double()
            more[n], less[n] = 1 + step, 1 - step
            moved.append(unseen @ (solved(more) - solved(less)) / (2 * step))
        jackknife = torch.stack(moved).square().sum(0).sqrt()
        found = fit.predict(case.unseen, spread="sampling").std
        # Central differences are right to the square of the step; the cost is at its optimum.
        torch.testing.assert_close(found, jackknife, rtol=1e-6, atol=1e-9)


def outside(out, exact) -> float:
    """How far exact values are out of their intervals at the worst, relative to themselves."""
    exact, score = exact.clamp(min=1e-9 * float(exact.max())), exact.square().sum(1).sqrt()
    far = (out.std.double() - exact).abs() - out.std_error.double()
    far = torch.stack([far, out.std_low - exact, exact - out.std_high]).amax(0) / exact
    total = torch.maximum(out.score_low - score, score - out.score_high) / score
    return max(float(far.max()), float(total.max()))


class Problem:
    """A random network with data whose curvature decays, of float32 numbers, at some λ.

    Hessians are those of convex costs: no eigenvalue is below λ.
    """

    def __init__(self, seed: int, least: float, most: float) -> None:
        draw = random.Random(seed)
        self.estimator = draw.choice(ESTIMATORS)
        self.likelihood = draw.choice(["categorical", "bernoulli", "gaussian"])
        size, hidden = draw.choice([4, 8]), draw.choice([3, 5])
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            first = [nn.Linear(size, hidden), draw.choice([nn.Tanh, nn.Softplus])()]
            smooth = self.estimator in ("hessian", "sandwich")
            layers = [nn.Linear(size, 3)] if smooth else [*first, nn.Linear(hidden, 3)]
            self.model = nn.Sequential(*layers)
            decay = 10 ** torch.linspace(0, -draw.uniform(0, 2), size)
            self.inputs, self.unseen = torch.randn(40, size) * decay, torch.randn(6, size)
            self.unseen[:2] = self.inputs[:2]
            labels, binary = torch.randint(0, 3, (40,)), torch.randint(0, 2, (40, 3)).float()
            numbers = torch.randn(40, 3)
        self.targets = {"bernoulli": binary, "gaussian": numbers}.get(self.likelihood, labels)
        wide = self.targets.double() if self.likelihood == "gaussian" else self.targets
        self.oracle = Oracle(
            copy.deepcopy(self.model).double(), self.inputs.double(), wide, 0.0,
            likelihood=self.likelihood,
        )  # fmt: skip
        largest = float(torch.linalg.eigvalsh(self.oracle.bread(self.estimator))[-1])
        self.l2 = self.oracle.l2 = largest * 10 ** -draw.uniform(least, most)
        self.rank = draw.randint(1, self.oracle.size - 1)
        self.space = draw.choice(SPACES)
        self.draw = draw

    def fit(self, **options):
        options = {"l2": self.l2, "rank": self.rank, "progress": False, **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeltaBarsWarning)  # nobody trained it
            return deltabars.fit(
                self.model, (self.inputs, self.targets), estimator=self.estimator,
                likelihood=self.likelihood, **options,
            )  # fmt: skip

    def outside(self, fit, **options) -> float:
        unseen = self.unseen.to(fit.network.dtype)
        asked = {"space": self.space, "moderation": None, "spread": "sampling", **options}
        out = fit.predict(unseen, **asked)
        exact = self.oracle.std(self.estimator, self.unseen.double(), self.space, "sampling")
        return outside(out, exact)


class TestIntervals:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_at_every_rank(self, dtype):
        """Of fits of all pairs, and of the solvers with as many as are wanted."""
        cases = 0
        for seed in range(10):
            problem = Problem(seed, 0, 4)
            whole = problem.fit(rank=problem.oracle.size, dtype=dtype)
            for rank in range(1 + seed % 3, problem.oracle.size, 6):
                assert problem.outside(whole, rank=rank) <= FLOAT32, (seed, rank)
                cases += 18
            few = min(problem.rank, 9)
            assert problem.outside(problem.fit(rank=few, dtype=dtype, solver="krylov")) <= FLOAT32
        assert cases > 800

    def test_pairs_that_have_not_converged(self):
        """After hardly more products than pairs; both types of numbers."""
        for seed in range(100, 116):
            problem = Problem(seed, 0, 3)
            rank = min(problem.rank, 10)
            given = {"rank": rank, "solver": "krylov", "max_products": rank + 1 + seed % 7}
            fit = problem.fit(dtype=(torch.float32, torch.float64)[seed % 2], **given)
            assert problem.outside(fit) <= FLOAT32, seed

    @pytest.mark.parametrize("spread", ["posterior", "sampling"])
    def test_pairs_of_which_larger_ones_were_missed(self, spread):
        """No product more than pairs: the tail reaches far above the last Ritz value."""
        for seed in (9, 18):
            inputs, unseen = randn(50, 8, seed=seed), randn(6, 8, seed=seed + 50)
            inputs = inputs * 10 ** torch.linspace(0, -1, 8).double()
            model, targets = seeded(lambda: nn.Linear(8, 3), seed), torch.arange(50) % 3
            for l2 in (1.0, 3.0, 10.0):
                oracle = Oracle(model, inputs, targets, l2)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeltaBarsWarning)
                    fit = deltabars.fit(
                        model, (inputs, targets), l2=l2, estimator="ggn", rank=6, max_products=6,
                        solver="krylov", progress=False,
                    )  # fmt: skip
                exact = oracle.std("ggn", unseen, "logit", spread)
                out = fit.predict(unseen, space="logit", spread=spread, moderation=None)
                assert outside(out, exact) < 1e-9, (seed, l2)

    def test_gradients_that_are_nearly_within_the_eigenvectors(self):
        """What is left of them is 1e-8 of their squares, which float32 loses, and it matters."""
        for seed in range(100):
            basis = torch.linalg.qr(randn(3, 3, seed=seed)).Q
            decay = torch.tensor([1.0, 1e-4, 1e-4]).double()
            inputs = (randn(12, 3, seed=seed + 1) * decay @ basis).float()
            unseen = (randn(5, 3, seed=seed + 2) * 1e-4 / decay @ basis).float()
            model = seeded(lambda: nn.Linear(3, 1, bias=False), seed).float()
            targets = randn(12, 1, seed=seed + 3).float()
            oracle = Oracle(
                copy.deepcopy(model).double(), inputs.double(), targets.double(), 1e-3,
                likelihood="gaussian",
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeltaBarsWarning)
                fit = deltabars.fit(
                    model, (inputs, targets), l2=1e-3, estimator="ggn", rank=1, progress=False,
                    likelihood="gaussian",
                )  # fmt: skip
            exact = oracle.std("ggn", unseen.double(), "logit", "sampling")
            out = fit.predict(unseen, space="logit", spread="sampling")
            assert outside(out, exact) <= FLOAT32, seed

    def test_incremental_svd_and_files_of_short_numbers(self, tmp_path):
        for seed in range(200, 212):
            problem = Problem(seed, 0, 3)
            kind = (torch.float32, torch.float64)[seed % 2]
            solver = "auto" if problem.estimator == "hessian" else "incremental"
            fit = problem.fit(dtype=kind, solver=solver, memory_budget=60_000)
            assert problem.outside(fit) <= FLOAT32, seed
            for stored in ("bfloat16", "float16"):
                fit.save(tmp_path / f"{seed}-{stored}", dtype=stored)
                short = deltabars.load(tmp_path / f"{seed}-{stored}", problem.model)
                assert problem.outside(short) <= FLOAT32, (seed, stored)
                assert problem.outside(short, rank=1 + problem.rank // 2) <= FLOAT32, (seed, stored)

    def test_an_incremental_svd_that_drops_much(self):
        case = cached_case("linear", count=400, l2=0.001)
        for estimator in ("opg", "ggn"):
            exact = case.oracle.std(estimator, case.unseen, spread="sampling")
            fit = fitted(case, estimator, 6, solver="incremental", memory_budget=200_000)
            assert fit.spectra[estimator].slack > 1e-4
            for rank in (2, 6):
                out = fit.predict(case.unseen, rank=rank, spread="sampling")
                assert outside(out, exact) < 1e-9

    @pytest.mark.parametrize("kind", ["dense", "rectified", "batch_norm"])
    def test_of_trained_networks(self, kind):
        """Those of a Hessian where it is positive definite, which its interval supposes."""
        for l2 in (0.003, 0.03):
            case = cached_case(kind, l2=l2)
            positive = float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
            for estimator in ["ggn", "opg"] + ["hessian"] * positive:
                exact = case.oracle.std(estimator, case.unseen, spread="sampling")
                fit = fitted(case, estimator)
                for rank in range(1, case.oracle.size, 9):
                    out = fit.predict(case.unseen, rank=rank, spread="sampling")
                    assert outside(out, exact) < 1e-8, (l2, estimator, rank)


class TestDraws:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_the_root_is_that_of_the_matrix(self, estimator):
        """What is applied to normal numbers, applied to the identity: nothing is drawn."""
        case = cached_case("dense", l2=STRONG)
        fit = fitted(case, estimator)
        eye, vectors = case.oracle.eye(), {n: p.vectors for n, p in fit.spectra.items()}
        for spread in ("posterior", "sampling"):
            covariance = fit.covariance_of(estimator, fit.rank, spread=spread)
            root = covariance.root(vectors, eye)
            exact = case.oracle.parameter_covariance(estimator, spread)
            torch.testing.assert_close(root.T @ root, exact, **EXACT)
            generator = torch.Generator().manual_seed(5)
            size = (3, fit.num_parameters)
            noise = torch.randn(size, generator=generator, dtype=torch.float64)
            expected = case.oracle.point + noise @ root
            drawn = fit.sample(3, seed=5, spread=spread)
            torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-12)

    def test_of_decays_by_pattern(self):
        """Draws are of the weights themselves: those of another λ scatter otherwise."""
        case = cached_case("dense", l2=STRONG)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeltaBarsWarning)
            fit = fitted(case, "ggn", l2={"*": 0.1, "*.bias": 0.4})
        scale, rank = fit.network.scale, fit.rank
        covariance = fit.covariance_of("ggn", rank, spread="sampling")
        root = covariance.root({"ggn": fit.spectra["ggn"].vectors}, case.oracle.eye()) * scale
        parts = [
            torch.full((value.numel(),), 0.4 if name.endswith("bias") else 0.1).double()
            for name, value in case.model.named_parameters()
        ]
        own = Oracle(case.model, case.inputs, case.targets, torch.cat(parts))
        exact = own.parameter_covariance("ggn", "sampling")
        torch.testing.assert_close(root.T @ root, exact, **EXACT)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("full", [True, False])
    def test_of_few_pairs_it_is_what_predictions_say(self, estimator, full):
        case = cached_case("dense", l2=STRONG)
        fit = fitted(case, estimator, 9)
        vectors = {n: p.vectors for n, p in fit.spectra.items()}
        covariance = fit.covariance_of(estimator, 9, full, "sampling")
        root = covariance.root(vectors, case.oracle.eye())
        rows = case.oracle.sensitivity(case.unseen, "logit")
        options = {"space": "logit", "spread": "sampling", "covariance": True, "full_rank": full}
        found = fit.predict(case.unseen, **options).covariance
        torch.testing.assert_close(found, rows @ root.T @ root @ rows.mT, rtol=1e-9, atol=1e-12)


def test_refused():
    case = cached_case("dense", l2=STRONG)
    fit = fitted(case, "ggn", 5)
    for refused, match in (
        (lambda: fit.predict(case.unseen, spread="bootstrap"), "spread: expected one of"),
        (lambda: fit.sample(1, spread="other"), "spread: expected one of"),
        (lambda: fit.certify(case.unseen, case.data, spread=None), "spread: expected one of"),
        (
            lambda: fit.predict(case.unseen, spread="sampling", bound="paper"),
            "bound: expected 'rigorous' with spread='sampling'",
        ),
    ):
        with pytest.raises(BadValueError, match=match):
            refused()
