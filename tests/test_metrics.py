"""Numbers that summarise predictions, against sums over all pairs."""

from __future__ import annotations

import pytest
import torch

from deltabars.errors import BadValueError
from deltabars.metrics import auroc


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
