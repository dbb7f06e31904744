"""The numbers in a report page, and what it refuses."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deltabars
from deltabars.errors import BadValueError, DataError, StorageError
from deltabars.prediction.metrics import expected_calibration_error
from deltabars.report.page.assembling import save_report
from deltabars.report.page.inputs import drawn, png
from tests.pages import COUNT, HOSTILE, RANK, data_of, digits

CLOSE = {"rel": 1e-4, "abs": 1e-12}  # five digits are written
QUICK = {"ranks": [RANK], "progress": False}


@pytest.fixture(scope="module")
def made():
    return digits()


@pytest.fixture(scope="module")
def page(made, tmp_path_factory):
    return made.save(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def data(page):
    return data_of(page)


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
    assert settled["ranks"][-1] == RANK
    last = [row[-1] for row in settled["score"]]
    assert last == pytest.approx(made.prediction.score.tolist(), rel=1e-3)
    at = settled["ranks"].index(5)
    low = made.fit.predict(made.images, rank=5)
    assert [row[at] for row in settled["score"]] == pytest.approx(low.score.tolist(), rel=1e-3)
    assert [row[at] for row in settled["high"]] == pytest.approx(low.score_high.tolist(), rel=1e-3)


def test_areas_under_risk_and_coverage(made, data):
    out, wrong = made.prediction, made.prediction.label != made.labels
    orders = {
        "score": out.score,
        "probability": 1 - out.mean.double().max(1).values,
        "information": out.mutual_information,
    }
    curves = {curve["key"]: curve for curve in data["plots"]["risk"]["curves"]}
    assert 0 < int(wrong.sum()) < COUNT
    for key, order in orders.items():
        ordered = wrong.numpy()[np.argsort(order.numpy(), kind="stable")]
        risks = [ordered[: k + 1].mean() for k in range(COUNT)]
        assert curves[key]["area"] == pytest.approx(np.mean(risks), rel=1e-3)
        assert curves[key]["risk"][-1] == pytest.approx(wrong.double().mean().item(), rel=1e-4)
        assert curves[key]["at"][0] == pytest.approx(risks[round(0.8 * COUNT) - 1], rel=1e-4)
    assert curves["ideal"]["area"] <= min(curves[key]["area"] for key in orders)


def test_the_spectrum_and_its_closed_tail(made, data):
    (matrix,) = data["plots"]["spectrum"]["matrices"]
    values = made.fit.spectra["opg"].values
    assert matrix["values"] == pytest.approx(values.tolist(), **CLOSE)
    low, middle, high = matrix["tail"]
    assert (low, high) == pytest.approx((made.fit.l2, float(values[-1])), **CLOSE)
    assert 2 / middle == pytest.approx(1 / low + 1 / high, rel=1e-3)


def test_the_gallery_has_each_class_ends(made, data):
    label, score = made.prediction.label, made.prediction.score
    assert [shelf["label"] for shelf in data["shelves"]] == sorted(label.unique().tolist())
    for shelf in data["shelves"]:
        places = (label == shelf["label"]).nonzero()[:, 0]
        order = places[score[places].argsort(stable=True)].tolist()
        assert shelf["count"] == len(order)
        assert shelf["most"] == order[:4]
        assert shelf["least"] == order[::-1][:4]


def test_a_glance_tells_the_fit(made, page):
    text = page.read_text()
    fit, out = made.fit, made.prediction
    low, high = fit.effective_parameters_interval
    accuracy = float((out.label == made.labels).double().mean())
    for expected in (
        f"<strong>{fit.num_parameters:,}</strong>",
        f"<strong>{fit.num_examples:,}</strong>",
        f"<strong>{100 * accuracy:.1f} %</strong>",
        f"<strong>{100 * float((out.score_error / out.score).mean()):.1f} %</strong>",
        f"between {low:.3g} and {high:,.0f}" if high >= 1000 else f"and {high:.3g} of all P",
        deltabars.__version__,
    ):
        assert expected in text


def test_a_page_of_some_inputs_has_statistics_of_all(made, data, tmp_path):
    few = data_of(made.save(tmp_path / "few.html", rows=120, **QUICK))
    places = few["rows"]["index"]
    assert len(places) == 120
    assert places == sorted(set(places))
    highest = made.prediction.score.argsort(descending=True)[:40].tolist()
    shown = {place for shelf in few["shelves"] for place in shelf["most"] + shelf["least"]}
    assert set(highest) | shown <= set(places)
    assert few["plots"]["risk"] == data["plots"]["risk"]
    assert few["rows"]["score"] == [data["rows"]["score"][place] for place in places]
    assert few["total"] == COUNT


def test_names_are_text_wherever_they_stand(made, page):
    text = page.read_text()
    assert HOSTILE not in text
    assert data_of(page)["rows"]["name"][7] == HOSTILE
    titled = made.save(page.with_name("t.html"), title="<b>A & B</b>", classes=list("<>&\"'abcde"))
    assert "<title>&lt;b&gt;A &amp; B&lt;/b&gt;</title>" in titled.read_text()
    assert data_of(titled)["classes"][0] == "<"


def test_datasets_of_pairs_give_the_same_page(made, data, tmp_path):
    pairs = TensorDataset(made.images, made.labels)
    path = tmp_path / "pairs.html"
    save_report(path, made.fit, pairs, names=made.names, progress=False)
    ours, theirs = data["rows"], data_of(path)["rows"]
    assert theirs["target"] == ours["target"]
    assert theirs["picture"] == ours["picture"]
    assert theirs["score"] == pytest.approx(ours["score"], rel=1e-3)


def test_without_targets_there_is_a_histogram(made, tmp_path):
    plain = data_of(made.save(tmp_path / "plain.html", targets=None, **QUICK))
    assert "risk" not in plain["plots"]
    assert sum(plain["plots"]["scores"]["counts"]) + plain["plots"]["scores"]["zero"] == COUNT
    assert "right" not in plain["rows"]


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_other_likelihoods(kind, tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x @ torch.randn(3, 2, generator=generator)
    y = (y > 0).float() if kind == "bernoulli" else y
    model = nn.Linear(3, 2)
    loss = nn.BCEWithLogitsLoss() if kind == "bernoulli" else nn.MSELoss()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def cost():
        optimiser.zero_grad()
        value = loss(model(x), y) + 0.005 * sum(w.square().sum() for w in model.parameters())
        value.backward()
        return value

    optimiser.step(cost)
    fit = deltabars.fit(model, (x, y), l2=0.01, likelihood=loss, rank=4, progress=False)
    path = tmp_path / "other.html"
    save_report(path, fit, x, targets=y, progress=False)
    data, out = data_of(path), fit.predict(x)
    assert data["shelves"] == []
    assert ("risk" in data["plots"]) == (kind == "bernoulli")
    assert "There is no gallery by class" in path.read_text()
    np.testing.assert_allclose(data["rows"]["outputs"]["truth"], y.numpy(), 1e-4, 1e-6)
    np.testing.assert_allclose(data["rows"]["outputs"]["std"], out.std.numpy(), 1e-4)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_a_yes_or_no_network_takes_targets_of_one_dimension(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = (x[:, 0] > 0).long()
    model, pages = nn.Linear(3, 1), []
    fit = deltabars.fit(model, (x, y), l2=0.01, likelihood="bernoulli", progress=False)
    for targets in (y, y[:, None]):
        save_report(tmp_path / "one.html", fit, x, targets=targets, progress=False)
        pages.append(data_of(tmp_path / "one.html")["rows"]["outputs"])
    assert pages[0] == pages[1]
    np.testing.assert_array_equal(pages[0]["truth"], y[:, None].numpy())


def test_pictures_are_png_files_without_loss():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    file = png(pixels)
    size = struct.unpack(">II", file[16:24])
    assert size == (7, 5)
    start = file.index(b"IDAT")
    length = struct.unpack(">I", file[start - 4 : start])[0]
    lines = zlib.decompress(file[start + 4 : start + 4 + length])
    rows, above = [], np.zeros((7, 3), np.uint8)
    for i in range(5):
        kind, line = lines[22 * i], np.frombuffer(lines[22 * i + 1 : 22 * i + 22], np.uint8)
        line = line.reshape(7, 3)
        above = np.cumsum(line, 0, dtype=np.uint8) if kind == 1 else line + above
        rows.append(above)
    np.testing.assert_array_equal(np.stack(rows), pixels)


def test_large_pictures_shrink():
    (address,) = drawn(torch.rand(1, 3, 200, 100), 50)
    from base64 import b64decode

    file = b64decode(address.removeprefix("data:image/png;base64,"))
    assert struct.unpack(">II", file[16:24]) == (25, 50)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"targets": torch.zeros(3)}, BadValueError, r"targets: expected shape \(300,\)"),
        ({"targets": torch.full((COUNT,), 10)}, BadValueError, "from 0 to 9, got others, such as"),
        ({"names": ["a"]}, BadValueError, "names: expected 300 names, got 1"),
        ({"classes": ["a"]}, BadValueError, "classes: expected 10 names, got 1"),
        ({"rows": 0}, BadValueError, "rows: expected a whole number from 1 on"),
        ({"ranks": [RANK + 1]}, BadValueError, "ranks: expected whole numbers from 1 to the 40"),
        ({"pictures": lambda i: np.zeros((2, 2))}, BadValueError, "pictures: expected an array"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_refused(made, tmp_path, options, kind, message):
    with pytest.raises(kind, match=message):
        made.save(tmp_path / "no.html", **{**QUICK, **options})
    assert list(tmp_path.iterdir()) == []


def test_another_prediction_is_refused(made, tmp_path):
    for wrong in (made.prediction[:5], made.prediction[torch.arange(COUNT).flip(0)]):
        with pytest.raises(BadValueError, match="prediction: expected"):
            made.save(tmp_path / "no.html", prediction=wrong, **QUICK)
    logits = made.fit.predict(made.images, space="logit")
    with pytest.raises(BadValueError, match="expected probabilities"):
        made.save(tmp_path / "no.html", prediction=logits, **QUICK)


def test_inputs_without_places_are_refused(made, tmp_path):
    loader = DataLoader(TensorDataset(made.images, made.labels), batch_size=50, shuffle=True)
    with pytest.raises(DataError, match="Of a DataLoader give its dataset"):
        save_report(tmp_path / "no.html", made.fit, loader)
    with pytest.raises(DataError, match="expected at least one, got none"):
        save_report(tmp_path / "no.html", made.fit, made.images[:0])


def test_files_that_cannot_be_written(made, tmp_path):
    with pytest.raises(BadValueError, match=re.escape("ends in .html, got 'x.pdf'")):
        made.save(tmp_path / "x.pdf")
    with pytest.raises(StorageError, match="expected a folder that exists"):
        made.save(tmp_path / "none" / "x.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(StorageError, match="expected the name of a file"):
        made.save(tmp_path / "folder.html", **QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_plotly_is_asked_for_by_its_extra():
    program = (
        "import sys; sys.modules['plotly'] = None\n"
        "from deltabars.report.page.assembling import _plotly\n"
        "from deltabars.errors import MissingDependencyError\n"
        "try: _plotly()\n"
        "except MissingDependencyError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'deltabars[report]'" in done.stdout, done.stderr


def test_reliability_classes_and_confusion_are_those_of_the_prediction(made, data, page):
    out, labels = made.prediction, made.labels
    highest, label = out.mean.double().max(1)
    plot, right = data["plots"]["calibration"], (label == labels).double()
    error = sum(
        count * abs(x - y) for x, y, count in zip(plot["x"], plot["y"], plot["counts"], strict=True)
    )
    assert sum(plot["counts"]) == COUNT
    expected = expected_calibration_error(out.mean, labels)
    assert error / COUNT == pytest.approx(expected, rel=1e-3)
    bins = (highest * 15).long()
    for x, y, count, place in zip(
        plot["x"], plot["y"], plot["counts"], bins.unique().tolist(), strict=True
    ):
        assert count == int((bins == place).sum())
        assert (x, y) == pytest.approx(
            (float(highest[bins == place].mean()), float(right[bins == place].mean())), rel=1e-4
        )
    text = page.read_text()
    assert f"(ECE) is {100 * expected:.1f} %" in text
    by_class, matrix = re.findall(r"<tbody>(<tr><th scope=.row.*?)</tbody>", text, re.DOTALL)
    for row in re.findall(r"<tr>(.*?)</tr>", by_class):
        name, count, recall, precision, score = re.findall(r">([^<>]+)</t[hd]>", row)
        these = labels == int(name)
        assert int(count) == int(these.sum())
        assert recall == f"{100 * float(right[these].mean()):.1f} %"
        assert precision == f"{100 * float(right[label == int(name)].mean()):.1f} %"
        assert float(score) == pytest.approx(float(out.score[these].mean()), rel=5e-3)
    for c, row in enumerate(re.findall(r"<tr>(.*?)</tr>", matrix)):
        cells = re.findall(r"<td[^>]*>([^<>]+)</td>", row)
        assert [int(n.replace("·", "0")) for n in cells] == [
            int(((labels == c) & (label == k)).sum()) for k in range(10)
        ]


def test_the_heading_says_what_it_is_about(made, tmp_path):
    path = tmp_path / "x.html"
    text = made.save(path, data="<my> scans", classes=list("abcdefghij"), **QUICK).read_text()
    assert "300 inputs · &lt;my&gt; scans · Sequential, opg · " in text
    assert re.search(r" · \d\d \w+ 20\d\d</p>", text)


def test_inputs_that_are_texts_are_shown_as_texts(made, tmp_path):
    texts = [f"a sentence about {k} <b>" for k in range(COUNT)]
    page = data_of(made.save(tmp_path / "x.html", texts=texts, **QUICK))
    assert page["rows"]["text"] == texts
    with pytest.raises(BadValueError, match="texts: expected 300 texts, got 3"):
        made.save(tmp_path / "y.html", texts=texts[:3], **QUICK)


def test_intervals_of_numbers_are_counted(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    y = x @ torch.randn(3, 1) + 0.3 * torch.randn(400, 1)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        solution = torch.linalg.lstsq(torch.cat([x, torch.ones(400, 1)], 1), y).solution
        model.weight.copy_(solution[:3].T)
        model.bias.copy_(solution[3])
    fit = deltabars.fit(model, (x, y), l2=1e-4, likelihood=nn.MSELoss(), rank=4, progress=False)
    path = tmp_path / "x.html"
    save_report(path, fit, x, targets=y, progress=False, ranks=[4])
    plot = data_of(path)["plots"]["calibration"]
    low, high = fit.predict(x).interval(0.9)
    share = float(((low <= y) & (y <= high)).double().mean())
    assert plot["y"][plot["x"].index(0.9)] == pytest.approx(share)
    assert 0.86 < share < 0.94
