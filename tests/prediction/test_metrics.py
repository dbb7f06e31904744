"""Numbers that summarise predictions, against sums over all pairs and against other libraries."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.classification import MulticlassCalibrationError

from deltabars.errors import BadValueError
from deltabars.prediction.metrics import (
    auroc,
    expected_calibration_error,
    regression,
    risk_coverage,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_regression_is_least_squares():
    x = random(50, 4)
    y = 0.3 + 2.0 * x + 0.1 * random(50, 4, seed=1)
    line = regression(x, y)
    expected = np.polyfit(x.flatten().numpy(), y.flatten().numpy(), 1)
    assert (line.slope, line.intercept) == pytest.approx(tuple(expected))
    r = np.corrcoef(x.flatten().numpy(), y.flatten().numpy())[0, 1]
    assert line.r2 == pytest.approx(r**2)
    assert math.isnan(regression(torch.ones(50, 4), y).slope)


def test_auroc_is_scikit_learns():
    score = random(200).mul(4).round()  # with ties
    wrong = random(200, seed=9) < -0.5
    expected = roc_auc_score(wrong.numpy(), score.numpy())
    assert auroc(score[wrong], score[~wrong]) == pytest.approx(expected, abs=1e-14)
    assert auroc(score[~wrong], score[wrong]) == pytest.approx(1 - expected, abs=1e-14)


@pytest.mark.parametrize("seed", range(2))
def test_risk_coverage_is_the_mean_over_the_orders_of_ties(seed):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 3, (7,), generator=generator).float()
    wrong = torch.rand(7, generator=generator) < 0.4
    curve = risk_coverage(score, wrong)
    orders = [o for o in permutations(range(7)) if bool((score[list(o)].diff() >= 0).all())]
    risks = torch.stack([wrong[list(o)].cumsum(0) for o in orders]).double().mean(0)
    risks = (risks / torch.arange(1, 8)).tolist()
    assert curve.risk.tolist() == pytest.approx(risks, abs=1e-14)
    assert curve.area == pytest.approx(sum(risks) / 7, abs=1e-14)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_is_that_of_torchmetrics(bins):
    probabilities = (2 * random(300, 4, seed=bins)).softmax(1)
    probabilities[0] = torch.full((4,), 0.25)  # a tie, and a lower end where there are four
    targets = torch.arange(300) % 4
    theirs = MulticlassCalibrationError(num_classes=4, n_bins=bins)
    theirs.update(probabilities, targets)
    ours = expected_calibration_error(probabilities, targets, bins)
    assert ours == pytest.approx(float(theirs.compute()), abs=1e-6)  # they count in float32


def test_numbers_that_do_not_fit_are_refused():
    good = torch.full((3, 2), 0.5)
    for call, message in (
        (lambda: risk_coverage(torch.rand(3), torch.zeros(2)), r"got shapes \(3,\) and \(2,\)"),
        (lambda: expected_calibration_error(good, torch.zeros(2)), r"\(3, 2\) and \(2,\)"),
        (lambda: expected_calibration_error(5 * good, torch.zeros(3)), "outside"),
    ):
        with pytest.raises(BadValueError, match=message):
            call()
