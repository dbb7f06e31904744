"""Intervals hold whatever the rounding of stored eigenvectors does."""

from __future__ import annotations

import pytest
import torch

from deltabars.covariance.base import Defects
from deltabars.covariance.estimators import build_covariance
from tests.silence import randn


def spread_of(seed, estimator, rank, step):
    """Exact variances, and intervals by eigenvectors that were rounded to multiples of `step`.

    Some f are chosen to suffer most: the singular vectors of what rounding takes away.
    """
    size, level = 14, 0.05
    values = {}
    matrices, kept, lost, away = {}, {}, {}, []
    for number, name in enumerate(("hessian", "opg")):
        basis = torch.linalg.qr(randn(size, size, seed=7 * seed + number)).Q
        scales = level + 10 ** torch.linspace(1.5, -4, size, dtype=torch.float64)
        matrices[name] = basis @ torch.diag(scales) @ basis.T
        values[name], exact = scales, basis.T[:rank]
        kept[name] = (exact / step).round() * step, exact
        gap = kept[name][0] - exact
        lost[name] = float(torch.linalg.svdvals(gap)[0])
        away.append(torch.linalg.svd(gap, full_matrices=False)[2][:3])
    f = torch.cat([randn(4, size, seed=seed + 100), *away, kept["hessian"][1][:2]])[:, None]
    inverse = torch.linalg.inv(matrices["hessian"])
    whole = inverse @ matrices["opg"] @ inverse if estimator == "sandwich" else inverse
    exact = torch.einsum("bcp,pq,bcq->bc", f, whole, f) / 20
    projections = {name: f @ q.T for name, (q, _) in kept.items()}

    def spread(roundings):
        defects = {name: Defects(rounding=r) for name, r in (roundings or {}).items()}
        covariance = build_covariance(
            estimator, values, rank=rank, l2=level, num_parameters=size, num_examples=20,
            overlap=kept["hessian"][1] @ kept["opg"][1].T, defects=defects,
        )  # fmt: skip
        return covariance.spread(f.square().sum(-1), projections)

    return exact, spread(lost), spread(None)


@pytest.mark.parametrize("estimator", ["hessian", "sandwich"])
def test_intervals_hold_whatever_rounding_does(estimator):
    """12 problems, 6 ranks, 3 coarsenesses, up to 12 f; without the widening many would not."""
    missed = 0
    for seed in range(12):
        for rank in (1, 3, 6, 10, 13, 14):
            for step in (0.3, 0.03, 0.003):
                exact, wide, narrow = spread_of(seed, estimator, rank, step)
                low, high = exact * (1 + 1e-9), exact * (1 - 1e-9)
                assert bool(((wide.low <= low) & (high <= wide.high)).all())
                assert bool(((wide.low >= 0) & (wide.low <= narrow.low)).all())
                assert bool((wide.high >= narrow.high).all())
                missed += int(((narrow.low > low) | (high > narrow.high)).sum())
    assert missed > 100


@pytest.mark.parametrize("rank", [1, 6, 13])
@pytest.mark.parametrize("estimator", ["hessian", "sandwich"])
def test_where_next_to_nothing_is_lost_next_to_nothing_is_added(estimator, rank):
    _, wide, narrow = spread_of(0, estimator, rank, 1e-13)
    # ‖ΠGu‖ is a root of a difference: what is lost of that is the root of 1e-13.
    pairs, atol = ((each.low, each.high) for each in (wide, narrow)), 1e-5 * narrow.high.max()
    torch.testing.assert_close(*pairs, rtol=1e-6, atol=float(atol))
