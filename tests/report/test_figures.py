"""Every picture: the file, its bytes, and that what is drawn is what was given."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deltabars.errors import BadValueError, MissingDependencyError, StorageError
from deltabars.fitting.tuning import Tuning
from deltabars.report import uncertainty as uncertainty_module
from deltabars.report.galleries import (
    Block,
    Row,
    draw_gallery,
    draw_rankings,
    save_gallery,
    save_rankings,
)
from deltabars.report.spectra import Spectrum, save_spectra, save_tuning
from deltabars.report.style import FALSE_POSITIVE, FULL_RANK, TRUE_POSITIVE, smooth
from deltabars.report.uncertainty import (
    Comparison,
    Foreign,
    Panel,
    draw_comparisons,
    draw_foreign,
    draw_surfaces,
    draw_uncertainty,
    save_comparisons,
    save_foreign,
    save_surfaces,
    save_uncertainty,
)

P, L2 = 1000, 0.01


def random(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tails(*negative):
    """Ascending tails of ten eigenvalues, with so many negative ones."""
    return [torch.arange(10, dtype=torch.float64) / 100 - n / 100 + 0.005 for n in negative]


def spectrum():
    largest = [3 / torch.arange(1, k + 1, dtype=torch.float64) for k in (20, 15, 20)]
    return Spectrum("H", [(1 + i / 10) * v for i, v in enumerate(largest)], tails(4, 5, 6))


def panel(n=400, wrong=60):
    p = random(n, 4).softmax(1) ** 3
    p = p / p.sum(1, keepdim=True)
    right = torch.arange(n) >= wrong
    return Panel("OPG", p, p * (1 - p) * (1 + random(n, 4, seed=1)), p.argmax(1), right)


def foreign(image=None):
    full = torch.linspace(3, 2, 6)
    references = random(10, 6)
    image = random(8, 8) if image is None else image
    return Foreign(image, torch.arange(1, 7), full, full - 0.5, full + 0.5, full / 2, references)


def block(*colours, title="lowest"):
    return Block(title, random(3, 2, *colours, 6, 5), ["ant", "bee", "cicada"])


def comparison(slope=1.2):
    x = random(500)
    y = x * (0 if math.isnan(slope) else slope) + 0.01
    return Comparison("a", x, y, slope, 0.01, 0.987, "std, Hessian", "std, OPG")


def tuning():
    levels = torch.logspace(-4, 1, 41)
    values = -levels.log10().square()
    fit = SimpleNamespace(level=1.0)
    return Tuning(
        "marginal_likelihood", 1.0, fit, 0.01, levels, values, values - 1, values + 1, False
    )


RANKS, GRID = torch.tensor([1, 5, 20]), torch.linspace(0, 1, 9)
PICTURES = {
    "spectra": lambda path: save_spectra(path, [spectrum()], L2, P),
    "uncertainty": lambda path: save_uncertainty(path, [panel()] * 3, "t"),
    "surfaces": lambda path: save_surfaces(path, RANKS, GRID, random(3, 9), random(3, 9), "t"),
    "foreign": lambda path: save_foreign(path, foreign(), "t"),
    "rankings": lambda path: save_rankings(path, [block()] * 4, "t"),
    "comparison": lambda path: save_comparisons(path, [comparison()] * 3, "t"),
    "tuning": lambda path: save_tuning(path, tuning()),
    "gallery": lambda path: save_gallery(path, "t", [Row("r", random(2, 4, 4), ["a", "b"])]),
}


@pytest.mark.parametrize("name", PICTURES)
class TestFiles:
    def test_png_twice_the_same(self, name, tmp_path):
        for file in ("a.png", "b.png"):
            PICTURES[name](tmp_path / file)
        first = (tmp_path / "a.png").read_bytes()
        assert first.startswith(b"\x89PNG")
        assert first == (tmp_path / "b.png").read_bytes()

    def test_missing_folder(self, name, tmp_path):
        with pytest.raises(StorageError, match=r"Cannot write .*No such file"):
            PICTURES[name](tmp_path / "no" / "a.png")

    def test_missing_matplotlib(self, name, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'deltabars\[figures\]'"):
            PICTURES[name](tmp_path / "a.png")


@pytest.mark.parametrize("suffix", [".pdf", ".svg"])
def test_other_formats_twice_the_same(suffix, tmp_path):
    for stem in "ab":
        PICTURES["foreign"](tmp_path / f"{stem}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_the_users_settings_are_neither_used_nor_changed(tmp_path):
    import matplotlib

    PICTURES["foreign"](tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 30, "xtick.labelsize": 30, "axes.grid": True}):
        PICTURES["foreign"](tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_odd_names_are_refused(tmp_path):
    with pytest.raises(BadValueError, match=r"ends in one of \.png, \.pdf, \.svg"):
        PICTURES["foreign"](tmp_path / "a.jpg")


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def legend_texts(figure):
    legends = figure.legends + [a.get_legend() for a in figure.axes if a.get_legend()]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


class TestUncertainty:
    def test_curves_are_the_smoothed_predicted_classes(self):
        given = panel()
        axes = draw_uncertainty([given]).axes[0]
        p, std = (t.gather(1, given.label[:, None])[:, 0] for t in (given.probability, given.std))
        for color, these in ((TRUE_POSITIVE, given.right), (FALSE_POSITIVE, ~given.right)):
            line = next(line for line in axes.lines if line.get_color() == color)
            grid = torch.from_numpy(line.get_xdata())
            assert float(grid[0]) == float(p[these].min())
            assert float(grid[-1]) == float(p[these].max())
            expected = smooth(p[these], std[these], grid, 0.05)
            np.testing.assert_allclose(line.get_ydata(), expected.numpy())

    def test_counts(self):
        texts = legend_texts(draw_uncertainty([panel()] * 3))
        assert texts == ["all classes (1,600)", "true positives (340)", "false positives (60)"]

    def test_panels_with_other_counts_have_legends_of_their_own(self):
        texts = legend_texts(draw_uncertainty([panel(), panel(wrong=7)]))
        assert {"false positives (60)", "false positives (7)"} <= set(texts)

    @pytest.mark.parametrize("wrong", [0, 1, 400])
    def test_few_or_no_false_or_true_positives(self, wrong, tmp_path):
        given = panel(wrong=wrong)
        save_uncertainty(tmp_path / "a.png", [given])
        assert f"false positives ({wrong})" in legend_texts(draw_uncertainty([given]))

    def test_more_dots_than_wanted_are_sampled(self, monkeypatch):
        monkeypatch.setattr(uncertainty_module, "_MOST_DOTS", 100)
        given = panel()
        dots = draw_uncertainty([given]).axes[0].collections[0].get_offsets()
        assert len(dots) == 100
        known = set(
            zip(given.probability.flatten().tolist(), given.std.flatten().tolist(), strict=True)
        )
        assert {tuple(dot) for dot in dots.tolist()} <= known


class TestSurfaces:
    def test_cells_without_values_are_left_out(self, tmp_path):
        from matplotlib.image import imread

        whole = random(3, 9) + 1
        holed = whole.clone()
        holed[0, :4] = torch.nan
        save_surfaces(tmp_path / "a.png", RANKS, GRID, holed, whole, "t")
        dots = imread(tmp_path / "a.png")[..., :3]
        coloured = np.ptp(dots, axis=2) > 0.1  # the rest is grey
        left, right = np.split(coloured, 2, axis=1)
        assert 0.3 * right.sum() < left.sum() < 0.95 * right.sum()

    def test_the_axis_reaches_from_zero_to_the_highest_value(self):
        std, error = random(3, 9), random(3, 9, seed=1)
        std[1, 2] = torch.nan
        first, second = draw_surfaces(RANKS, GRID, std, error, "t").axes
        assert first.get_zlim() == pytest.approx((0, float(std.nan_to_num().max())))
        assert second.get_zlim() == pytest.approx((0, float(error.max())))

    def test_nothing_but_nan(self, tmp_path):
        nothing = torch.full((3, 9), torch.nan)
        save_surfaces(tmp_path / "a.png", RANKS, GRID, nothing, random(3, 9), "t")


class TestForeign:
    def test_curves_and_interval(self):
        given = foreign()
        curves, picture = draw_foreign(given, "t").axes
        drawn = lines(curves)
        np.testing.assert_array_equal(drawn["full rank"].get_ydata(), given.full)
        np.testing.assert_array_equal(drawn["low rank"].get_ydata(), given.low_rank)
        assert drawn["full rank"].get_color() == FULL_RANK
        assert len(curves.lines) == 12
        band = curves.collections[0].get_paths()[0].vertices[:, 1]
        assert (band.min(), band.max()) == (1.5, 3.5)
        np.testing.assert_array_equal(picture.images[0].get_array(), given.image)

    def test_colours(self):
        image = random(3, 4, 6)
        drawn = draw_foreign(foreign(image), "t").axes[1].images[0].get_array()
        np.testing.assert_array_equal(drawn, image.permute(1, 2, 0))


@pytest.mark.parametrize("colours", [(), (3,)])
def test_rankings_are_sharp_and_in_their_places(colours, tmp_path):
    """Every pixel is 2×2 equal dots of the file, of its own colour."""
    from matplotlib.image import imread

    given = block(*colours)
    figure = draw_rankings([given, replace(given, title="highest")], "t")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["ant", "bee", "cicada"]
    assert not figure.axes[1].get_yticklabels()
    save_rankings(tmp_path / "a.png", [given, given], "t")
    dots = imread(tmp_path / "a.png")
    for axes in figure.axes:
        box = axes.get_window_extent()
        left, top = round(box.x0), len(dots) - round(box.y1)
        for row in range(3):
            for column in range(2):
                y, x = top + row * 14, left + column * 12
                shown = dots[y : y + 12, x : x + 10, :3].reshape(6, 2, 5, 2, 3)
                image = given.images[row, column].numpy()
                image = image.transpose(1, 2, 0) if colours else 1 - image[..., None]
                # A pixel beside the block's frame is under it; colours are steps of 4/255 apart.
                wanted = np.broadcast_to(image[:, None, :, None], shown.shape)
                inner = np.s_[1:-1, :, 1:-1]
                np.testing.assert_allclose(shown[inner], wanted[inner], atol=2.6 / 255)


class TestComparison:
    def test_counts_lines_and_numbers(self):
        axes = draw_comparisons([comparison(), comparison(0.4)]).axes[0]
        assert axes.collections[0].get_array().sum() == 500
        drawn = lines(axes)
        assert drawn["identity"].get_slope() == 1
        assert drawn["regression"].get_slope() == 1.2
        assert drawn["regression"].get_xy1() == (0, 0.01)
        assert axes.texts[0].get_text() == "R² = 0.987\nslope = 1.200\nintercept = 0.0100"
        assert axes.get_xlim() == axes.get_ylim()

    def test_numbers_that_no_line_can_be_laid_through(self):
        (axes,) = draw_comparisons([comparison(math.nan)]).axes[:1]
        assert set(lines(axes)) == {"identity"}
        assert list(axes.texts) == []

    def test_one_scale_of_colours(self):
        figure = draw_comparisons([comparison(), replace(comparison(), x=torch.full((500,), 0.5))])
        first, second = (axes.collections[0].norm for axes in figure.axes[:2])
        assert (first.vmin, first.vmax) == (second.vmin, second.vmax)

    def test_equal_points(self, tmp_path):
        zeros = replace(comparison(), x=torch.zeros(3), y=torch.zeros(3))
        save_comparisons(tmp_path / "a.png", [zeros])


def test_gallery_rows_may_differ_in_length():
    rows = [Row("r", random(3, 4, 4), list("abc")), Row("s", random(1, 4, 4), ["d"])]
    captions = [axes.get_xlabel() for axes in draw_gallery("t", rows).axes]
    assert captions == ["a", "b", "c", "d", "", ""]
