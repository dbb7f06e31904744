"""Notebooks: a real kernel runs one, and what it shows is looked at; tables and pictures."""

from __future__ import annotations

import copy
import html.parser
import pickle
from functools import lru_cache

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


def kinds(outputs) -> set[str]:
    return {kind for output in outputs for kind in output.get("data", {})}


@lru_cache
def shown():
    """What a kernel shows of a fit, of its tables and its picture; the last one without widgets."""
    blocked = "import sys\nsys.modules['ipywidgets'] = None\n"
    return run(
        SETUP,
        FIT,
        "fit",
        "fit.predict(data[0])",
        "_ = fit.plot_spectrum()",
        blocked + FIT,
        FIT.replace("solver", "progress=False, solver"),
    )


# jupyter_client's own, about event loops and paths.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_shows_bars_tables_and_pictures():
    setup, fitted, table, prediction, picture, *_ = shown()
    assert setup == []
    assert "application/vnd.jupyter.widget-view+json" in kinds(fitted)
    assert "Eigenpairs of the hessian" in str(fitted)
    assert not [output for output in fitted if output.output_type == "stream"]
    assert "DeltaFit: hessian" in table[-1].data["text/html"]
    assert prediction[-1].data["text/html"].count("<svg") == 10
    assert "image/png" in kinds(picture)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_without_widgets_shows_text_and_nothing_when_off():
    *_, fitted, quiet = shown()
    text = "".join(output.text for output in fitted)
    assert {output.name for output in fitted} == {"stderr"}
    assert "Eigenpairs of the hessian" in text
    assert "Warning" not in text
    assert quiet == []


@lru_cache
def fitted(likelihood="categorical", estimator="sandwich"):
    case = make_case("dense", likelihood=likelihood)
    options = {"estimator": estimator, "likelihood": likelihood, "progress": False}
    return case, deltabars.fit(case.model, case.data, l2=case.l2, rank=9, **options)


