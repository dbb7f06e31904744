"""Error bars against dense inverses, and intervals that must contain them."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from itertools import product

import pytest
import torch

import deltabars
from deltabars.covariance import build_covariance
from deltabars.covariance.estimators import DEFAULT_ESTIMATOR
from deltabars.covariance.tail import Tail
from deltabars.errors import OptimumWarning, SpectrumWarning
from tests.conftest import cached_case
from tests.networks import NETWORKS

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
SPACES = ("probability", "logit")
STRONG = 0.1  # an l2 that makes the Hessian of every smooth network positive definite
SMOOTH = [kind for kind in NETWORKS if kind != "rectified"]


def fitted(case, estimator, rank=None, **options):
    rank = case.oracle.size if rank is None else rank
    options = {"l2": case.l2, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, rank=rank, **options)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", SMOOTH)
def test_full_rank_is_exact_inversion(kind, estimator, space):
    case = cached_case(kind, l2=STRONG)
    assert float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
    exact = case.oracle.covariance(estimator, case.unseen, space)
    out = fitted(case, estimator).predict(case.unseen, space=space, covariance=True)
    std = exact.diagonal(dim1=1, dim2=2).sqrt()
    torch.testing.assert_close(out.covariance, exact, rtol=0, atol=1e-8)
    torch.testing.assert_close(out.std, std, rtol=0, atol=1e-8)
    torch.testing.assert_close(out.score, std.square().sum(1).sqrt(), rtol=0, atol=1e-8)
    assert float(out.std_error.max()) < 1e-12  # nothing is left out


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_full_rank_is_exact_inversion_for_other_likelihoods(likelihood, estimator):
    case = cached_case("dense", l2=STRONG, likelihood=likelihood)
    assert float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
    out = fitted(case, estimator, likelihood=likelihood).predict(case.unseen)
    exact = case.oracle.std(estimator, case.unseen)
    torch.testing.assert_close(out.std, exact, rtol=0, atol=1e-8)


def random_cases():
    """Twenty-four trained networks: other seeds, sizes of data, strengths of l2 and kinds.

    (`make torture` has as many as there is time for.)
    """
    for seed in range(4):
        for kind in NETWORKS:
            yield kind, 15 + 9 * seed, float(10 ** (-2 + 0.45 * seed)), seed


@pytest.mark.parametrize("setting", list(random_cases()), ids=lambda s: f"{s[0]}-{s[3]}")
def test_exact_value_lies_in_the_interval_at_every_rank(setting):
    """7 inputs, 3 classes, two spaces and each estimator; odd and even ranks by turns of seeds."""
    kind, count, l2, seed = setting
    case = cached_case(kind, count, l2, seed)
    positive = float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
    fits = {("ggn",): fitted(case, "ggn")}
    if positive:
        fits["opg", "sandwich"] = fitted(case, "sandwich")
    else:
        fits[("opg",)] = fitted(case, "opg")
    slack = 1e-9  # the oracle inverts matrices of condition up to 1e4 in float64
    for space, (estimators, fit) in product(SPACES, fits.items()):
        exact = {name: case.oracle.std(name, case.unseen, space) for name in estimators}
        # The mean plays no part here.
        options = {"space": space, "estimator": list(estimators), "moderation": None}
        for rank in range(1 + seed % 2, case.oracle.size, 2):
            for name, out in fit.predict(case.unseen, rank=rank, **options).items():
                std, where = exact[name], f"{name}, {space}, rank {rank}"
                score = std.square().sum(1).sqrt()
                assert bool((out.std_low - slack <= std).all()), where
                assert bool((std <= out.std_high + slack).all()), where
                assert bool(((out.std - std).abs() <= out.std_error + slack).all()), where
                assert bool((out.score_low - slack <= score).all()), where
                assert bool((score <= out.score_high + slack).all()), where
                assert bool(((out.score - score).abs() <= out.score_error + slack).all()), where


def test_most_random_cases_have_a_positive_definite_hessian():
    """So that the test above does show the sandwich's interval."""
    cases = [cached_case(*setting) for setting in random_cases()]
    positive = [float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0 for case in cases]
    assert sum(positive) >= 10


@pytest.mark.parametrize("solver", ["krylov", "dense", "arpack"])
@pytest.mark.parametrize("estimator", ["opg", "ggn", "sandwich"])
def test_interval_holds_for_a_fit_of_low_rank(estimator, solver):
    case = cached_case("linear", l2=STRONG)
    exact = case.oracle.std(estimator, case.unseen)
    for rank in (1, 4, 9, case.oracle.size - 1):
        out = fitted(case, estimator, rank, solver=solver).predict(case.unseen)
        assert bool((out.std_low - 1e-9 <= exact).all())
        assert bool((exact <= out.std_high + 1e-9).all())


