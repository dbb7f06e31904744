"""Certified error bars: the dense float64 value lies inside, and the interval is narrow."""

from __future__ import annotations

import warnings

import pytest
import torch

import deltabars
from deltabars.errors import BadValueError, ConvergenceWarning, OptimumWarning, SpectrumWarning
from deltabars.likelihoods.gaussian import Gaussian
from tests.conftest import cached_case
from tests.networks import make_case
from tests.oracles import Oracle


def fitted(case, estimator="opg", rank=5, **options):
    options = {"l2": case.l2, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, rank=rank, **options)


def holds(out, exact):
    """Whether all intervals hold the exact values, up to the rounding of a dense inverse."""
    low = torch.cat([out.std_low.flatten(), out.score_low])
    high = torch.cat([out.std_high.flatten(), out.score_high])
    value = torch.cat([exact.flatten(), exact.norm(dim=1)])
    slack = 1e-11 * value  # the condition number is up to 1e4 here
    return bool(((low <= value + slack) & (value - slack <= high)).all())


@pytest.mark.parametrize("kind", ["dense", "convolutional", "rectified", "shared"])
@pytest.mark.parametrize("estimator", ["opg", "ggn"])
def test_random_networks(kind, estimator):
    """Of three ranks and two tolerances."""
    seed = len(kind) % 3
    case = make_case(kind, l2=(0.05, 0.005, 0.5)[seed], seed=100 + seed)
    exact = case.oracle.std(estimator, case.unseen)
    for rank in (1, 2 + 6 * seed, case.oracle.size):
        fit = fitted(case, estimator, rank)
        for tolerance in (1e-3, 1e-9):
            out = fit.certify(case.unseen, case.data, tolerance=tolerance)
            assert holds(out, exact)
            assert bool((out.std_error <= tolerance * out.std).all())
            assert bool((out.score_error <= tolerance * out.score).all())
            assert bool(((out.std - exact).abs() <= out.std_error + 1e-11 * exact).all())


def test_logits_other_decays_and_sandwich_fits():
    case = cached_case("dense", l2=0.1)
    single = fitted(case, dtype=torch.float32).certify(case.unseen, case.data)
    assert holds(single, case.oracle.std("opg", case.unseen))
    fit = fitted(case, "sandwich")
    out = fit.certify(case.unseen, case.data, estimator="opg", space="logit")
    assert holds(out, case.oracle.std("opg", case.unseen, "logit"))
    torch.testing.assert_close(out.mean, case.model(case.unseen).detach())
    moved = fitted(case).with_l2(0.02).certify(case.unseen, case.data)
    own = Oracle(case.model, case.inputs, case.targets, 0.02)
    assert holds(moved, own.std("opg", case.unseen))
    several = fitted(case, l2={"*": 0.1, "*.bias": 0.07}).certify(case.unseen, case.data)
    parts = case.model.named_parameters()
    per = torch.cat([torch.full((p.numel(),), 0.07 if n[2:] == "bias" else 0.1) for n, p in parts])
    own = Oracle(case.model, case.inputs, case.targets, per.double())
    assert holds(several, own.std("opg", case.unseen))


@pytest.mark.parametrize("kind", ["dense", "convolutional", "rectified"])
@pytest.mark.parametrize("estimator", ["opg", "ggn", "sandwich"])
def test_the_sampling_spread(kind, estimator):
    """Of three ranks and tolerances; of a sandwich fit that of G."""
    seed = len(kind) % 3
    case = make_case(kind, l2=(0.05, 0.005, 0.5)[seed], seed=200 + seed)
    asked = {"spread": "sampling"} | ({"estimator": "opg"} if estimator == "sandwich" else {})
    exact = case.oracle.std("ggn" if estimator == "ggn" else "opg", case.unseen, spread="sampling")
    for rank in (1, 2 + 6 * seed, case.oracle.size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpectrumWarning)  # about H, which is not asked for
            fit = fitted(case, estimator, rank)
        for tolerance in (1e-2, 1e-4, 1e-6):
            out = fit.certify(case.unseen, case.data, tolerance=tolerance, **asked)
            assert holds(out, exact)
            assert bool((out.std_error <= tolerance * out.std).all())
            assert bool((out.score_error <= tolerance * out.score).all())
            assert bool(((out.std - exact).abs() <= out.std_error + 1e-11 * exact).all())