class Cells(html.parser.HTMLParser):
    """The texts of a table's cells, and whether every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.tags = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_the_table_of_a_fit():
    _, fit = fitted()
    cells = Cells(fit._repr_html_()).cells
    assert cells[:8] == ["N", "P", "K", "λ", "29", "43", "9", "0.05"]
    for name, pairs in fit.spectra.items():
        at = cells.index(name)
        first, last = float(pairs.values[0]), float(pairs.values[-1])
        assert cells[at + 1 : at + 4] == [f"{first:.4g}", f"{last:.4g}", f"{last / 0.05:.4g}"]
    assert "background" not in fit._repr_html_()
    assert "effective parameters" in fit._repr_html_()


def test_text_in_a_table_is_escaped():
    case = make_case("dense")
    odd = {"*": 0.05, "[0-9<b>&]*": 0.05}
    fit = deltabars.fit(case.model, case.data, l2=odd, rank=3, progress=False)
    assert "<b>" not in fit._repr_html_()
    assert "0.05 (*), 0.05 ([0-9<b>&]*)" in Cells(fit._repr_html_()).cells


def test_the_table_of_a_prediction_has_bars_in_proportion():
    case, fit = fitted()
    out = fit.predict(case.unseen)
    page = Cells(out._repr_html_())
    bars = [a for tag, a in page.tags if tag == "rect" and a.get("opacity") is None]
    assert len(bars) == len(out)
    whole = float(next(a for tag, a in page.tags if tag == "rect" and a.get("opacity"))["width"])
    shares = [float(bar["width"]) / whole for bar in bars]
    assert shares == pytest.approx(out.mean.amax(1).tolist(), abs=0.06 / whole)
    said = [a["aria-label"] for tag, a in page.tags if tag == "svg"]
    std = out.std.gather(1, out.label[:, None])[:, 0]
    assert said == [f"{m:.4f} ± {s:.4f}" for m, s in zip(out.mean.amax(1), std, strict=True)]
    assert page.cells[:2] == ["input", "output"]
    assert "background" not in out._repr_html_()


def test_real_numbers_have_dots_on_one_scale():
    case, fit = fitted("gaussian", "ggn")
    out = fit.predict(case.unseen)
    page = Cells(out._repr_html_())
    places = [float(a["cx"]) for tag, a in page.tags if tag == "circle"]
    mean = out.mean.amax(1)
    assert torch.equal(torch.tensor(places).argsort(), mean.argsort())
    assert 0 <= min(places) <= max(places) <= 120
    assert fit.predict(case.unseen[:1])[0]._repr_html_().count("<circle") == 1


@pytest.fixture(autouse=True)
def _own_figures():
    """None of an earlier test, and none left for a later one."""
    pyplot.close("all")
    yield
    pyplot.close("all")


@pytest.fixture
def axes():
    return pyplot.subplots()[1]


def test_the_picture_of_a_spectrum(axes):
    _, fit = fitted()
    assert fit.plot_spectrum(axes) is axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    for name, pairs in fit.spectra.items():
        torch.testing.assert_close(
            torch.tensor(lines[name].get_ydata()), pairs.values.abs(), check_dtype=False
        )
        assert list(lines[name].get_xdata()) == list(range(1, 10))
    assert lines["λ = 0.05"].get_ydata()[0] == 0.05
    shaded = [band.get_label() for band in axes.collections]
    assert shaded == [f"{name}: 34 not computed" for name in fit.spectra]
    assert axes.get_yscale() == "log"


def test_a_whole_spectrum_leaves_nothing_shaded(axes):
    case = make_case("linear")
    fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=15, progress=False)
    fit.plot_spectrum(axes)
    assert len(axes.collections) == 0


def test_the_picture_of_a_few_inputs(axes):
    case, fit = fitted()
    out = fit.predict(case.unseen)[:3]
    assert out.plot(axes, targets=out.label, names=["a", "b", "c"]) is axes
    assert len(axes.containers) == 3
    for i, bars in enumerate(axes.containers):
        points, _, (spans,) = bars
        assert points.get_ydata() == pytest.approx(out.mean[i].numpy())
        ends = torch.tensor([[s[0][1], s[1][1]] for s in spans.get_segments()])
        torch.testing.assert_close(ends[:, 0], out.mean[i] - out.std[i])
        torch.testing.assert_close(ends[:, 1], out.mean[i] + out.std[i])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c"]
    assert axes.get_legend().get_texts()[0].get_text() == "input 0, right"


def test_the_picture_of_many_inputs(axes):
    case, fit = fitted()
    out = fit.predict(case.inputs)
    targets = case.targets
    out.plot(axes, targets=targets)
    every, right, wrong = axes.collections
    assert len(every.get_offsets()) == out.mean.numel()
    known = out.label == targets
    assert len(right.get_offsets()) == int(known.sum())
    chosen = out[~known]
    expected = torch.stack([chosen.mean.amax(1), chosen.std.gather(1, chosen.label[:, None])[:, 0]])
    assert wrong.get_offsets().data == pytest.approx(expected.T.numpy())
    assert axes.get_xlabel() == "probability"


def test_pictures_of_logits_chosen_classes_and_real_numbers(axes):
    case, fit = fitted()
    fit.predict(case.inputs, space="logit").plot(axes)
    assert axes.get_xlabel() == "mean"
    for inputs in (case.inputs, case.inputs[:2]):
        top = fit.predict(inputs, classes="top2").plot()
        assert top.get_legend() is not None
    other, real = fitted("gaussian", "ggn")
    few = real.predict(other.unseen[:2]).plot()
    assert few.get_ylabel() == "mean ± std"
    assert real.predict(other.unseen).plot().get_xlabel() == "mean"


def test_pictures_refuse():
    case, fit = fitted()
    out = fit.predict(case.unseen)
    with pytest.raises(BadValueError, match="one input or more"):
        out[:0].plot()
    with pytest.raises(BadValueError, match="names: expected one for each of all 3 outputs"):
        out.plot(names=["a"])
    with pytest.raises(BadValueError, match="targets: expected the true class of each of 7"):
        out.plot(targets=torch.zeros(3))
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("make", [copy.deepcopy, lambda fit: pickle.loads(pickle.dumps(fit))])
def test_a_copy_of_a_fit_predicts_the_same(make):
    case, fit = fitted()
    before = fit.predict(case.unseen)
    again = make(fit)
    assert torch.equal(again.predict(case.unseen).std, before.std)
    with pytest.raises(TypeError):
        again.spectra["opg"] = None
