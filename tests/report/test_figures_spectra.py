"""Pictures of spectra: means, bands, crossings and gaps are where they belong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deltabars.errors import BadValueError
from deltabars.report.spectra import Spectrum, draw_spectra, save_spectra
from tests.report.test_figures import L2, P, legend_texts, lines, spectrum, tails


def test_the_line_is_the_mean_where_all_networks_have_the_index():
    given = spectrum()
    left, first, last, right = draw_spectra([given], L2, P).axes[0].lines[:4]
    a, b, c = (v.numpy() for v in given.largest)
    np.testing.assert_allclose(left.get_ydata(), (a[:15] + b + c[:15]) / 3, rtol=1e-14)
    np.testing.assert_array_equal(left.get_xdata(), np.arange(1, 16))
    for line, own in ((first, a), (last, c)):  # b ends at 15
        np.testing.assert_allclose(line.get_ydata(), own[15:], rtol=1e-14)
        np.testing.assert_array_equal(line.get_xdata(), np.arange(16, 21))
    # The right end of the axis is index P, the smallest eigenvalue.
    expected = torch.stack(list(given.smallest)).abs().mean(0).flip(0)
    np.testing.assert_allclose(right.get_ydata(), expected, rtol=1e-14)
    np.testing.assert_allclose(np.diff(right.get_xdata()), 1)


def test_the_band_reaches_from_the_smallest_to_the_largest():
    given = spectrum()
    band = draw_spectra([given], L2, P).axes[0].collections[0].get_paths()[0].vertices
    at_one = band[np.isclose(band[:, 0], 1), 1]
    assert at_one.min() == pytest.approx(3.0)
    assert at_one.max() == pytest.approx(3.6)


def test_the_crossing_lies_between_the_signs():
    axes = draw_spectra([spectrum()], L2, P).axes[0]
    places = axes.lines[3].get_xdata()  # of the ten smallest, the last one has index P
    crossing = lines(axes)["mean zero crossing"].get_xdata()[0]
    assert crossing == pytest.approx((places[-5] + places[-6]) / 2)
    low, high = places[-6] - 0.5, places[-4] - 0.5
    span = next(p for p in axes.patches if p.get_label() == "its range")
    assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((low, high))


def test_crossings_that_are_not_seen_are_left_out_and_told():
    given = replace(spectrum(), smallest=tails(0, 10, 3))  # none; somewhere in the gap; three
    assert "mean zero crossing, seen in 1 of 3" in legend_texts(draw_spectra([given], L2, P))
    given = replace(spectrum(), smallest=tails(0, 0, 0))
    assert not any("crossing" in t for t in legend_texts(draw_spectra([given], L2, P)))


def test_the_gap_says_how_many_are_missing():
    axes = draw_spectra([spectrum()], L2, P).axes[0]
    assert [text.get_text().split("\n")[0] for text in axes.texts] == ["gap: 970"]
    assert lines(axes)["λ = 0.01"].get_ydata()[0] == L2


def test_a_whole_spectrum_has_no_gap():
    given = Spectrum("G", [torch.linspace(2, 1, 30)], [torch.linspace(-0.5, 0.9, 20)])
    figure = draw_spectra([given], L2, 50)
    left, right = figure.axes[0].lines[:2]
    np.testing.assert_allclose([*left.get_xdata(), *right.get_xdata()], np.arange(1, 51))
    assert not figure.axes[0].texts
    assert {"one network", "zero crossing"} <= set(legend_texts(figure))


def test_one_network_has_no_band(tmp_path):
    given = Spectrum("G", spectrum().largest[:1], [torch.empty(0)])
    figure = draw_spectra([given], L2, P)
    assert not figure.axes[0].collections
    assert legend_texts(figure) == ["one network", "λ = 0.01"]
    save_spectra(tmp_path / "a.png", [given], L2, P)


def test_an_exact_zero_is_drawn_below_the_axis(tmp_path):
    smallest = [torch.tensor([-0.1, 0.0, 0.1])]
    given = Spectrum("H", [torch.tensor([2.0, 1.0])], smallest)
    axes = draw_spectra([given], L2, P).axes[0]
    assert axes.lines[1].get_ydata()[1] == 0
    assert 0 < axes.get_ylim()[0] <= L2
    save_spectra(tmp_path / "a.png", [given], L2, P)


def test_bad_spectra_are_refused():
    with pytest.raises(BadValueError, match="one network or more, got 0 and 0"):
        draw_spectra([Spectrum("H", [], [])], L2, P)
    with pytest.raises(BadValueError, match="29 eigenvalues at most, got 30"):
        draw_spectra([spectrum()], L2, 29)
