"""Error bars against dense inverses, and intervals that must contain them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import deltabars
from deltabars.covariance.base import Tail
from deltabars.errors import OptimumWarning, SpectrumWarning
from tests.conftest import cached_case
from tests.networks import NETWORKS

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
SPACES = ("probability", "logit")
STRONG = 0.1  # an l2 that makes the Hessian of every smooth network positive definite
SMOOTH = [(kind, "categorical") for kind in NETWORKS if kind != "rectified"]
SMOOTH += [("dense", "bernoulli"), ("dense", "gaussian")]


def fitted(case, estimator, rank=None, **options):
    options = {"l2": case.l2, "rank": rank or case.oracle.size, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, **options)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("kind", "likelihood"), SMOOTH)
def test_full_rank_is_exact_inversion(kind, likelihood, estimator, space):
    case = cached_case(kind, l2=STRONG, likelihood=likelihood)
    assert float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
    exact = case.oracle.covariance(estimator, case.unseen, space)
    fit = fitted(case, estimator, likelihood=likelihood)
    out = fit.predict(case.unseen, space=space, covariance=True)
    std = exact.diagonal(dim1=1, dim2=2).sqrt()
    torch.testing.assert_close(out.covariance, exact, rtol=0, atol=1e-8)
    torch.testing.assert_close(out.std, std, rtol=0, atol=1e-8)
    torch.testing.assert_close(out.covariance.diagonal(dim1=1, dim2=2), out.variance)
    torch.testing.assert_close(out.score, std.square().sum(1).sqrt(), rtol=0, atol=1e-8)
    assert float((out.std_error / std).max()) < 1e-11  # nothing is left out


@pytest.mark.parametrize("seed", range(4))
def test_exact_value_lies_in_the_interval_at_every_rank(seed):
    """Trained networks of each kind; odd and even ranks by turns of seeds."""
    cases = [cached_case(kind, 15 + 9 * seed, 10 ** (-2 + 0.45 * seed), seed) for kind in NETWORKS]
    positive = [check_every_rank(case, seed) for case in cases]
    assert any(positive) or seed == 0  # the sandwich's interval needs such a Hessian


def check_every_rank(case, seed):
    """7 inputs, 3 classes, two spaces and each estimator; whether the Hessian is positive."""
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
                std, score = exact[name], exact[name].square().sum(1).sqrt()
                inside = [(out.std_low <= std + slack) & (std <= out.std_high + slack)]
                inside += [(out.score_low <= score + slack) & (score <= out.score_high + slack)]
                inside += [(out.std - std).abs() <= out.std_error + slack]
                inside += [(out.score - score).abs() <= out.score_error + slack]
                assert all(bool(each.all()) for each in inside), f"{name}, {space}, rank {rank}"
    return positive


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

    paper = fit.predict(case.unseen, bound="paper")
    published = 0.5 * ((variance + delta).sqrt() - (variance - delta).sqrt())
    torch.testing.assert_close(paper.std_error, published, rtol=1e-9, atol=0)

    low = fit.predict(case.unseen, full_rank=False)
    torch.testing.assert_close(low.variance, head, rtol=1e-10, atol=0)


@pytest.mark.parametrize("rank", [5, 9, 30])
def test_sandwich_is_the_papers_eight_terms(rank):
    case = cached_case("dense")
    fit = fitted(case, "sandwich", rank)
    h, g = fit.spectra["hessian"], fit.spectra["opg"]
    n, l2 = case.oracle.count, case.l2
    eye = torch.eye(case.oracle.size, dtype=torch.float64)
    qh, qg = h.vectors.T, g.vectors.T
    last_h, last_g = float(h.values[-1]), float(g.values[-1])
    head_h, head_g = qh / h.values @ qh.T, qg * g.values @ qg.T
    rest_h, rest_g = eye - qh @ qh.T, eye - qg @ qg.T
    tilde_h = 2 / (1 / l2 + 1 / last_h)
    tilde_g = 2 / (1 / l2 + 1 / last_g)
    S, A = (head_h @ middle @ head_h for middle in (head_g, rest_g))
    N, D = (rest_h @ middle @ head_h for middle in (head_g, rest_g))
    C, H = (rest_h @ middle @ rest_h for middle in (head_g, rest_g))
    rows = case.oracle.sensitivity(case.unseen, "probability")

    def diagonal(matrix):
        return (rows @ matrix @ rows.mT).diagonal(dim1=1, dim2=2)

    outer = C / tilde_h**2 + tilde_g / tilde_h**2 * H
    variance = S + tilde_g * A + (N + N.T) / tilde_h + tilde_g / tilde_h * (D + D.T) + outer
    variance = diagonal(variance)
    delta = 0.5 * diagonal(
        (last_g - l2) * A
        + (1 / l2 - 1 / last_h) * (N + N.T)
        + (last_g / l2 - l2 / last_h) * (D + D.T)
        + (1 / l2**2 - 1 / last_h**2) * C
        + (last_g / l2**2 - l2 / last_h**2) * H
    )
    out = fit.predict(case.unseen, bound="paper")
    torch.testing.assert_close(out.variance * n, variance, rtol=1e-10, atol=1e-10)
    upper, lower = ((variance + s * delta).clamp(min=0) / n for s in (1, -1))
    published = 0.5 * (upper.sqrt() - lower.sqrt())
    torch.testing.assert_close(out.std_error, published, rtol=1e-8, atol=1e-10)
    low = fit.predict(case.unseen, full_rank=False)
    torch.testing.assert_close(low.variance * n, diagonal(S), rtol=1e-10, atol=1e-10)


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
    # Of an eigenvalue 1e-6 beside one of 2, a quarter is rounding.
    with pytest.warns(OptimumWarning), pytest.warns(SpectrumWarning, match="can tell λ from"):
        fit = deltabars.fit(model, data, l2=1e-6, rank=50, solver="krylov", progress=False)
    assert float(fit.spectra["opg"].values[-1]) >= 1e-6
    assert fit.diagnostics["opg"]["orthogonality"] < 1e-6
    with pytest.warns(SpectrumWarning, match="can tell λ from"):
        assert float(fit.with_l2(1e-7).spectra["opg"].values[-1]) > 0


def test_tail_leaves_out_what_is_not_positive():
    values = torch.tensor([3.0, 1.0, -0.5])
    tail = Tail.after(values, rank=3, l2=0.1, size=10)
    assert (tail.rank, tail.last) == (2, 1.0)


@pytest.mark.filterwarnings("ignore::deltabars.errors.DeltaBarsWarning")
@pytest.mark.parametrize(("estimator", "scale"), [("opg", 9.0), ("opg", -9.0), ("ggn", 9.0)])
def test_advice_where_gradients_vanish(estimator, scale, capsys):
    data = torch.eye(4).repeat(5, 1), torch.arange(20) % 4
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = torch.nn.Parameter(scale * torch.eye(4))
    fit = deltabars.fit(model, data, l2=0.01, estimator=estimator)
    expected = (estimator, scale) == ("opg", 9.0)
    assert ("estimator_advice" in fit.diagnostics) is expected
    assert ("estimator='ggn'" in capsys.readouterr().err) is expected
