"""Certified error bars: the dense float64 value lies inside, and the interval is narrow."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import BadValueError, ConvergenceWarning, DataError
from deltabars.likelihoods.gaussian import Gaussian
from tests.conftest import cached_case
from tests.networks import make_case
from tests.oracles import Oracle

L2S = (0.05, 0.005, 0.5)


def fitted(case, estimator="opg", rank=5, **options):
    options = {"l2": case.l2, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, rank=rank, **options)


def holds(out, exact):
    """Whether all intervals hold the exact values, up to the rounding of a dense inverse."""
    slack = 1e-11  # its condition number is up to 1e4 here
    std, score = exact.double(), exact.double().square().sum(1).sqrt()
    pairs = ((out.std_low, std, out.std_high), (out.score_low, score, out.score_high))
    return all(
        bool((low <= (1 + slack) * value).all()) and bool(((1 - slack) * value <= high).all())
        for low, value, high in pairs
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["dense", "convolutional", "rectified", "shared"])
@pytest.mark.parametrize("estimator", ["opg", "ggn"])
def test_random_networks(seed, kind, estimator):
    """24 networks, two matrices, three ranks, two tolerances, 7 inputs of 3 classes: 6,048."""
    case = make_case(kind, l2=L2S[seed % 3], seed=100 + seed)
    exact = case.oracle.std(estimator, case.unseen)
    for rank in (1, 2 + 3 * seed, case.oracle.size):
        fit = fitted(case, estimator, rank)
        for tolerance in (1e-3, 1e-9):
            out = fit.certify(case.unseen, case.data, tolerance=tolerance)
            assert holds(out, exact)
            assert bool((out.std_error <= tolerance * out.std).all())
            assert bool((out.score_error <= tolerance * out.score).all())
            assert bool(((out.std - exact).abs() <= out.std_error + 1e-11 * exact).all())


def test_single_precision():
    for seed in range(8):
        case = make_case("dense", l2=L2S[seed % 3], seed=200 + seed)
        fit = fitted(case, dtype=torch.float32)
        out = fit.certify(case.unseen, case.data)
        assert holds(out, case.oracle.std("opg", case.unseen))
        assert out.std.dtype == torch.float32


def test_logits_other_decays_and_sandwich_fits():
    case = cached_case("dense", l2=0.1)
    fit = fitted(case, "sandwich")
    out = fit.certify(case.unseen, case.data, estimator="opg", space="logit")
    assert holds(out, case.oracle.std("opg", case.unseen, "logit"))
    torch.testing.assert_close(out.mean, case.model(case.unseen).detach())
    moved = fitted(case).with_l2(0.02).certify(case.unseen, case.data)
    own = Oracle(case.model, case.inputs, case.targets, 0.02)
    assert holds(moved, own.std("opg", case.unseen))
    several = fitted(case, l2={"*": 0.1, "*.bias": 0.07}).certify(case.unseen, case.data)
    per = torch.cat(
        [
            torch.full_like(value, 0.07 if name.endswith("bias") else 0.1).detach().flatten()
            for name, value in case.model.named_parameters()
        ]
    )
    assert holds(
        several, Oracle(case.model, case.inputs, case.targets, per).std("opg", case.unseen)
    )


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
    torch.testing.assert_close(out.total_std, exact.total_std, rtol=1e-8, atol=0)


def test_weighted_losses():
    case = make_case("dense", l2=0.05, seed=8)
    options = {"likelihood": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deltabars.errors.OptimumWarning)
        exact = fitted(case, rank=case.oracle.size, **options).predict(case.unseen)
        fit = fitted(case, **options)
    assert holds(fit.certify(case.unseen, case.data, tolerance=1e-9), exact.std)


def test_parameters_that_no_example_reaches():
    """Of silent units A is λ; an unseen input may switch them on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)
    ).double()
    with torch.no_grad():
        model[0].bias[:3] = -5.0
    inputs = torch.rand(30, 4, dtype=torch.float64)
    targets = torch.randint(0, 3, (30,))
    unseen = torch.randn(9, 4, dtype=torch.float64) * 20
    oracle = Oracle(model, inputs, targets, 0.1)
    with pytest.warns(deltabars.errors.OptimumWarning):
        fit = deltabars.fit(model, (inputs, targets), l2=0.1, rank=4, progress=False)
    assert fit.diagnostics["parameters_reached"] < fit.num_parameters
    out = fit.certify(unseen, (inputs, targets), tolerance=1e-6)
    assert holds(out, oracle.std("opg", unseen))


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


def test_weights_of_the_fit_are_used():
    case = make_case("dense", seed=3)
    fit = fitted(case)
    before = fit.certify(case.unseen, case.data)
    exact = case.oracle.std("opg", case.unseen)
    with torch.no_grad():
        for weight in case.model.parameters():
            weight.mul_(2.0)
    after = fit.certify(case.unseen, case.data)
    assert torch.equal(before.std, after.std)
    assert holds(after, exact)


def test_too_few_products_are_told():
    case = make_case("dense", l2=0.0005, seed=5)
    with pytest.warns(ConvergenceWarning, match="that are wider after 3 products. They hold"):
        out = fitted(case, rank=1).certify(case.unseen, case.data, tolerance=1e-10, max_products=3)
    assert holds(out, case.oracle.std("opg", case.unseen))


@pytest.mark.parametrize("tolerance", [0, -1e-3, float("nan"), "tight", True])
def test_bad_tolerances(tolerance):
    case = cached_case("dense", l2=0.1)
    with pytest.raises(BadValueError, match="tolerance: expected a number above zero"):
        fitted(case).certify(case.unseen, case.data, tolerance=tolerance)


def test_refused():
    case = cached_case("dense", l2=0.1)
    fit = fitted(case)
    with pytest.raises(BadValueError, match=r"opg or ggn.*got hessian. Fit with estimator='ggn'"):
        fitted(case, "hessian").certify(case.unseen, case.data)
    with pytest.raises(BadValueError, match=r"got sandwich. Pass estimator='opg'"):
        fitted(case, "sandwich").certify(case.unseen, case.data)
    with pytest.raises(BadValueError, match=r"torch.float32 can promise, got 1e-08. Fit with"):
        fitted(case, dtype=torch.float32).certify(case.unseen, case.data, tolerance=1e-8)
    others = (case.inputs + 1, case.targets)
    with pytest.raises(DataError, match="the training data of the fit"):
        fit.certify(case.unseen, others)
    with pytest.raises(BadValueError, match="max_products: expected a whole number from 3"):
        fit.certify(case.unseen, case.data, max_products=1)
    with pytest.raises(BadValueError, match="batch_size"):
        fit.certify(case.unseen, case.data, batch_size=0)
    with pytest.raises(BadValueError, match="space"):
        fit.certify(case.unseen, case.data, space="odds")
    with pytest.raises(DataError):
        fit.certify(case.unseen[:0], case.data)
    with pytest.raises(DataError, match="Inputs: expected finite values"):
        fit.certify(case.unseen * float("nan"), case.data)
