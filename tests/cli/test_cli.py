"""The demonstration, run as a user runs it."""

from __future__ import annotations

import re
import subprocess

from tests.pages import data_of
from tests.scans import command


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
    assert (tmp_path / "deltabars-demo.png").read_bytes().startswith(b"\x89PNG")
    data = data_of(tmp_path / "digits.html")
    assert data["total"] == len(data["rows"]["picture"]) == 500
