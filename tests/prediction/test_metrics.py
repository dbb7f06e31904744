"""Numbers that summarise predictions, against sums over all pairs and against other libraries."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.classification import MulticlassCalibrationError

from deltabars.errors import BadValueError
from deltabars.prediction.metrics import (
    Regression,
    auroc,
    expected_calibration_error,
    regression,
    risk_coverage,
)


@pytest.mark.parametrize(("positives", "negatives"), [(1, 1), (40, 25), (7, 60)])
def test_auroc_counts_pairs(positives, negatives):
    generator = torch.Generator().manual_seed(positives)
    # Few values, so that many are tied.
    high = torch.randint(0, 9, (positives,), generator=generator) + 2
    low = torch.randint(0, 9, (negatives,), generator=generator)
    pairs = [(float(a > b) + float(a >= b)) / 2 for a in high for b in low]
    assert auroc(high, low) == pytest.approx(sum(pairs) / len(pairs), abs=1e-15)
    assert auroc(low, high) == pytest.approx(1 - auroc(high, low), abs=1e-15)


def test_auroc_of_the_ends_and_of_nothing():
    numbers = torch.arange(5)
    assert auroc(numbers + 5, numbers) == 1.0
    assert auroc(numbers, numbers) == 0.5
    for wrong in (torch.tensor([]), torch.tensor([1.0, torch.nan])):
        with pytest.raises(BadValueError, match="auroc: expected negatives that are numbers"):
            auroc(numbers, wrong)


def test_a_line_that_is_not_there():
    numbers = torch.tensor([1.0, 2.0, 4.0])
    assert regression(numbers, 2 * numbers + 1) == Regression(1.0, pytest.approx(1), 2.0)
    for x, y in ((numbers, torch.ones(3)), (torch.ones(3), numbers)):
        line = regression(x, y)
        assert all(math.isnan(value) for value in (line.r2, line.intercept, line.slope))


def test_auroc_is_scikit_learns():
    generator = torch.Generator().manual_seed(3)
    score = torch.randn(200, generator=generator).mul(4).round()  # with ties
    wrong = torch.rand(200, generator=generator) < 0.3
    expected = roc_auc_score(wrong.numpy(), score.numpy())
    assert auroc(score[wrong], score[~wrong]) == pytest.approx(expected, abs=1e-14)


def answered_in_every_order(score, wrong):
    """The mean risks over all orders in which no score comes before a lower one."""
    orders = [
        order
        for order in permutations(range(len(score)))
        if all(score[a] <= score[b] for a, b in pairwise(order))
    ]
    return [
        sum(sum(wrong[i] for i in order[:k]) / k for order in orders) / len(orders)
        for k in range(1, len(score) + 1)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_risk_coverage_is_the_mean_over_the_orders_of_ties(seed):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 3, (7,), generator=generator).float()
    wrong = torch.rand(7, generator=generator) < 0.4
    curve = risk_coverage(score, wrong)
    risks = answered_in_every_order(score.tolist(), wrong.tolist())
    assert curve.risk.tolist() == pytest.approx(risks, abs=1e-14)
    assert curve.coverage.tolist() == pytest.approx([k / 7 for k in range(1, 8)])
    assert curve.area == pytest.approx(sum(risks) / 7, abs=1e-14)
    shuffled = torch.randperm(7, generator=generator)
    assert torch.equal(risk_coverage(score[shuffled], wrong[shuffled]).risk, curve.risk)


def test_risk_coverage_of_the_ends():
    score = torch.arange(4.0)
    assert risk_coverage(score, torch.zeros(4)).area == 0.0
    best = risk_coverage(score, torch.tensor([0, 0, 0, 1]))
    assert best.risk.tolist() == [0, 0, 0, 0.25]
    worst = risk_coverage(score, torch.tensor([1, 0, 0, 0]))
    assert worst.area == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert best.risk[-1] == worst.risk[-1]


def test_risk_coverage_refuses():
    with pytest.raises(BadValueError, match=r"got shapes \(3,\) and \(2,\)"):
        risk_coverage(torch.rand(3), torch.zeros(2))
    with pytest.raises(BadValueError, match="n ≥ 1 inputs"):
        risk_coverage(torch.rand(0), torch.zeros(0))
    with pytest.raises(BadValueError, match="got NaN"):
        risk_coverage(torch.tensor([1.0, torch.nan]), torch.zeros(2))


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_is_that_of_torchmetrics(bins):
    generator = torch.Generator().manual_seed(bins)
    logits = 2 * torch.randn(300, 4, generator=generator, dtype=torch.float64)
    probabilities = logits.softmax(1)
    probabilities[0] = torch.tensor([1.0, 0, 0, 0])  # the ends of the last interval
    probabilities[1] = torch.full((4,), 0.25)  # a tie, and a lower end where there are four
    targets = torch.randint(0, 4, (300,), generator=generator)
    theirs = MulticlassCalibrationError(num_classes=4, n_bins=bins)
    # They have a bin of its own for probabilities of 1.
    one = torch.ones(len(targets), dtype=torch.bool)
    one[0] = False
    theirs.update(probabilities[one], targets[one])
    without = expected_calibration_error(probabilities[one], targets[one], bins)
    assert without == pytest.approx(float(theirs.compute()), abs=1e-6)  # they count in float32
    ours = expected_calibration_error(probabilities, targets, bins)
    assert ours == pytest.approx(by_hand(probabilities, targets, bins), abs=1e-14)


def by_hand(probabilities, targets, bins):
    total = 0.0
    for b in range(bins):
        rows = [
            (float(row.max()), int(row.argmax()) == int(target))
            for row, target in zip(probabilities, targets, strict=True)
            if min(int(float(row.max()) * bins), bins - 1) == b
        ]
        total += abs(sum(p for p, _ in rows) - sum(right for _, right in rows))
    return total / len(targets)


def test_calibration_error_refuses():
    good = torch.full((3, 2), 0.5)
    with pytest.raises(BadValueError, match=r"\(3, 2\) and \(2,\)"):
        expected_calibration_error(good, torch.zeros(2))
    with pytest.raises(BadValueError, match="outside"):
        expected_calibration_error(5 * good, torch.zeros(3))
    with pytest.raises(BadValueError, match="outside"):
        expected_calibration_error(good * torch.nan, torch.zeros(3))
    for bins in (0, 2.5, True):
        with pytest.raises(BadValueError, match="bins: expected a whole number"):
            expected_calibration_error(good, torch.zeros(3), bins)
