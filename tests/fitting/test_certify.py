"""Certified error bars: the dense float64 value lies inside, and the interval is narrow."""

from __future__ import annotations

import pytest
import torch

import deltabars
from deltabars.errors import BadValueError, ConvergenceWarning
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
