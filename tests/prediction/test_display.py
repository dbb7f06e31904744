"""Fits and predictions as they show themselves: in a real notebook, as tables and as plots."""

from __future__ import annotations

from functools import lru_cache
from xml.etree import ElementTree

import nbformat
import pytest
import torch
from matplotlib import pyplot
from nbclient import NotebookClient

import deltabars
from deltabars.errors import BadValueError
from tests.networks import make_case

pyplot.switch_backend("agg")

SETUP = """
import warnings
warnings.filterwarnings("error", module="deltabars|tqdm|__main__")
import torch, deltabars
torch.set_num_threads(1)
torch.manual_seed(0)
model, l2 = torch.nn.Linear(4, 3), 1.0
data = torch.randn(50, 4), torch.randint(0, 3, (50,))
warnings.simplefilter("ignore", deltabars.errors.OptimumWarning)
"""
FIT = "fit = deltabars.fit(model, data, l2=l2, estimator='hessian', rank=4, solver='krylov')"


def run(*cells: str):
    """The outputs of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


# jupyter_client's own, about event loops and paths.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_shows_bars_tables_and_pictures():
    blocked = "import sys\nsys.modules['ipywidgets'] = None\n"
    shown = "fit", "fit.predict(data[0])", "_ = fit.plot_spectrum()"
    _, fitted, table, prediction, picture, plain = run(SETUP, FIT, *shown, blocked + FIT)
    assert "application/vnd.jupyter.widget-view+json" in str(fitted)
    assert "Eigenpairs of the hessian" in str(fitted)
    assert not [output for output in fitted if output.output_type == "stream"]
    assert "DeltaFit: hessian" in table[-1].data["text/html"]
    assert prediction[-1].data["text/html"].count("<svg") == 10
    assert "image/png" in str(picture)
    assert {output.name for output in plain} == {"stderr"}
    assert "Eigenpairs of the hessian" in "".join(output.text for output in plain)


@lru_cache
def fitted(likelihood="categorical", estimator="sandwich"):
    case = make_case("dense", likelihood=likelihood)
    options = {"estimator": estimator, "likelihood": likelihood, "progress": False}
    return case, deltabars.fit(case.model, case.data, l2=case.l2, rank=9, **options)


def test_the_table_of_a_fit():
    fit = fitted()[1]
    page = ElementTree.fromstring(f"<div>{fit._repr_html_()}</div>").iter()
    found = ["".join(each.itertext()) for each in page if each.tag in ("td", "th")]
    assert found[:8] == ["N", "P", "K", "λ", "29", "43", "9", "0.05"]
    for name, pairs in fit.spectra.items():
        at, first, last = found.index(name), float(pairs.values[0]), float(pairs.values[-1])
        assert found[at + 1 : at + 4] == [f"{first:.4g}", f"{last:.4g}", f"{last / 0.05:.4g}"]


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_the_table_of_a_prediction_has_error_bars_in_proportion(likelihood):
    case, fit = fitted(likelihood, "ggn")
    out = fit.predict(case.unseen)
    assert repr(out).startswith("Prediction of 7 inputs, 3 outputs")
    page = ElementTree.fromstring(f"<div>{out._repr_html_()}</div>")
    top = out.mean.argmax(1, keepdim=True)
    mean, std = out.mean.gather(1, top)[:, 0], out.std.gather(1, top)[:, 0]
    assert f"{float(mean[0]):.4f} ± {float(std[0]):.4f}" in repr(out)
    said = [drawn.get("aria-label") for drawn in page.iter("svg")]
    assert said == [f"{m:.4f} ± {s:.4f}" for m, s in zip(mean, std, strict=True)]
    dots = torch.tensor([float(drawn.get("cx")) for drawn in page.iter("circle")])
    low, high = (0, 1) if likelihood == "categorical" else ((mean - std).min(), (mean + std).max())
    expected = 4 + 112 * (mean - low) / (high - low)
    torch.testing.assert_close(dots.double(), expected, rtol=0, atol=0.051)


@pytest.fixture(autouse=True)
def _no_figures_left():
    yield
    pyplot.close("all")


def test_the_plot_of_a_spectrum():
    case = make_case("dense")
    options = {"estimator": "sandwich", "l2": 0.05, "rank": 9, "progress": False}
    fit = deltabars.fit(case.model, case.data, solver="krylov", smallest=4, **options)
    axes = pyplot.subplots()[1]
    assert fit.plot_spectrum(axes) is axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    for name, pairs in fit.spectra.items():
        assert lines[name].get_ydata() == pytest.approx(pairs.values.abs().numpy())
        assert list(lines[name].get_xdata()) == list(range(1, 10))
    assert lines["λ = 0.05"].get_ydata()[0] == 0.05
    lower = fit.spectra["hessian"].smallest
    end = lines[f"hessian, the {len(lower)} smallest"]
    assert end.get_ydata() == pytest.approx(lower.flip(0).abs().numpy())
    assert end.get_xdata()[0] > 10  # behind the gap
    whole = deltabars.fit(case.model, case.data, solver="dense", **options).plot_spectrum()
    (end,) = (line for line in whole.get_lines() if line.get_label() == "hessian, the 34 smallest")
    assert list(end.get_xdata()) == list(range(10, 44))


def test_the_plot_of_a_few_inputs():
    case, fit = fitted()
    out = fit.predict(case.unseen)[:3]
    axes = out.plot(targets=out.label)
    assert len(axes.containers) == 3
    for i, bars in enumerate(axes.containers):
        points, _, (spans,) = bars
        assert points.get_ydata() == pytest.approx(out.mean[i].numpy())
        ends = torch.tensor([[s[0][1], s[1][1]] for s in spans.get_segments()])
        torch.testing.assert_close(ends[:, 0], out.mean[i] - out.std[i])
        torch.testing.assert_close(ends[:, 1], out.mean[i] + out.std[i])


def test_the_plot_of_many_inputs():
    case, fit = fitted()
    out = fit.predict(case.inputs)
    every, right, wrong = out.plot(targets=case.targets).collections
    assert len(every.get_offsets()) == out.mean.numel()
    known = out.label == case.targets
    assert len(right.get_offsets()) == int(known.sum())
    chosen = out[~known]
    expected = torch.stack([chosen.mean.amax(1), chosen.std.gather(1, chosen.label[:, None])[:, 0]])
    assert wrong.get_offsets().data == pytest.approx(expected.T.numpy())


def test_plots_of_logits_chosen_classes_and_real_numbers():
    case, fit = fitted()
    assert fit.predict(case.inputs, space="logit").plot().get_xlabel() == "mean"
    other, real = fitted("gaussian", "ggn")
    assert real.predict(other.unseen[:2]).plot().get_ylabel() == "mean ± std"
    with pytest.raises(BadValueError, match="expected the true class of each of 7"):
        fit.predict(case.unseen).plot(targets=torch.zeros(3))
