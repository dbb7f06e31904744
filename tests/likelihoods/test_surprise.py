"""χ of `Likelihood.surprise`: an example's gradient beside its own curvature, by eigenvalues."""

from __future__ import annotations

import pytest
import torch

from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian
from tests.likelihoods.test_losses import CLASS_WEIGHTS, POS_WEIGHTS
from tests.networks import make_targets
from tests.silence import randn

COUNT = 40
LIKELIHOODS = {
    "categorical": Categorical(),
    "smoothed": Categorical(label_smoothing=0.2),
    "weighted": Categorical(tuple(CLASS_WEIGHTS.tolist())),
    "weighted, smoothed": Categorical(tuple(CLASS_WEIGHTS.tolist()), 0.2),
    "bernoulli": Bernoulli(),
    "bernoulli weighted": Bernoulli(tuple(POS_WEIGHTS.tolist()), scale=0.7),
    "gaussian": Gaussian(),
    "gaussian with noise": Gaussian(0.3),
}


@pytest.fixture(params=LIKELIHOODS)
def likelihood(request):
    return LIKELIHOODS[request.param]


def drawn(likelihood, size, seed=0):
    """Outputs (40, 3) of that size, and targets for them."""
    generator = torch.Generator().manual_seed(seed + 100)
    return size * randn(COUNT, 3, seed=seed), make_targets(likelihood.name, COUNT, generator)


def derivatives(likelihood, outputs, targets):
    """∂loss/∂z (B, C) and ∂²loss/∂z² (B, C, C) of each example, by plain autograd."""
    found = []
    for z, y in zip(outputs, targets, strict=True):

        def loss(at, y=y):
            return likelihood.loss(at[None], y[None])[0]

        slope = torch.autograd.functional.jacobian(loss, z)
        found.append((slope, torch.autograd.functional.hessian(loss, z)))
    return (torch.stack(part) for part in zip(*found, strict=True))


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_a_gradient_is_below_that_multiple_of_its_curvature(likelihood, size):
    """ggᵀ ≤ χ·JᵀSJ for any J: no eigenvalue of the difference is below rounding."""
    outputs, targets = drawn(likelihood, size)
    chi = likelihood.surprise(outputs, targets)
    assert bool(chi.isfinite().all())
    slopes, curvatures = derivatives(likelihood, outputs, targets)
    jacobians = randn(COUNT, 3, 5, seed=1)
    gradients = (slopes[:, None] @ jacobians)[:, 0]
    whole = chi[:, None, None] * (jacobians.mT @ curvatures @ jacobians)
    gap = torch.linalg.eigvalsh(whole - gradients[:, :, None] * gradients[:, None])
    scale = whole.abs().amax((1, 2))
    # p(1 − p) of p = 1 − 1e-6 has ten digits in the curvature by autograd.
    assert bool((gap[:, 0] >= -1e-9 * scale).all())


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_no_smaller_multiple_would_do(likelihood, size):
    """It is the least one, ℓ'ᵀS⁺ℓ', but for what it is rounded up by."""
    outputs, targets = drawn(likelihood, size, 3)
    slopes, curvatures = derivatives(likelihood, outputs, targets)
    inverse = torch.linalg.pinv(curvatures, hermitian=True, rtol=1e-11)
    least = (slopes[:, None] @ inverse @ slopes[:, :, None])[:, 0, 0]
    ratio = likelihood.surprise(outputs, targets) / least
    assert bool((ratio >= 1).all())
    assert float(ratio.max()) < 1.002


def test_closed_forms():
    """(1 − p_y)/p_y of a class, ‖z − y‖² of numbers."""
    outputs, targets = drawn(Categorical(), 2.0)
    p = outputs.softmax(1).gather(1, targets[:, None])[:, 0]
    close = {"rtol": 2e-3, "atol": 0}
    torch.testing.assert_close(Categorical().surprise(outputs, targets), (1 - p) / p, **close)
    real = randn(COUNT, 3, seed=4)
    squares = (outputs - real).square().sum(1)
    torch.testing.assert_close(Gaussian().surprise(outputs, real), squares, **close)


def test_outside_of_the_curvature_it_is_infinite():
    """A wrong answer that is certain to the last bit has a gradient and no curvature there."""
    sure = torch.tensor([[800.0, 0.0, 0.0]]).double()
    for name in ("categorical", "weighted"):
        found = LIKELIHOODS[name].surprise(sure.repeat(2, 1), torch.tensor([0, 2]))
        assert float(found[0]) == 0  # nothing to explain
        assert float(found[1]) == torch.inf
    smoothed = Categorical(label_smoothing=0.2).surprise(sure, torch.tensor([0]))
    assert float(smoothed[0]) == torch.inf
    answers = torch.tensor([[900.0, 0.5, -0.5]]).double()
    right, wrong = torch.tensor([[1, 0, 0]]), torch.tensor([[0, 0, 0]])
    assert float(Bernoulli().surprise(answers, wrong)[0]) == torch.inf
    assert 0 < float(Bernoulli().surprise(answers, right)[0]) < 10


def test_single_precision_is_as_good(likelihood):
    outputs, targets = drawn(likelihood, 1.0)
    rough = likelihood.surprise(outputs.float(), targets)
    assert rough.dtype == torch.float64
    torch.testing.assert_close(rough, likelihood.surprise(outputs, targets), rtol=1e-5, atol=0)
