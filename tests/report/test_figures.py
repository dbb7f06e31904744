"""Every figure: the file, its bytes, and that what is drawn is what was given."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deltabars.errors import BadValueError, MissingDependencyError, StorageError
from deltabars.fitting.checking import Check, agreement
from deltabars.fitting.tuning import Tuning
from deltabars.report.spectra import Spectrum, save_spectra, save_tuning
from deltabars.report.style import FALSE_POSITIVE, TRUE_POSITIVE, smooth
from deltabars.report.uncertainty import (
    Block,
    Comparison,
    Foreign,
    Panel,
    Row,
    save_checks,
    save_comparisons,
    save_foreign,
    save_gallery,
    save_rankings,
    save_surfaces,
    save_uncertainty,
)

P, L2 = 1000, 0.01
RANKS, GRID = torch.tensor([1, 5, 20]), torch.linspace(0, 1, 9)


def random(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spectrum():
    largest = [3 / torch.arange(1, k + 1, dtype=torch.float64) for k in (20, 15, 20)]
    smallest = [torch.arange(10, dtype=torch.float64) / 100 - n / 100 + 0.005 for n in (4, 5, 6)]
    return Spectrum("H", [(1 + i / 10) * v for i, v in enumerate(largest)], smallest)


def panel(n=400, wrong=60):
    p = (3 * random(n, 4)).softmax(1)
    right = torch.arange(n) >= wrong
    return Panel("OPG", p, p * (1 - p) * (1 + random(n, 4, seed=1)), p.argmax(1), right)


def check(spread, slope):
    """Bars of 40 inputs, and a scatter that is a multiple of them."""
    std = random(40, 3)
    return Check(std, slope * std, spread, 5, agreement(std, slope * std))


def foreign():
    full = torch.linspace(3, 2, 6)
    ranks, references = torch.arange(1, 7), random(10, 6)
    return Foreign(random(8, 8), ranks, full, full - 0.5, full + 0.5, full / 2, references)


def block(*colours, title="lowest"):
    return Block(title, random(3, 2, *colours, 6, 5), ["ant", "bee", "cicada"])


def comparison(slope=1.2):
    x = random(500)
    y = x * (0 if math.isnan(slope) else slope) + 0.01
    return Comparison("a", x, y, slope, 0.01, 0.987, "std, Hessian", "std, OPG")


def tuning():
    levels = torch.logspace(-4, 1, 41)
    values, fit = -levels.log10().square(), SimpleNamespace(level=1.0)
    ends = values - 1, values + 1
    return Tuning("marginal_likelihood", 1.0, fit, 0.01, levels, values, *ends, False)


FIGURES = {
    "spectra": lambda path: save_spectra(path, [spectrum()], L2, P),
    "uncertainty": lambda path: save_uncertainty(path, [panel()] * 3, "t"),
    "surfaces": lambda path: save_surfaces(path, RANKS, GRID, random(3, 9), random(3, 9), "t"),
    "foreign": lambda path: save_foreign(path, foreign(), "t"),
    "rankings": lambda path: save_rankings(path, [block()] * 4, "t"),
    "comparison": lambda path: save_comparisons(path, [comparison()] * 3, "t"),
    "tuning": lambda path: save_tuning(path, tuning()),
    "checks": lambda path: save_checks(path, [check("sampling", 0.5)]),
    "gallery": lambda path: save_gallery(
        path, "t", [Row("r", random(3, 4, 4), list("abc")), Row("s", random(1, 4, 4), ["d"])]
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_files(name, tmp_path, monkeypatch):
    FIGURES[name](tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'deltabars\[figures\]'"):
        FIGURES[name](tmp_path / "a.png")


def test_files_that_cannot_be_written(tmp_path):
    with pytest.raises(StorageError, match=r"Cannot write .*No such file"):
        FIGURES["tuning"](tmp_path / "no" / "a.png")
    with pytest.raises(BadValueError, match=r"ends in one of \.png, \.pdf, \.svg"):
        FIGURES["tuning"](tmp_path / "a.jpg")


def test_the_users_settings_are_neither_used_nor_changed(tmp_path):
    import matplotlib

    for suffix in (".pdf", ".svg", ".png"):
        FIGURES["foreign"](tmp_path / f"a{suffix}")
        with matplotlib.rc_context({"font.size": 30, "axes.grid": True}):
            FIGURES["foreign"](tmp_path / f"b{suffix}")
            assert matplotlib.rcParams["font.size"] == 30
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.png"


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_a_line_a_network_and_the_mean_where_all_have_the_index(path):
    given = spectrum()
    upper, lower = save_spectra(path, [given], L2, P).axes
    a, b, c = (v.numpy() for v in given.largest)
    mean = lines(upper)["mean of 3 networks"]
    np.testing.assert_allclose(mean.get_ydata(), (a[:15] + b + c[:15]) / 3, rtol=1e-14)
    np.testing.assert_array_equal(mean.get_xdata(), np.arange(1, 16))
    for line, own in zip(upper.lines, (a, b, c), strict=False):
        np.testing.assert_array_equal(line.get_ydata(), own)
    # The lower end is drawn against k − P: zero is the smallest eigenvalue.
    mean = lines(lower)["mean of 3 networks"]
    expected = torch.stack(list(given.smallest)).abs().mean(0)
    np.testing.assert_allclose(mean.get_ydata(), expected, rtol=1e-14)
    np.testing.assert_array_equal(mean.get_xdata(), -np.arange(10))
    assert lines(upper)["λ = 0.01"].get_ydata()[0] == L2
    crossing = lines(lower)["mean zero crossing, seen in 3 of 3"]
    assert crossing.get_xdata()[0] == pytest.approx(-4.5)


def test_curves_are_the_smoothed_predicted_classes(path):
    given = panel()
    axes = save_uncertainty(path, [given, panel(wrong=0)]).axes[0]
    p, std = (t.gather(1, given.label[:, None])[:, 0] for t in (given.probability, given.std))
    for color, these in ((TRUE_POSITIVE, given.right), (FALSE_POSITIVE, ~given.right)):
        line = next(line for line in axes.lines if line.get_color() == color)
        grid = torch.from_numpy(line.get_xdata())
        assert (float(grid[0]), float(grid[-1])) == (float(p[these].min()), float(p[these].max()))
        np.testing.assert_allclose(line.get_ydata(), smooth(p[these], std[these], grid, 0.05))
    assert len(axes.collections[0].get_offsets()) == given.std.numel()
    assert axes.get_xlabel() == "probability (340 true, 60 false positives)"


def test_curves_and_interval_of_a_foreign_image(path):
    given = foreign()
    curves, picture = save_foreign(path, given, "t").axes
    drawn = lines(curves)
    np.testing.assert_array_equal(drawn["full rank"].get_ydata(), given.full)
    np.testing.assert_array_equal(drawn["low rank"].get_ydata(), given.low_rank)
    assert len(curves.lines) == 12
    band = curves.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.5, 3.5)
    np.testing.assert_array_equal(picture.images[0].get_array(), given.image)
    image = random(3, 4, 6)
    picture = save_foreign(path, replace(given, image=image), "t").axes[1]
    np.testing.assert_array_equal(picture.images[0].get_array(), image.permute(1, 2, 0))


@pytest.mark.parametrize("colours", [(), (3,)])
def test_rankings_have_each_image_in_its_cell(colours, path):
    given = block(*colours)
    first, second = save_rankings(path, [given, replace(given, title="highest")], "t").axes
    assert [t.get_text() for t in first.get_yticklabels()] == ["ant", "bee", "cicada"]
    assert not second.get_yticklabels()
    for row in range(3):
        for column in range(2):
            shown = first.images[0].get_array()[7 * row : 7 * row + 6, 6 * column : 6 * column + 5]
            image = given.images[row, column].numpy()
            np.testing.assert_allclose(shown, image.transpose(1, 2, 0) if colours else 1 - image)


def test_comparisons_count_and_draw_lines_on_one_scale(path):
    equal = replace(comparison(0.4), x=torch.zeros(500), y=torch.zeros(500))
    figure = save_comparisons(path, [comparison(), equal, comparison(math.nan)])
    first, second, third = figure.axes[:3]
    assert first.collections[0].get_array().sum() == 500
    drawn = lines(first)
    assert (drawn["identity"].get_slope(), drawn["regression"].get_slope()) == (1, 1.2)
    assert drawn["regression"].get_xy1() == (0, 0.01)
    assert first.get_xlim() == first.get_ylim()
    assert first.collections[0].norm.vmax == second.collections[0].norm.vmax
    assert set(lines(third)) == {"identity"}  # through which no line can be laid


def test_checks_have_a_panel_each_with_their_points_and_line(path):
    given = [check("sampling", 0.5), check("posterior", 1.1)]
    for axes, each in zip(save_checks(path, given).axes, given, strict=True):
        points, equal, fitted = axes.lines
        np.testing.assert_array_equal(points.get_xdata(), each.std.flatten())
        np.testing.assert_array_equal(points.get_ydata(), each.scatter.flatten())
        slopes = [line.get_ydata()[1] / line.get_xdata()[1] for line in (equal, fitted)]
        assert slopes == pytest.approx([1, each.agreement.slope])
        assert (axes.get_xlabel(), axes.get_title()) == (
            f"error bar ({each.spread})", "R² 1.00, Spearman 1.00"
        )  # fmt: skip
        assert axes.get_xlim() == axes.get_ylim()


# In one chunk, and in two.
@pytest.mark.parametrize(("count", "bandwidth"), [(700, 0.02), (9000, 0.1), (700, 3.0)])
def test_smoothing_is_weighted_least_squares(count, bandwidth):
    x, grid = random(count).float(), torch.linspace(0, 1, 23)
    y = x * (1 - x) + 0.1 * random(count, seed=1)
    points, values = x.double().numpy(), y.double().numpy()
    expected = []
    for t in grid.tolist():
        root = np.exp(-0.25 * ((points - t) / bandwidth) ** 2)  # of the weights, as polyfit asks
        expected.append(np.polyfit(points - t, values, 1, w=root)[1])
    # At a bandwidth of 3 the points span a third of it: S₀S₂ − S₁² loses two digits of sixteen.
    found = smooth(x, y, grid, bandwidth).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_smoothing_is_nan_where_too_little_lies_nearby():
    x = torch.tensor([0.0, 0.05, 0.1, 0.5, 0.55, 0.9, 0.9, 0.9, 5.0])
    curve = smooth(x, x, torch.tensor([0.05, 0.5, 0.9, 2.0]), 0.1)
    # Three points; two points; three points, all weight on one x but for far neighbours; nothing.
    assert curve.isnan().tolist() == [False, True, False, True]
