"""`deltabars report`: the page of a RUN, by the command and by the Python interface."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import redirect_stdout
from io import StringIO

import pytest

from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.report.page import save_report
from tests.scans import command, environment, only_line
from tests.workshop import TEST, contents

DATA = """\
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

images = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
labels = torch.arange(12) % 10


def loader():
    return DataLoader(TensorDataset(images, labels), batch_size=5)
"""


@pytest.fixture
def place(workshop, tmp_path, monkeypatch):
    """A folder to be in, with a RUN whose predictions are of the folder `pictures`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("fit.deltabars", "run.json"):
        shutil.copy(workshop.run / name, tmp_path / "run")
    shutil.copytree(workshop.folder / "test", tmp_path / "pictures")
    assert main(["predict", "run", "--data", "pictures", "--quiet", "--device", "cpu"]) == 0
    return tmp_path


def report(*arguments: object) -> int:
    return main(["report", "run", "--quiet", "--device", "cpu", *map(str, arguments)])


def test_a_process_of_its_own(place):
    done = subprocess.run(
        command("report", "run", "--out", "report.html", "--rows", 20), capture_output=True,
        text=True, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"The page of {TEST} inputs of" in done.stdout
    text = (place / "report.html").read_text()
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert "digit 3" in text


def test_it_is_the_page_of_the_python_interface(workshop, place, capsys):
    capsys.readouterr()
    assert report("--out", "a.html", "--rows", 15, "--title", "Ours", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"out": "a.html", "inputs": TEST}
    fit = Run.open("run").load_fit(progress=False)
    images, labels = workshop.test
    names = sorted(
        str(p.relative_to(place / "pictures")) for p in (place / "pictures").rglob("*.png")
    )
    save_report(
        "b.html", fit, images, targets=labels, prediction=fit.predict(images),
        classes=[f"digit {k}" for k in range(10)], names=names,
        pictures=lambda i: (images[i, 0] * 255).byte().numpy(), title="Ours", rows=15,
        data=Run.open("run").latest().data.spec, progress=False,
    )  # fmt: skip
    assert (place / "a.html").read_text() == (place / "b.html").read_text()


def test_the_printed_python_writes_the_same_page(place):
    printed = StringIO()
    arguments = ("--rows", "9", "--title", "One page")
    with redirect_stdout(printed):
        assert report("--out", "b.html", *arguments, "--print-python") == 0
    exec(compile(printed.getvalue(), "printed", "exec"), {})
    assert report("--out", "a.html", *arguments) == 0
    assert (place / "a.html").read_text() == (place / "b.html").read_text()


def test_predictions_with_less_than_the_fit_has(place):
    """The page of a kept prediction is of that one, however it was asked for."""
    for asked, said in ((("--rank", "5"), "K = 5"), (("--low-rank",), "the K pairs alone")):
        ours = ("--data", "pictures", "--quiet", "--device", "cpu", *asked)
        assert main(["rank", "run", *ours]) == 0
        assert report("--out", "a.html", "--data", "pictures", *asked) == 0
        assert main(["predict", "run", *ours]) == 0
        printed = StringIO()
        with redirect_stdout(printed):
            assert report("--out", "b.html", "--print-python") == 0
        exec(compile(printed.getvalue(), "printed", "exec"), {})
        assert report("--out", "c.html") == 0
        page = (place / "c.html").read_text()
        assert said in page
        assert (place / "b.html").read_text() == page


def test_a_loader_of_ones_own(place, capsys):
    (place / "data.py").write_text(DATA)
    assert report("--data", "data.py:loader", "--out", "report.html", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["inputs"] == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "report.pdf"), "one of .html, .htm"),
        (("--out", "no/report.html"), "a folder that exists"),
        (("--out", "report.html", "--rows", "0"), "--rows: expected a whole number from 1 on"),
        (("--out", "report.html", "--data", "nowhere"), "nowhere, which does not exist"),
    ],
)
def test_refused(arguments, said, place, capsys):
    capsys.readouterr()
    before = contents(place)
    assert report(*arguments) == 1
    assert said in only_line(capsys)
    assert contents(place) == before


def test_pictures_that_have_changed_since_are_refused(place, capsys):
    capsys.readouterr()
    next((place / "pictures").rglob("*.png")).unlink()
    assert report("--out", "report.html") == 1
    assert "got it changed" in only_line(capsys)
