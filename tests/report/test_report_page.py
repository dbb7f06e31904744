"""The numbers in a report page, and what it refuses."""

from __future__ import annotations

import base64
import io
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deltabars
from deltabars.errors import BadValueError, DataError, MissingDependencyError, StorageError
from deltabars.fitting.state import Calibration
from deltabars.integrations.convergence import train_to_convergence
from deltabars.prediction.metrics import expected_calibration_error, risk_coverage
from deltabars.report.page import save_report
from tests.pages import COUNT, HOSTILE, RANK, data_of, digits

CLOSE = {"rel": 1e-4, "abs": 1e-12}  # five digits are written
QUICK = {"ranks": [RANK], "progress": False}


@pytest.fixture(scope="module")
def made():
    return digits()


@pytest.fixture(scope="module")
def data(made, tmp_path_factory):
    return data_of(made.save(tmp_path_factory.mktemp("page") / "report.html"))


def test_rows_are_the_predictions_of_the_fit(made, data):
    rows, out = data["rows"], made.prediction
    assert rows["index"] == list(range(COUNT))
    assert rows["label"] == out.label.tolist()
    assert rows["target"] == made.labels.tolist()
    assert rows["right"] == (out.label == made.labels).int().tolist()
    for key, value in (
        ("score", out.score), ("low", out.score_low), ("high", out.score_high),
        ("bound", out.score_error / out.score), ("information", out.mutual_information),
        ("entropy", out.entropy), ("top", out.mean.max(1).values),
    ):  # fmt: skip
        assert rows[key] == pytest.approx(value.tolist(), **CLOSE), key
    for name in ("mean", "std", "std_low", "std_high"):
        expected = getattr(out, name).numpy()
        np.testing.assert_allclose(np.array(rows["outputs"][name]), expected, 1e-4, 1e-12)


def test_scores_settle_at_the_prediction(made, data):
    settled = data["rows"]["settled"]
    assert 8 <= len(settled["ranks"]) <= 12
    low = made.fit.predict(made.images, rank=5)
    for rank, name, expected in (
        (RANK, "score", made.prediction.score), (5, "score", low.score), (5, "high", low.score_high)
    ):  # fmt: skip
        found = [row[settled["ranks"].index(rank)] for row in settled[name]]
        assert found == pytest.approx(expected.tolist(), rel=1e-3)


def test_areas_under_risk_and_coverage(made, data):
    out, wrong = made.prediction, made.prediction.label != made.labels
    curves = {curve["key"]: curve for curve in data["plots"]["risk"]["curves"]}
    assert 0 < int(wrong.sum()) < COUNT
    for key, order in (("score", out.score), ("information", out.mutual_information)):
        expected = risk_coverage(order, wrong)
        assert curves[key]["area"] == pytest.approx(expected.area, rel=1e-3)
        assert curves[key]["risk"][-1] == pytest.approx(float(expected.risk[-1]), rel=1e-4)
        at = float(expected.risk[round(0.8 * COUNT) - 1])
        assert curves[key]["at"][0] == pytest.approx(at, rel=1e-4)
        assert curves["ideal"]["area"] <= curves[key]["area"]


def test_the_spectrum_the_gallery_and_the_glance(made, data):
    fit, out = made.fit, made.prediction
    (matrix,) = data["plots"]["spectrum"]["matrices"]
    values = fit.spectra["opg"].values
    assert matrix["values"] == pytest.approx(values.tolist(), **CLOSE)
    assert matrix["tail"][::2] == pytest.approx((fit.l2, float(values[-1])), **CLOSE)
    assert [shelf["label"] for shelf in data["shelves"]] == sorted(out.label.unique().tolist())
    for shelf in data["shelves"]:
        indices = (out.label == shelf["label"]).nonzero()[:, 0]
        order = indices[out.score[indices].argsort(stable=True)].tolist()
        assert shelf["count"] == len(order)
        assert shelf["most"] == order[:4]
        assert shelf["least"] == order[::-1][:4]

    accuracy = float((out.label == made.labels).double().mean())
    assert f"{100 * accuracy:.1f} %" in [value for _, value, _ in data["facts"]]
    assert data["notices"][0][1].startswith(out.judgement.reason)


