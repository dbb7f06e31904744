"""The demonstration, run as a user runs it."""

from __future__ import annotations

import re
import subprocess

import pytest

from deltabars.recipes.digits import load_digits
from tests.pages import data_of
from tests.scans import command


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    line = command("demo", "--quiet", "--report", "digits.html")
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, folder


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found.group(1).replace(",", ""))


def test_it_converges_and_says_sizes(demo):
    text, _ = demo
    assert number(r"test (\d\.\d+)", text) > 0.93
    assert number(r"gradient norm +([\d.e-]+)", text) < 0.002
    assert number(r"parameters P +([\d,]+)", text) == 1898
    assert number(r"examples N +([\d,]+)", text) == 1297
    assert 0 < number(r"eigenpairs K +([\d,]+)", text) < 1898
    for name in ("hessian", "opg", "ggn"):
        assert number(rf"λ_K of {name} +([\d.]+)", text) > number(r"λ +([\d.]+)\n", text)


def test_wrong_predictions_have_higher_scores_and_estimators_agree_on_the_order(demo):
    text, _ = demo
    for name in ("hessian", "opg", "sandwich", "ggn"):
        found = re.search(rf"\n  {name} +([\d.]+) +([\d.]+) +[\d.]+%", text)
        assert found, text
        assert float(found[2]) > 2 * float(found[1])
    for pair in ("hessian → opg", "hessian → sandwich", "opg → sandwich"):
        assert number(rf"{pair} +(\d\.\d+)", text) > 0.9  # R²


def test_it_draws_a_picture_and_writes_a_report(demo):
    text, folder = demo
    assert "deltabars-demo.png" in text
    assert (folder / "deltabars-demo.png").read_bytes().startswith(b"\x89PNG")
    assert "The report, for a browser: digits.html" in text
    data = data_of(folder / "digits.html")
    assert data["total"] == len(data["rows"]["picture"]) == 500


def test_digits_are_the_bundled_scans():
    digits = load_digits()
    assert digits.train_images.shape == (1297, 1, 8, 8)
    assert digits.test_images.shape == (500, 1, 8, 8)
    assert float(digits.train_images.max()) == 1.0
