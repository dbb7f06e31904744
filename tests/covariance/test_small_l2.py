"""Intervals hold in float32 too, where λ is small beside the largest eigenvalue.

Float32 tells λ from nothing only down to eps·λ₁, residuals of the solver may be as large as λ, and
rounding moves every row of gradients: intervals count all of it.
"""

import copy
import random
import warnings

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import DeltaBarsWarning, SpectrumWarning
from deltabars.storage.format import read, write
from tests.oracles import Oracle

FLOAT32 = 2.0**-22  # relative: an end of an interval is rounded to float32, and so is its middle
TINY = 1e-9  # of the largest: below, float64 has few digits of 1 − p in the oracle's derivatives
ESTIMATORS = ("opg", "ggn", "hessian", "sandwich")
SPREADS = ("posterior", "sampling")


class Case:
    """A random float32 network, its data, and an estimator at a λ far below the first eigenvalue.

    The curvature of a linear model's Hessian has no eigenvalue below λ: its interval is a theorem.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.estimator = draw.choice(ESTIMATORS)
        self.likelihood = draw.choice(["categorical", "categorical", "bernoulli", "gaussian"])
        inputs, classes = draw.choice([4, 8]), draw.choice([2, 3])
        layers: list[nn.Module] = []
        if self.estimator in ("opg", "ggn"):
            for _ in range(draw.choice([1, 1, 2])):
                bend = draw.choice([nn.Tanh, nn.GELU, nn.Softplus])()
                layers += [nn.Linear(inputs if not layers else 5, 5), bend]
        layers.append(nn.Linear(5 if layers else inputs, classes))
        self.model = nn.Sequential(*layers)
        scales = draw.choice([0.1, 1, 5]) * 10 ** torch.linspace(0, -draw.uniform(0, 3), inputs)
        self.inputs = torch.randn(60, inputs) * scales + draw.choice([0, 0, 2])
        self.unseen = torch.cat([self.inputs[:3], draw.choice([0.3, 3]) * torch.randn(5, inputs)])
        drawn = torch.randint(0, classes, (60,))
        binary, real = torch.randint(0, 2, (60, classes)).float(), torch.randn(60, classes)
        self.targets = {"bernoulli": binary, "gaussian": real}.get(self.likelihood, drawn)
        wide, targets = copy.deepcopy(self.model).double(), self.targets
        targets = targets.double() if self.likelihood == "gaussian" else targets
        self.oracle = Oracle(wide, self.inputs.double(), targets, 0.0, likelihood=self.likelihood)
        matrix = self.oracle.matrix("hessian" if self.estimator == "sandwich" else self.estimator)
        largest = float(torch.linalg.eigvalsh(matrix)[-1])
        self.l2 = self.oracle.l2 = largest * 10 ** -draw.uniform(1, 7)
        size = self.oracle.size
        self.rank = draw.choice([size, size // 2, size // 4])
        self.solver = draw.choice(["dense", "krylov", "krylov"])
        if self.estimator in ("opg", "ggn") and draw.random() < 0.2:
            self.solver = "incremental"
        self.space = draw.choice(["probability", "logit"])
        # Some are fitted at a larger λ and moved, and some predict with fewer pairs.
        self.fitted_l2 = self.l2 * draw.choice([1, 1, 10, 1000])
        self.used = draw.choice([None, None, max(1, self.rank // 2)])

    def fit(self, **options):
        options = {"l2": self.fitted_l2, "rank": self.rank, "solver": self.solver, **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeltaBarsWarning)
            fit = deltabars.fit(
                self.model, (self.inputs, self.targets), estimator=self.estimator,
                likelihood=self.likelihood, progress=False, **options,
            )  # fmt: skip
            return fit if options["l2"] == self.l2 else fit.with_l2(self.l2)

    def predict(self, fit, **options):
        options = {"space": self.space, "rank": self.used, "moderation": None, **options}
        return fit.predict(self.unseen, **options)

    def exact(self, spread="posterior"):
        return self.oracle.std(self.estimator, self.unseen.double(), self.space, spread)

    def outside(self, out, spread="posterior") -> float:
        """How far the exact value is out of its interval at the worst, relative to itself."""
        exact = self.exact(spread)
        counted, score = exact > TINY * exact.max(), exact.square().sum(1).sqrt()
        far = (out.std.double() - exact).abs() - out.std_error.double()
        far = torch.stack([far, out.std_low - exact, exact - out.std_high]).amax(0) / exact
        total = torch.maximum(out.score_low - score, score - out.score_high) / score
        return max(float(far[counted].max()), float(total.max()))


@pytest.mark.parametrize("start", range(0, 45, 15))
def test_no_interval_misses(start):
    """λ₁/λ from 1e1 to 1e7, four estimators, three solvers, both spaces, moved λ, fewer pairs."""
    for seed in range(start, start + 15):
        case = Case(seed)
        fit = case.fit()
        for spread in SPREADS:
            out = case.predict(fit, spread=spread)
            assert case.outside(out, spread) <= FLOAT32, (seed, spread)


@pytest.mark.parametrize("estimator", ["opg", "ggn"])
def test_an_interval_is_about_as_narrow_as_float32_allows(estimator):
    """At λ₁/λ = 100 within 2e-4 of what float64 gives; at 5e4, eps·λ₁/λ = 0.6 %, within 10 %."""
    widths = {}
    for ratio in (1e2, 5e4):
        case = next(c for c in map(Case, range(200)) if c.estimator == estimator and c.rank > 20)
        case.likelihood, case.used, case.solver, case.space = "categorical", None, "krylov", "logit"
        case.targets = torch.arange(60) % 2
        wide = copy.deepcopy(case.model).double()
        case.oracle = Oracle(wide, case.inputs.double(), case.targets, 0.0)
        case.l2 = float(torch.linalg.eigvalsh(case.oracle.matrix(estimator))[-1]) / ratio
        case.fitted_l2 = case.oracle.l2 = case.l2
        fits = (case.fit(dtype=kind) for kind in (torch.float32, torch.float64))
        found, exact = map(case.predict, fits)
        off = torch.maximum(exact.std_low - found.std_low, found.std_high - exact.std_high)
        widths[ratio] = float((off / exact.std).max())
    assert widths[1e2] < 2e-4
    assert widths[5e4] < 0.1


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
def test_residuals_that_are_allowed_widen_the_interval(seed):
    """Pairs that have hardly converged at all: the interval still holds."""
    case = Case(seed)
    case.fitted_l2, case.used = case.l2, None
    fit = case.fit(rank=6, solver="krylov", residual_tolerance=0.03)
    for spread in SPREADS:
        assert case.outside(case.predict(fit, spread=spread), spread) <= FLOAT32


def test_a_file_that_does_not_say_how_far_rounding_went_is_held_to_the_usual(tmp_path):
    """Files of 0.5.0 hold residuals, but neither the rounding of products nor ‖QQᵀ − I‖."""
    case = Case(7)
    case.fit().save(tmp_path / "new")
    header, tensors = read(tmp_path / "new")
    for statistics in header["statistics"].values():
        del statistics["product_rounding"], statistics["orthogonality_norm"]
    write(tmp_path / "old", header, tensors)
    again = deltabars.load(tmp_path / "old", case.model)
    assert case.outside(case.predict(again)) <= FLOAT32


def test_what_a_moved_fit_loses_is_warned_of_with_the_remedy():
    case = Case(1)
    case.estimator, case.likelihood, case.targets = "opg", "categorical", torch.arange(60) % 2
    case.l2 = 0.1
    loose = case.fit(l2=0.1, rank=8, solver="krylov", residual_tolerance=0.03)
    with pytest.warns(SpectrumWarning, match="residuals.*fit at this l2"):
        loose.with_l2(1e-4)


def test_a_sandwich_says_whether_its_intervals_are_worth_reading():
    """By what they add to the std of an input outside the pairs; nothing is outside all of them."""
    case = next(c for c in map(Case, range(99)) if c.estimator == "sandwich" and c.rank > 20)
    case.fitted_l2 = case.l2
    reach = {}
    for rank in (3, case.oracle.size):
        fit = case.fit(rank=rank, solver="dense")
        reach[rank] = fit.diagnostics["sandwich"]["interval_reach"]
        assert ("intervals say little" in repr(fit)) == (reach[rank] > 0.5)
    assert reach[3] > 0.5
    assert reach[case.oracle.size] == 0