def test_a_page_of_some_inputs_has_statistics_of_all(made, data, tmp_path):
    few = data_of(made.save(tmp_path / "few.html", rows=120, **QUICK))
    indices = few["rows"]["index"]
    assert len(indices) == 120
    assert indices == sorted(set(indices))
    highest = made.prediction.score.argsort(descending=True)[:40].tolist()
    shown = {index for shelf in few["shelves"] for index in shelf["most"] + shelf["least"]}
    assert set(highest) | shown <= set(indices)
    assert few["plots"]["risk"] == data["plots"]["risk"]
    assert few["rows"]["score"] == [data["rows"]["score"][index] for index in indices]
    assert few["total"] == COUNT


def test_names_are_text_wherever_they_stand(made, tmp_path):
    names = {"title": "<b>A & B</b>", "data": "<my> scans", "classes": list("<>&\"'abcde")}
    texts = [f"a sentence about {k} <b>" for k in range(COUNT)]
    path = made.save(tmp_path / "t.html", texts=texts, **names, **QUICK)
    text, data = path.read_text(), data_of(path)
    assert "<title>&lt;b&gt;A &amp; B&lt;/b&gt;</title>" in text
    assert "300 inputs · &lt;my&gt; scans · " in text
    assert HOSTILE not in text
    assert data["rows"]["name"][7] == HOSTILE
    assert (data["classes"][0], data["rows"]["text"]) == ("<", texts)


def test_datasets_of_pairs_give_the_same_page(made, data, tmp_path):
    save_report(tmp_path / "pairs.html", made.fit, TensorDataset(made.images, made.labels), **QUICK)
    theirs = data_of(tmp_path / "pairs.html")["rows"]
    for key in ("target", "picture", "right"):
        assert theirs[key] == data["rows"][key]


def test_the_spread_the_level_and_the_calibration_are_said(made, data, tmp_path):
    def said(page):
        return {name: (value, note) for name, value, note in page["facts"]}

    known, plain = made.fit.diagnostics["l2"], said(data)
    assert plain["Error bars"] == ("posterior", "what data and prior leave open")
    assert plain["λ"][0] == "0.01"
    assert plain["λ"][1].startswith(f"given; by the evidence {known['evidence']:.2g} (")
    assert (data["spread"], "Calibrated by" in plain) == ("posterior", False)

    auto = {**known, "how": "auto", "value": known["evidence"]}
    calibration = {"sampling": Calibration(1.25, 0.125, 0.5, 3)}
    fit = made.fit.with_l2(known["evidence"]).moved(
        calibration=calibration, diagnostics={**made.fit.diagnostics, "l2": auto}
    )
    asked = {"spread": "sampling"}
    out, path = fit.predict(made.images, **asked), tmp_path / "sampling.html"
    for prediction in (out, None):
        save_report(path, fit, made.images, prediction=prediction, asked=asked, **QUICK)
        page = data_of(path)
        assert page["spread"] == "sampling"
        assert page["rows"]["score"] == pytest.approx(out.score.tolist(), **CLOSE)
    found = said(page)
    assert found["Error bars"][0] == "sampling"
    assert found["λ"][0] == f"{known['evidence']:.2g}"
    assert found["λ"][1].startswith("by the evidence (")
    assert found["Calibrated by"] == ("1.25", "± 0.12, by 3 retrained networks; R² 0.5")
    assert " · sampling spread · " in path.read_text()
    old = made.fit.moved(diagnostics={**made.fit.diagnostics, "l2": None})
    save_report(path, old, made.images, **QUICK)
    assert said(data_of(path))["λ"] == ("0.01", "given")


