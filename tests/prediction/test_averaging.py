"""Predictions averaged over the parameters, against draws of the linear network and integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import deltabars
from deltabars.errors import BadValueError
from deltabars.likelihoods.base import get_likelihood
from deltabars.prediction.averaging import Moderation, choose_moderation, normal_points
from tests.conftest import cached_case
from tests.oracles import MEANS

CATEGORICAL, BERNOULLI = get_likelihood("categorical"), get_likelihood("bernoulli")
FIELDS = ("moderated", "entropy", "mutual_information")


def fitted(case, estimator="opg", rank=9, **options):
    options = {"l2": case.l2, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, rank=rank, **options)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def scattered(batch, classes, seed=0):
    """Logits and a covariance of theirs, as no network gave them."""
    factors = randn(batch, classes, 4, seed=seed + 1)
    return 2 * randn(batch, classes, seed=seed), factors @ factors.mT


def sampling(likelihood, classes, samples=512):
    return Moderation(likelihood, normal_points(samples, classes, 0))


def entropy_of(p, likelihood):
    if likelihood == "bernoulli":
        p = torch.stack([p, 1 - p]).movedim(0, -1)
        return -(p * p.log()).sum((-1, -2))
    return -(p * p.log()).sum(-1)


@pytest.mark.parametrize(
    ("estimator", "likelihood"), [("opg", "categorical"), ("sandwich", "bernoulli")]
)
def test_averages_are_those_of_the_linear_network(estimator, likelihood):
    """Weights drawn from the oracle's Σ, outputs by the oracle's Jacobian."""
    case = cached_case("dense", l2=0.1, likelihood=likelihood)
    fit = fitted(case, estimator, case.oracle.size, likelihood=likelihood)
    out = fit.predict(case.unseen, samples=4096)
    root = torch.linalg.cholesky(case.oracle.parameter_covariance(estimator))
    moves = randn(100_000, case.oracle.size) @ root.T
    jacobian = case.oracle.jacobian(case.unseen)
    centers = case.oracle.outputs(case.oracle.point, case.unseen).detach()
    for i, (center, rows) in enumerate(zip(centers, jacobian, strict=True)):
        drawn = MEANS[likelihood](center + moves @ rows.T)
        mean = drawn.mean(0)
        total = entropy_of(mean, likelihood)
        information = total - entropy_of(drawn, likelihood).mean()
        # Five times the largest standard error of 100,000 draws of a number between 0 and 1; the
        # entropies, of three answers each, vary by no more than three times as much.
        torch.testing.assert_close(out.moderated[i], mean, rtol=0, atol=0.008)
        torch.testing.assert_close(out.entropy[i], total, rtol=0, atol=0.016)
        torch.testing.assert_close(out.mutual_information[i], information, rtol=0, atol=0.016)


def integral(center, deviation):
    """E[f(center + deviation·ε)] of the sigmoid and of its entropy, by 20,001 points."""
    points = np.linspace(-12, 12, 20_001)
    weights = np.exp(-(points**2) / 2)
    weights /= weights.sum()
    z = center + deviation * points
    p, q = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
    return weights @ p, weights @ (-p * np.log(p) - q * np.log(q))


@pytest.mark.parametrize(("center", "scale"), [(-5.0, 4.0), (0.0, 0.1), (1.5, 1.0)])
def test_two_classes_are_an_integral_of_one_dimension(center, scale):
    covariance = scale**2 * torch.tensor([[[1.0, -0.3], [-0.3, 0.5]]], dtype=torch.float64)
    deviation = scale * (1.0 + 0.5 + 0.6) ** 0.5
    mean, left = integral(center, deviation)
    total = -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)
    outputs = torch.tensor([[center, 0.0]], dtype=torch.float64)
    single = outputs[:, :1], torch.tensor([[[deviation**2]]], dtype=torch.float64)
    for found in (
        sampling(CATEGORICAL, 2, 1 << 14)(outputs, covariance),
        sampling(BERNOULLI, 1, 1 << 14)(*single),
    ):
        assert float(found.mean[0, 0]) == pytest.approx(mean, abs=1e-4)  # 16,384 points
        assert float(found.entropy[0]) == pytest.approx(total, abs=3e-4)
        assert float(found.mutual_information[0]) == pytest.approx(total - left, abs=3e-4)
    probit = Moderation(BERNOULLI, None)(*single)
    assert float(probit.mean[0, 0]) == pytest.approx(mean, abs=0.02)  # what the formula is off by


def test_laws_of_averages():
    """Without scatter the mean stays."""
    outputs, covariance = scattered(6, 5)
    for likelihood in (CATEGORICAL, BERNOULLI):
        found = sampling(likelihood, 5)(outputs, torch.zeros_like(covariance))
        torch.testing.assert_close(found.mean, likelihood.mean(outputs), rtol=1e-12, atol=0)
        assert float(found.mutual_information.abs().max()) < 1e-14


def test_an_input_does_not_depend_on_the_others(dense_case):
    fit, unseen = fitted(dense_case, "sandwich"), dense_case.unseen
    whole = fit.predict(unseen)
    for other in (
        fit.predict(unseen, batch_size=3), fit.predict(unseen.flip(0))[torch.arange(7).flip(0)],
        fit.predict(unseen, space="logit"),
    ):  # fmt: skip
        for name in FIELDS:  # rounding, of which a root of V makes 1e-8
            found, expected = getattr(other, name), getattr(whole, name)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_a_seed_gives_the_same_bits_and_leaves_other_numbers_alone(dense_case):
    fit, state = fitted(dense_case), torch.get_rng_state()
    first, second, other = (fit.predict(dense_case.unseen, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.moderated, other.moderated)
    # What 512 points are off by, on networks of few classes.
    torch.testing.assert_close(first.moderated, other.moderated, rtol=0, atol=0.005)


def test_covariances_may_be_singular_or_broken():
    outputs, covariance = scattered(3, 4)
    covariance = covariance[..., :1] @ covariance[..., :1].mT  # of rank 1
    expected = sampling(CATEGORICAL, 4)(outputs, covariance)
    assert bool((expected.mutual_information > 0).all())
    covariance[1, 0, 2] = math.nan
    found = sampling(CATEGORICAL, 4)(outputs, covariance)
    assert bool(found.mean[1].isnan().all())
    assert torch.equal(found.mean[[0, 2]], expected.mean[[0, 2]])


def test_nothing_is_averaged_unless_it_can_be(dense_case):
    fit = fitted(dense_case)
    out = fit.predict(dense_case.unseen, moderation=None)
    assert all(getattr(out, name) is None for name in FIELDS)
    assert fit.predict(dense_case.unseen, moderation="probit").mutual_information is None
    assert choose_moderation("auto", 512, 0, 101, CATEGORICAL, subset=False) is None
    regression = cached_case("dense", likelihood="gaussian")
    real = fitted(regression, likelihood="gaussian")
    assert real.predict(regression.unseen).moderated is None
    with pytest.raises(BadValueError, match="no Gaussian likelihood"):
        real.predict(regression.unseen, moderation="sampling")
    for options, said in (
        ({"moderation": "laplace"}, "moderation: expected one of"),
        ({"samples": 2.5}, "samples: expected a whole number from 1"),
        ({"seed": -1}, "seed: expected a whole number from 0"),
        ({"moderation": "sampling", "classes": [0]}, "needs probabilities of all classes"),
    ):
        with pytest.raises(BadValueError, match=said):
            fit.predict(dense_case.unseen, **options)
