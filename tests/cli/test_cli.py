"""The demonstration, run as a user runs it."""

from __future__ import annotations

import re
import subprocess

from deltabars.cli.entry import main
from tests.pages import data_of
from tests.scans import command, only_line


def test_the_demo_converges_ranks_and_draws(tmp_path):
    line = command("demo", "--quiet", "--report", "digits.html")
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout

    def number(pattern: str) -> float:
        found = re.search(pattern, text)
        assert found, f"no {pattern!r} in:\n{text}"
        return float(found.group(1).replace(",", ""))

    assert number(r"test (\d\.\d+)") > 0.93
    assert number(r"gradient norm +([\d.e-]+)") < 0.002
    assert number(r"parameters P +([\d,]+)") == 1898
    assert number(r"examples N +([\d,]+)") == 1297
    assert 0 < number(r"eigenpairs K +([\d,]+)") < 1898
    for name in ("hessian", "opg", "ggn"):
        assert number(rf"λ_K of {name} +([\d.]+)") > number(r"λ +([\d.]+)\n")
    for name in ("hessian", "opg", "sandwich", "ggn"):  # wrong predictions have higher scores
        right = number(rf"\n  {name} +([\d.]+) +[\d.]+ +[\d.]+%")
        assert number(rf"\n  {name} +[\d.]+ +([\d.]+) +[\d.]+%") > 2 * right
    for pair in ("hessian → opg", "hessian → sandwich", "opg → sandwich"):
        assert number(rf"{pair} +(\d\.\d+)") > 0.9  # R²
    assert 0.001 < number(r"λ = ([\d.]+) by the evidence \(") < 0.01
    found = {}
    for spread in ("sampling", "posterior"):
        words = rf"std, spread='{spread}' +([\d.]+) +([\d.]+) +([\d.]+)"
        slope, r2, spearman = map(float, re.search(words, text).groups())
        assert (r2 > 0.75, spearman > 0.95) == (True, True)
        found[spread] = slope
    # The sampling bars are nearer to what retraining moves.
    assert 0.6 < found["sampling"] < 1.2
    assert found["posterior"] < 0.6 * found["sampling"]
    for name in ("deltabars-demo", "deltabars-demo-check"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in text
    data = data_of(tmp_path / "digits.html")
    assert data["total"] == len(data["rows"]["picture"]) == 500


def test_pictures_that_cannot_be_written_are_refused_first(tmp_path, capsys):
    (tmp_path / "a-check.png").mkdir()
    assert main(["demo", "--out", str(tmp_path / "a.png")]) == 1
    assert "a-check.png" in only_line(capsys)