def test_without_targets_nothing_is_right_or_wrong(made, tmp_path):
    plain = data_of(made.save(tmp_path / "plain.html", targets=None, **QUICK))
    assert set(plain["plots"]) == {"spectrum", "uncertainty", "scores"}
    assert sum(plain["plots"]["scores"]["counts"]) + plain["plots"]["scores"]["zero"] == COUNT
    assert "right" not in plain["rows"]


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_other_likelihoods(kind, tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x @ torch.randn(3, 2, generator=generator) + 0.3 * torch.randn(400, 2, generator=generator)
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    if kind == "bernoulli":
        y, loss = (y > 0).float(), nn.BCEWithLogitsLoss()
    train_to_convergence(model, x, y.double(), 0.01, steps=100, loss=loss)
    fit = deltabars.fit(model, (x, y), l2=0.01, likelihood=loss, rank=4, progress=False)
    path = tmp_path / "other.html"
    save_report(path, fit, x, targets=y, progress=False)
    data, out = data_of(path), fit.predict(x)
    assert data["shelves"] == []
    assert ("risk" in data["plots"]) == (kind == "bernoulli")
    np.testing.assert_allclose(data["rows"]["outputs"]["truth"], y.numpy(), 1e-4, 1e-6)
    np.testing.assert_allclose(data["rows"]["outputs"]["std"], out.std.numpy(), 1e-4)
    if kind == "gaussian":
        plot = data["plots"]["calibration"]
        assert 0.86 < plot["y"][plot["x"].index(0.9)] < 0.94


def picture(address):
    return Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/png;base64,"))))


def test_pictures_are_png_files_without_loss_and_large_ones_shrink(made, data, tmp_path):
    image = made.images[3, 0]
    low, high = image.min(), image.max()
    expected = ((image - low) * (255 / (high - low))).round().to(torch.uint8)
    np.testing.assert_array_equal(np.array(picture(data["rows"]["picture"][3])), expected)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    large = np.full((400, 200), 7, np.uint8)
    given = data_of(
        made.save(tmp_path / "x.html", pictures=lambda k: large if k else pixels, **QUICK)
    )
    np.testing.assert_array_equal(np.array(picture(given["rows"]["picture"][0])), pixels)
    assert picture(given["rows"]["picture"][1]).size == (57, 115)  # 4 million pixels in all


def test_what_does_not_fit_is_refused(made, tmp_path):
    for options, message in (
        ({"prediction": made.prediction[:5]}, "prediction: expected"),
        ({"prediction": made.prediction[torch.arange(COUNT).flip(0)]}, "prediction: expected"),
        ({"prediction": made.fit.predict(made.images, space="logit")}, "expected probabilities"),
        ({"targets": torch.zeros(3)}, r"targets: expected shape \(300,\)"),
        ({"targets": torch.full((COUNT,), 10)}, "from 0 to 9, got others, such as"),
        ({"names": ["a"]}, "names: expected 300 names, got 1"),
        ({"rows": 0}, "rows: expected a whole number from 1 on"),
        ({"ranks": [RANK + 1]}, "ranks: expected whole numbers from 1 to the 40"),
        ({"asked": {"space": "logit"}}, "asked: expected some of estimator, rank"),
        ({"asked": {"spread": "wide"}}, "spread: expected one of"),
        (
            {"asked": {"spread": "sampling"}, "prediction": made.prediction},
            "prediction: expected fit.predict",
        ),
        ({"pictures": lambda i: np.zeros((2, 2))}, "pictures: expected an array"),
    ):
        with pytest.raises(BadValueError, match=message):
            made.save(tmp_path / "no.html", **{**QUICK, **options})
    assert list(tmp_path.iterdir()) == []


def test_inputs_without_indices_and_files_that_cannot_be_written(made, tmp_path, monkeypatch):
    loader = DataLoader(TensorDataset(made.images, made.labels), batch_size=50, shuffle=True)
    with pytest.raises(DataError, match="Of a DataLoader give its dataset"):
        save_report(tmp_path / "no.html", made.fit, loader)
    with pytest.raises(BadValueError, match=re.escape("ends in .html, got 'x.pdf'")):
        made.save(tmp_path / "x.pdf")
    with pytest.raises(StorageError, match="expected a folder that exists"):
        made.save(tmp_path / "none" / "x.html")
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'deltabars\[report\]'"):
        made.save(tmp_path / "no.html", **QUICK)
    assert list(tmp_path.iterdir()) == []


def test_reliability_classes_and_confusion_are_those_of_the_prediction(made, data):
    out, labels = made.prediction, made.labels
    highest, label = out.mean.double().max(1)
    plot, right = data["plots"]["calibration"], (label == labels).double()
    expected = expected_calibration_error(out.mean, labels)
    points = zip(plot["x"], plot["y"], plot["counts"], strict=True)
    error = sum(count * abs(x - y) for x, y, count in points) / COUNT
    assert error == pytest.approx(expected, rel=1e-3)
    assert plot["counts"] == (highest * 15).long().unique(return_counts=True)[1].tolist()
    by_class, confusion = data["tables"]
    assert sorted(row[0] for row in by_class["rows"]) == list("0123456789")
    for name, count, recall, precision, score in by_class["rows"]:
        these = labels == int(name)
        assert int(count) == int(these.sum())
        assert recall == f"{100 * float(right[these].mean()):.1f} %"
        assert precision == f"{100 * float(right[label == int(name)].mean()):.1f} %"
        assert float(score) == pytest.approx(float(out.score[these].mean()), rel=5e-3)
    found = [[int(n.replace("·", "0")) for n in row[1:]] for row in confusion["rows"]]
    assert found == confusion_matrix(labels, label).tolist()