@pytest.mark.parametrize("estimator", ["hessian", "opg", "ggn"])
def test_variance_and_bound_are_the_formulas(estimator):
    """σ̃² and δ of the paper, with dense matrices of size P."""
    case = cached_case("dense")
    n, rank = case.oracle.count, 9
    fit = fitted(case, estimator, rank)
    pairs = fit.spectra[estimator]
    q, values, last = pairs.vectors.T, pairs.values, float(pairs.values[-1])
    rest = torch.eye(case.oracle.size, dtype=torch.float64) - q @ q.T
    rows = case.oracle.sensitivity(case.unseen, "probability")

    def diagonal(matrix):
        return (rows @ matrix @ rows.mT).diagonal(dim1=1, dim2=2) / n

    head = diagonal(q / values @ q.T)
    variance = head + (1 / case.l2 + 1 / last) / 2 * diagonal(rest)
    delta = (1 / case.l2 - 1 / last) / 2 * diagonal(rest)
    out = fit.predict(case.unseen)
    torch.testing.assert_close(out.variance, variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(out.std_low, (variance - delta).sqrt(), rtol=1e-10, atol=0)
    torch.testing.assert_close(out.std_high, (variance + delta).sqrt(), rtol=1e-10, atol=0)
    further = torch.maximum(out.std_high - out.std, out.std - out.std_low)
    torch.testing.assert_close(out.std_error, further, rtol=1e-10, atol=0)

    paper = fit.predict(case.unseen, bound="paper")
    published = 0.5 * ((variance + delta).sqrt() - (variance - delta).sqrt())
    torch.testing.assert_close(paper.std_error, published, rtol=1e-9, atol=0)
    total, reach = variance.sum(1), delta.sum(1)
    score_error = 0.5 * ((total + reach).sqrt() - (total - reach).sqrt())
    torch.testing.assert_close(paper.score_error, score_error, rtol=1e-9, atol=0)

    low = fit.predict(case.unseen, full_rank=False)
    torch.testing.assert_close(low.variance, head, rtol=1e-10, atol=0)
    torch.testing.assert_close(low.std_low, out.std_low)
    assert bool((low.std <= out.std).all())
    assert bool((low.std + low.std_error >= low.std_high - 1e-12).all())


@pytest.mark.parametrize("ranks", [(9, 9), (5, 5), (30, 30)])
def test_sandwich_is_the_papers_eight_terms(ranks):
    case = cached_case("dense")
    fit = fitted(case, "sandwich", max(ranks))
    h, g = fit.spectra["hessian"], fit.spectra["opg"]
    n, l2 = case.oracle.count, case.l2
    eye = torch.eye(case.oracle.size, dtype=torch.float64)
    qh, qg = h.vectors[: ranks[0]].T, g.vectors[: ranks[1]].T
    last_h, last_g = float(h.values[ranks[0] - 1]), float(g.values[ranks[1] - 1])
    head_h = qh / h.values[: ranks[0]] @ qh.T
    head_g = qg * g.values[: ranks[1]] @ qg.T
    rest_h, rest_g = eye - qh @ qh.T, eye - qg @ qg.T
    tilde_h = 2 / (1 / l2 + 1 / last_h)
    tilde_g = 2 / (1 / l2 + 1 / last_g)
    S = head_h @ head_g @ head_h
    A = head_h @ rest_g @ head_h
    N = rest_h @ head_g @ head_h
    D = rest_h @ rest_g @ head_h
    C = rest_h @ head_g @ rest_h
    H = rest_h @ rest_g @ rest_h
    rows = case.oracle.sensitivity(case.unseen, "probability")

    def diagonal(matrix):
        return (rows @ matrix @ rows.mT).diagonal(dim1=1, dim2=2)

    variance = diagonal(
        S
        + tilde_g * A
        + (N + N.T) / tilde_h
        + tilde_g / tilde_h * (D + D.T)
        + C / tilde_h**2
        + tilde_g / tilde_h**2 * H
    )
    delta = 0.5 * diagonal(
        (last_g - l2) * A
        + (1 / l2 - 1 / last_h) * (N + N.T)
        + (last_g / l2 - l2 / last_h) * (D + D.T)
        + (1 / l2**2 - 1 / last_h**2) * C
        + (last_g / l2**2 - l2 / last_h**2) * H
    )
    out = fit.predict(case.unseen, rank=ranks[0], bound="paper", covariance=True)
    torch.testing.assert_close(out.variance * n, variance, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        out.covariance.diagonal(dim1=1, dim2=2), out.variance, rtol=1e-10, atol=1e-12
    )
    upper, lower = ((variance + s * delta).clamp(min=0) / n for s in (1, -1))
    published = 0.5 * (upper.sqrt() - lower.sqrt())
    torch.testing.assert_close(out.std_error, published, rtol=1e-8, atol=1e-10)
    low = fit.predict(case.unseen, rank=ranks[0], full_rank=False)
    torch.testing.assert_close(low.variance * n, diagonal(S), rtol=1e-10, atol=1e-10)


def test_sandwich_fit_serves_its_parts_at_the_same_numbers(dense_case):
    fit = fitted(dense_case, "sandwich", 12)
    served = fit.predict(dense_case.unseen, estimator=["hessian", "opg", "sandwich"])
    assert list(served) == ["hessian", "opg", "sandwich"]
    for name in ("hessian", "opg"):
        alone = fitted(dense_case, name, 12).predict(dense_case.unseen)
        torch.testing.assert_close(served[name].std, alone.std, rtol=1e-9, atol=0)
    assert torch.equal(fit.predict(dense_case.unseen, estimator="opg").std, served["opg"].std)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_covariance_is_symmetric_and_its_diagonal_the_variance(dense_case, estimator):
    out = fitted(dense_case, estimator, 10).predict(dense_case.unseen, covariance=True)
    torch.testing.assert_close(out.covariance, out.covariance.mT, rtol=0, atol=1e-14)
    torch.testing.assert_close(out.covariance.diagonal(dim1=1, dim2=2), out.variance)
    assert float(torch.linalg.eigvalsh(out.covariance).min()) > -1e-12


def test_float32_error_bars_are_close_to_float64(dense_case):
    case = dense_case
    for estimator in ("opg", "ggn", "sandwich"):
        exact = fitted(case, estimator, 20).predict(case.unseen)
        rough = fitted(case, estimator, 20, dtype=torch.float32).predict(case.unseen)
        assert rough.std.dtype == torch.float32
        torch.testing.assert_close(rough.std.double(), exact.std, rtol=2e-4, atol=0)


@pytest.mark.parametrize("estimator", ["opg", "ggn", "sandwich"])
def test_interval_holds_for_incremental_svd_which_underestimates(estimator):
    case = cached_case("linear", count=400, l2=0.001)
    exact = case.oracle.std(estimator, case.unseen)
    # Small blocks, so that much is cut on the way.
    fit = fitted(case, estimator, 6, solver="incremental", memory_budget=200_000)
    assert fit.spectra["ggn" if estimator == "ggn" else "opg"].slack > 1e-4
    out = fit.predict(case.unseen)
    assert bool((out.std_low <= exact).all())
    assert bool((exact <= out.std_high).all())
    score = exact.square().sum(1).sqrt()
    assert bool(((out.score - score).abs() <= out.score_error).all())


def test_float32_keeps_its_digits_for_confident_predictions():
    """With p → 1 all of a row of F but the 1 − p-th part cancels."""
    case = cached_case("linear", l2=0.01)
    fits = {dtype: fitted(case, "ggn", 10, dtype=dtype) for dtype in (torch.float32, torch.float64)}
    far = case.unseen * torch.logspace(0, 1.5, 7, dtype=torch.float64)[:, None]
    exact, rough = (fits[kind].predict(far) for kind in (torch.float64, torch.float32))
    assert float((1 - exact.mean.max(1).values).min()) < 1e-7  # confident enough to matter
    torch.testing.assert_close(rough.score.double(), exact.score, rtol=1e-3, atol=0)


def test_more_pairs_than_examples_in_float32_stay_at_or_above_l2():
    """Beyond N pairs every eigenvalue of G is λ, up to the rounding of the largest."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))
    data = torch.randn(20, 40), torch.randint(0, 3, (20,))
    for l2 in (1e-2, 1e-6):
        # Of an eigenvalue 1e-6 beside one of 2, a quarter is rounding.
        told = (
            pytest.warns(SpectrumWarning, match="can tell λ from") if l2 < 1e-5 else nullcontext()
        )
        with pytest.warns(OptimumWarning), told:
            fit = deltabars.fit(model, data, l2=l2, rank=50, solver="krylov", progress=False)
        assert float(fit.spectra["opg"].values[-1]) >= l2
        assert fit.diagnostics["opg"]["orthogonality"] < 1e-6
        with told:
            assert float(fit.with_l2(l2 / 10).spectra["opg"].values[-1]) > 0


def test_tail_leaves_out_what_is_not_positive():
    values = torch.tensor([3.0, 1.0, -0.5])
    tail = Tail.after(values, rank=3, l2=0.1, size=10)
    assert (tail.rank, tail.last) == (2, 1.0)
    covariance = build_covariance(
        "hessian", {"hessian": values}, rank=3, l2=0.1, num_parameters=10, num_examples=4
    )
    assert covariance.values.tolist() == [3.0, 1.0]


def test_one_default_everywhere_and_advice_where_gradients_vanish(capsys):
    sklearn = pytest.importorskip("deltabars.integrations.sklearn")
    default = inspect.signature(deltabars.fit).parameters["estimator"].default
    assert default == DEFAULT_ESTIMATOR == "opg"
    assert sklearn.DeltaClassifier().estimator == DEFAULT_ESTIMATOR
    inputs = torch.eye(4, dtype=torch.float64).repeat(5, 1)
    model = torch.nn.Linear(4, 4, bias=False).double()
    for scale, expected in ((9.0, True), (-9.0, False)):
        with torch.no_grad():
            model.weight.copy_(scale * torch.eye(4))
        for estimator in ("opg", "ggn"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit = deltabars.fit(
                    model, (inputs, torch.arange(20) % 4), l2=0.01, estimator=estimator
                )
            says = expected and estimator == "opg"
            assert ("estimator_advice" in fit.diagnostics) is says
            assert ("estimator='ggn'" in capsys.readouterr().err) is says