@pytest.mark.parametrize("estimator", ["opg", "ggn"])
def test_the_sampling_spread_in_other_ways(estimator):
    """Logits, float32, a moved λ, λs by pattern, noise, a file, and too few products."""
    case, asked = cached_case("dense", l2=0.1), {"spread": "sampling"}
    single = fitted(case, estimator, dtype=torch.float32).certify(case.unseen, case.data, **asked)
    assert holds(single, case.oracle.std(estimator, case.unseen, **asked))
    fit = fitted(case, estimator)
    out = fit.certify(case.unseen, case.data, space="logit", batch_size=3, **asked)
    assert holds(out, case.oracle.std(estimator, case.unseen, "logit", "sampling"))
    moved = fit.with_l2(0.02).certify(case.unseen, case.data, **asked)
    own = Oracle(case.model, case.inputs, case.targets, 0.02)
    assert holds(moved, own.std(estimator, case.unseen, **asked))
    several = fitted(case, estimator, l2={"*": 0.1, "*.bias": 0.07})
    levels = [
        (p.numel(), 0.07 if n[2:] == "bias" else 0.1) for n, p in case.model.named_parameters()
    ]
    per = torch.cat([torch.full((count,), level, dtype=torch.float64) for count, level in levels])
    own = Oracle(case.model, case.inputs, case.targets, per)
    out = several.certify(case.unseen, case.data, **asked)
    assert holds(out, own.std(estimator, case.unseen, **asked))
    real = make_case("dense", l2=0.05, seed=7, likelihood="gaussian")
    for noise in (0.3, "estimate"):
        whole = fitted(real, estimator, real.oracle.size, likelihood=Gaussian(noise))
        few = fitted(real, estimator, 12, likelihood=Gaussian(noise)).with_noise(whole.noise)
        out = few.certify(real.unseen, real.data, tolerance=1e-8, **asked)
        assert holds(out, whole.predict(real.unseen, **asked).std)
    hard = make_case("dense", l2=0.0005, seed=5)
    few, options = fitted(hard, estimator, 1), {"tolerance": 1e-8, "max_products": 3, **asked}
    with pytest.warns(ConvergenceWarning, match="that are wider after 3 products. They hold"):
        out = few.certify(hard.unseen, hard.data, **options)
    assert holds(out, hard.oracle.std(estimator, hard.unseen, **asked))


def test_a_prediction_that_no_example_moves_is_certified_as_zero():
    """An input that is orthogonal to those of the training: no replica says anything else of it."""
    model = torch.nn.Linear(4, 3, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    inputs = torch.eye(4).double()[:2].repeat(10, 1)
    data = inputs, torch.arange(20) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimumWarning)
        fit = deltabars.fit(model, data, l2=0.1, rank=2, estimator="ggn", progress=False)
    out = fit.certify(torch.eye(4).double()[2:3], data, spread="sampling")
    assert float(out.std_high.max()) < 1e-7  # the root of rounding


@pytest.mark.parametrize("estimator", ["opg", "ggn"])
@pytest.mark.parametrize("noise", [0.3, 2.5, "estimate"])
def test_regression(estimator, noise):
    """Noise scales the data part of G and the number of examples; all pairs give the answer."""
    case = make_case("dense", l2=0.05, seed=7, likelihood="gaussian")
    options = {"likelihood": Gaussian(noise=noise)}
    whole = fitted(case, estimator, case.oracle.size, **options)
    exact = whole.predict(case.unseen)
    few = fitted(case, estimator, 12, **options).with_noise(whole.noise)
    out = few.certify(case.unseen, case.data, tolerance=1e-9)
    assert holds(out, exact.std)


def test_batches_loaders_and_saved_fits_agree(tmp_path):
    case = cached_case("dense", l2=0.1)
    fit = fitted(case)
    whole = fit.certify(case.unseen, case.data, tolerance=1e-8)
    fit.save(tmp_path / "a.deltabars")
    again = deltabars.load(tmp_path / "a.deltabars", case.model, progress=False)
    pairs = torch.utils.data.TensorDataset(*case.data)
    loader = torch.utils.data.DataLoader(pairs, batch_size=4)
    parts = again.certify(case.unseen, loader, tolerance=1e-8, batch_size=2)
    torch.testing.assert_close(parts.std, whole.std, rtol=2e-8, atol=0)
    assert torch.equal(parts.label, whole.label)


def test_too_few_products_are_told():
    case = make_case("dense", l2=0.0005, seed=5)
    with pytest.warns(ConvergenceWarning, match="that are wider after 3 products. They hold"):
        out = fitted(case, rank=1).certify(case.unseen, case.data, tolerance=1e-10, max_products=3)
    assert holds(out, case.oracle.std("opg", case.unseen))


def test_refused():
    case = cached_case("dense", l2=0.1)
    fit, single = fitted(case), fitted(case, dtype=torch.float32)
    hessian, sandwich = fitted(case, "hessian"), fitted(case, "sandwich")
    x, data = case.unseen, case.data
    for refused, match in (
        (lambda: hessian.certify(x, data), r"opg or ggn.*got hessian. Fit with estimator='ggn'"),
        (lambda: sandwich.certify(x, data), r"got sandwich. Pass estimator='opg'"),
        (lambda: single.certify(x, data, tolerance=1e-8), r"torch.float32 can promise, got 1e-08."),
        (lambda: fit.certify(x, data, tolerance=0), "tolerance: expected a number above zero"),
        (lambda: fit.certify(x, data, max_products=1), "max_products: expected a whole number"),
        (lambda: fit.certify(x, (case.inputs + 1, case.targets)), "training data of the fit"),
        (lambda: fit.certify(x[:0], data), "at least one"),
        (lambda: fit.certify(x * torch.nan, data), "Inputs: expected finite values"),
    ):
        with pytest.raises(BadValueError, match=match):
            refused()
