"""Local-linear regression against weighted least squares, one grid point at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltabars.errors import BadValueError
from deltabars.report import style as smoothing
from deltabars.report.style import smooth


def dense(x, y, grid, bandwidth):
    """Weighted least squares at each grid point, by numpy's solver on the plain design matrix."""
    values = []
    for t in grid.tolist():
        root = np.exp(-0.25 * ((x.double().numpy() - t) / bandwidth) ** 2)
        design = np.stack([np.ones(len(x)), x.double().numpy() - t], 1) * root[:, None]
        values.append(np.linalg.lstsq(design, y.double().numpy() * root, rcond=None)[0][0])
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def cloud():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(700, generator=generator)
    y = x * (1 - x) + 0.1 * torch.randn(700, generator=generator)
    return x, y


@pytest.mark.parametrize("bandwidth", [0.02, 0.1, 3.0])
def test_agrees_with_weighted_least_squares(cloud, bandwidth):
    grid = torch.linspace(0, 1, 23)
    curve = smooth(*cloud, grid, bandwidth)
    assert curve.dtype == torch.float64
    # At a bandwidth of 3 the points span a third of it: S₀S₂ − S₁² loses two digits of sixteen.
    torch.testing.assert_close(curve, dense(*cloud, grid, bandwidth), rtol=1e-10, atol=1e-12)


def test_chunks_do_not_change_it(cloud, monkeypatch):
    grid = torch.linspace(0, 1, 11)
    whole = smooth(*cloud, grid, 0.1)
    monkeypatch.setattr(smoothing, "_CHUNK", 33)  # with a ragged last one
    torch.testing.assert_close(smooth(*cloud, grid, 0.1), whole, rtol=1e-12, atol=0)


def test_rows_are_smoothed_one_by_one(cloud):
    x, y = cloud
    grid = torch.linspace(0, 1, 11)
    rows = torch.stack([y, y**2, 3 - y])
    together = smooth(x, rows, grid, 0.1)
    assert together.shape == (3, 11)
    apart = torch.stack([smooth(x, row, grid, 0.1) for row in rows])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-14)


def test_a_line_stays_a_line_up_to_the_ends(cloud):
    x, _ = cloud
    grid = torch.tensor([float(x.min()), 0.5, float(x.max())], dtype=torch.float64)
    curve = smooth(x, 2 * x.double() - 1, grid, 0.05)
    torch.testing.assert_close(curve, 2 * grid - 1, rtol=1e-12, atol=1e-12)


def test_nan_where_too_little_lies_nearby():
    x = torch.tensor([0.0, 0.05, 0.1, 0.5, 0.55, 0.9, 0.9, 0.9, 5.0])
    curve = smooth(x, x, torch.tensor([0.05, 0.5, 0.9, 2.0]), 0.1)
    # Three points; two points; three points, all weight on one x but for far neighbours; nothing.
    assert curve.isnan().tolist() == [False, True, False, True]


def test_nan_where_all_points_have_one_place():
    curve = smooth(torch.full((50,), 0.3), torch.rand(50), torch.tensor([0.3, 0.32]), 0.1)
    assert curve.isnan().all()


def test_many_far_points_do_not_make_a_value():
    """Many points at one end say nothing about the other, small weights or not."""
    x = torch.cat([torch.linspace(0.9, 1, 100_000), torch.tensor([0.4])])
    assert smooth(x, x, torch.tensor([0.4, 0.6]), 0.1).isnan().all()


def test_no_points_at_all():
    empty = torch.empty(0)
    assert smooth(empty, empty, torch.tensor([0.5]), 0.1).isnan().all()
    assert smooth(empty, torch.empty(4, 0), torch.tensor([0.5]), 0.1).shape == (4, 1)


@pytest.mark.parametrize(
    ("x", "y", "bandwidth"),
    [((5,), (4,), 0.1), ((5, 1), (5,), 0.1), ((5,), (2, 3, 5), 0.1), ((5,), (5,), 0.0)],
)
def test_bad_arguments_are_refused(x, y, bandwidth):
    with pytest.raises(BadValueError, match="expected"):
        smooth(torch.zeros(x), torch.zeros(y), torch.zeros(2), bandwidth)
