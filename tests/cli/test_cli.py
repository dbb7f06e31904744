"""The command line and the demonstration, run as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deltabars.cli.entry import main
from deltabars.recipes.digits import load_digits
from tests.pages import data_of
from tests.scans import only_line


def deltabars(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltabars", *arguments], capture_output=True, text=True, cwd=cwd
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return deltabars("demo", "--quiet", "--report", "digits.html", cwd=folder), folder


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found.group(1).replace(",", ""))


def test_demo_converges_and_tells_sizes(demo):
    done, _ = demo
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert number(r"test (\d\.\d+)", done.stdout) > 0.93
    assert number(r"gradient norm +([\d.e-]+)", done.stdout) < 0.002
    assert number(r"parameters P +([\d,]+)", done.stdout) == 1898
    assert number(r"examples N +([\d,]+)", done.stdout) == 1297
    rank = number(r"eigenpairs K +([\d,]+)", done.stdout)
    l2 = number(r"λ +([\d.]+)\n", done.stdout)
    assert 0 < rank < 1898
    for name in ("hessian", "opg", "ggn"):
        assert number(rf"λ_K of {name} +([\d.]+)", done.stdout) > l2


def test_demo_wrong_predictions_have_higher_scores(demo):
    done, _ = demo
    for name in ("hessian", "opg", "sandwich", "ggn"):
        found = re.search(rf"\n  {name} +([\d.]+) +([\d.]+) +[\d.]+%", done.stdout)
        assert found, done.stdout
        right, wrong = map(float, found.groups())
        assert wrong > 2 * right


def test_demo_estimators_agree_on_the_order(demo):
    done, _ = demo
    for pair in ("hessian → opg", "hessian → sandwich", "opg → sandwich"):
        assert number(rf"{pair} +(\d\.\d+)", done.stdout) > 0.9  # R²


def test_demo_draws_a_picture(demo):
    done, folder = demo
    picture = folder / "deltabars-demo.png"
    assert "deltabars-demo.png" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_demo_writes_a_report(demo):
    done, folder = demo
    assert "The report, for a browser: digits.html" in done.stdout
    data = data_of(folder / "digits.html")
    assert data["total"] == 500
    assert len(data["rows"]["picture"]) == 500


def test_digits_are_the_bundled_scans():
    digits = load_digits()
    assert digits.train_images.shape == (1297, 1, 8, 8)
    assert digits.test_images.shape == (500, 1, 8, 8)
    assert float(digits.train_images.max()) == 1.0


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--out", "no/x.png", "expected a folder that exists"),
        ("--out", "x.foo", "ends in one of .png, .pdf, .svg"),
        ("--report", "x.pdf", "ends in .html"),
        ("--report", "no/x.html", "folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path, monkeypatch, capsys, option, name, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", option, str(tmp_path / name)]) == 1
    assert message in only_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "COMMAND: invalid choice: 'nonsense' (choose from 'demo', "),
        (
            ("demo", "--nonsense"),
            "unrecognized arguments: --nonsense (usage: deltabars demo --help",
        ),
        (("--quiet", "demo"), "unrecognized arguments: --quiet (usage: deltabars --help)"),
        (("demo", "--out"), "--out: expected one argument (usage: deltabars demo --help)"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    line = only_line(capsys)
    assert line.startswith("deltabars: ")
    assert said in line


def test_without_a_command_it_prints_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("usage: deltabars")
    assert all(name in shown.out for name in ("demo", "fit", "predict", "report"))


@pytest.mark.parametrize(
    ("arguments", "text"), [((), "demo"), (("demo",), "example: deltabars demo")]
)
def test_help_has_an_example(capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    assert text in capsys.readouterr().out
