"""Predictions averaged over the parameters, against draws of the linear network and integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import deltabars
from deltabars.errors import BadValueError
from deltabars.likelihoods.losses import get_likelihood
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


def sampling(likelihood, classes, samples=512, seed=0):
    return Moderation(likelihood, normal_points(samples, classes, seed))


def entropy_of(p, likelihood):
    if likelihood == "bernoulli":
        p = torch.stack([p, 1 - p])
        return -(p * p.log()).sum(0).sum(-1)
    return -(p * p.log()).sum(-1)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("estimator", ["opg", "sandwich", "ggn"])
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
    assert bool((out.mutual_information > 0).all())
    assert bool((out.mutual_information <= out.entropy).all())


def integral(center, deviation):
    """E[f(center + deviation·ε)] of the sigmoid and of its entropy, by 20,001 points."""
    points = np.linspace(-12, 12, 20_001)
    weights = np.exp(-(points**2) / 2)
    weights /= weights.sum()
    z = center + deviation * points
    p, q = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
    return weights @ p, weights @ (-p * np.log(p) - q * np.log(q))


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("center", [-5.0, 0.0, 1.5])
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
    """Without scatter the mean stays; what all logits share, and their order, do not matter."""
    outputs, covariance = scattered(6, 5)
    for likelihood in (CATEGORICAL, BERNOULLI):
        found = sampling(likelihood, 5)(outputs, torch.zeros_like(covariance))
        torch.testing.assert_close(found.mean, likelihood.mean(outputs), rtol=1e-12, atol=0)
        torch.testing.assert_close(found.entropy, likelihood.entropy(found.mean))
        assert float(found.mutual_information.min()) >= 0
        assert float(found.mutual_information.max()) < 1e-14
    points = normal_points(512, 5, 0)
    expected = Moderation(CATEGORICAL, points)(outputs, covariance)
    moved = Moderation(CATEGORICAL, points)(outputs + 30.0, covariance + 25.0)
    order = torch.tensor([3, 0, 4, 1, 2])
    found = Moderation(CATEGORICAL, points[:, order])(
        outputs[:, order], covariance[:, order][:, :, order]
    )
    # The root of what the shift's scatter leaves of rounding: √(25·1e-16) or so.
    torch.testing.assert_close(moved.mean, expected.mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(moved.entropy, expected.entropy, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.mean, expected.mean[:, order], rtol=0, atol=1e-8)


@pytest.mark.parametrize("estimator", ["opg", "sandwich"])
def test_an_input_does_not_depend_on_the_others(dense_case, estimator):
    fit = fitted(dense_case, estimator)
    whole = fit.predict(dense_case.unseen)
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    others = [
        fit.predict(dense_case.unseen, batch_size=1),
        fit.predict(dense_case.unseen, batch_size=3),
        fit.predict(dense_case.unseen[order])[order.argsort()],
        fit.predict(dense_case.unseen, space="logit"),
        fit.predict(dense_case.unseen, estimator=[estimator, "opg"])[estimator],
    ]
    for other in others:
        for name in FIELDS:  # rounding, of which a root of V makes 1e-8
            torch.testing.assert_close(
                getattr(other, name), getattr(whole, name), rtol=0, atol=1e-7
            )


def test_a_seed_gives_the_same_bits_and_leaves_other_numbers_alone(dense_case):
    fit = fitted(dense_case)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (fit.predict(dense_case.unseen, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    for name in FIELDS:
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.moderated, other.moderated)
    assert torch.equal(first.std, other.std)
    # What 512 points are off by, on networks of few classes.
    torch.testing.assert_close(first.moderated, other.moderated, rtol=0, atol=0.005)


def test_points_are_standard_normal_and_covariances_may_be_singular_or_broken():
    points = normal_points(4096, 3, seed=4)
    torch.testing.assert_close(points.mean(0), torch.zeros(3).double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(points.T.cov(), torch.eye(3).double(), rtol=0, atol=5e-3)
    assert bool(normal_points(3, 200, seed=0).isfinite().all())
    outputs, _ = scattered(3, 4)
    factors = randn(3, 4, 1)
    covariance = factors @ factors.mT  # of rank 1
    expected = sampling(CATEGORICAL, 4)(outputs, covariance)
    assert bool((expected.mutual_information > 0).all())
    covariance[1, 0, 2] = math.nan
    found = sampling(CATEGORICAL, 4)(outputs, covariance)
    assert bool(found.mean[1].isnan().all())
    assert bool(found.mutual_information[1].isnan())
    assert torch.equal(found.mean[[0, 2]], expected.mean[[0, 2]])


def test_confident_predictions_in_float32():
    case = cached_case("linear", l2=0.01)
    far = case.unseen * torch.logspace(0, 1.2, 7, dtype=torch.float64)[:, None]
    exact, rough = (
        fitted(case, "ggn", 10, dtype=dtype).predict(far)
        for dtype in (torch.float64, torch.float32)
    )
    assert float((1 - exact.mean.max(1).values).min()) < 1e-3
    for name in FIELDS:
        found = getattr(rough, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), getattr(exact, name), rtol=2e-3, atol=1e-6)


def test_nothing_is_averaged_unless_it_can_be(dense_case):
    out = fitted(dense_case).predict(dense_case.unseen, moderation=None)
    assert all(getattr(out, name) is None for name in FIELDS)
    assert "moderated_0" not in out.to_pandas()
    probit = fitted(dense_case).predict(dense_case.unseen, moderation="probit")
    assert probit.mutual_information is None
    assert probit.numpy().keys() >= {"moderated", "entropy"}
    assert choose_moderation("auto", 512, 0, 101, CATEGORICAL, subset=False) is None
    assert choose_moderation("sampling", 512, 0, 101, CATEGORICAL, subset=False) is not None
    regression = cached_case("dense", likelihood="gaussian")
    fit = fitted(regression, likelihood="gaussian")
    assert fit.predict(regression.unseen).moderated is None
    with pytest.raises(BadValueError, match="no Gaussian likelihood"):
        fit.predict(regression.unseen, moderation="sampling")
    with pytest.raises(BadValueError, match=r"at most 21,201 outputs .* Use moderation='probit'"):
        choose_moderation("sampling", 512, 0, 30_000, CATEGORICAL, subset=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moderation": "laplace"}, "moderation: expected one of"),
        ({"moderation": True}, "moderation: expected one of"),
        ({"samples": 0}, "samples: expected a whole number from 1"),
        ({"samples": 2.5}, "samples: expected a whole number from 1"),
        ({"seed": -1}, "seed: expected a whole number from 0"),
        ({"moderation": "sampling", "classes": [0]}, "needs probabilities of all classes"),
    ],
)
def test_refusals(dense_case, options, message):
    with pytest.raises(BadValueError, match=message):
        fitted(dense_case).predict(dense_case.unseen, **options)
