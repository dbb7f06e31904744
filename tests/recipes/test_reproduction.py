"""`deltabars reproduce` as a user runs it: what it writes, refuses, and resumes."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from deltabars.cli.entry import main
from deltabars.errors import EvidenceWarning, OptimumWarning, warn
from deltabars.recipes import reproduction
from deltabars.recipes.paper import L2, PaperNetwork
from deltabars.recipes.summary import PUBLISHED, published_regressions
from tests.scans import QUICK, SMALLER, command, deltabars, environment, only_line, run

FIGURES = (
    "spectra", "uncertainty", "surfaces", "foreign", "rankings", "estimators", "ensembles",
)  # fmt: skip


def without_times(value):
    """The same without any number of seconds."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in ("times", "seconds")}
        return {key: without_times(each) for key, each in kept.items()}
    return value


def stages_of(out):
    return sorted(path.stem for path in (out / "stages").iterdir() if path.suffix != ".json")


class TestWhatItWrites:
    def test_the_documented_numbers_and_files(self, quick_run):
        results = quick_run.results
        assert set(results) == {
            "recipe", "size", "seed", "weights", "deterministic", "versions", "settings",
            "training", "eigenvalues", "solvers", "effective_parameters", "regressions", "scores",
            "times", "foreign", "initialisations", "bootstrap", "samples",
        }  # fmt: skip
        assert all(seconds > 0 for seconds in results["times"].values())
        names = sorted(path.name for path in quick_run.out.iterdir())
        assert names == sorted(["results.json", "stages", *(f"{name}.png" for name in FIGURES)])
        for name in FIGURES:
            assert (quick_run.out / f"{name}.png").stat().st_size > 10_000

    def test_the_printed_table_has_ours_and_the_published_numbers(self, quick_run):
        results, rows = quick_run.results, []
        for key, ours in results["training"].items():
            rows.append((key.replace("_", " "), ours, PUBLISHED["mnist"][key]))
        for part, pair, line in published_regressions("mnist"):
            for key, value in line.items():
                title = f"{part}: {pair.replace('_', ' → ')}, {key}"
                rows.append((title, results["regressions"][part][pair][key], value))
        printed = quick_run.done.stdout.splitlines()
        assert len(rows) == 22
        for line, (title, ours, paper) in zip(printed[1:], rows, strict=False):
            assert line.startswith(title)
            numbers = [float(word) for word in line[len(title) :].split()]
            # As they are printed: four digits of ours, three of the paper's.
            assert numbers == pytest.approx([ours, paper, ours - paper], abs=6e-5)
        assert str(quick_run.out / "results.json") in quick_run.done.stdout


class TestWarnings:
    @pytest.mark.parametrize("category", [EvidenceWarning, OptimumWarning])
    def test_the_papers_level_is_no_matter_of_the_evidence(self, monkeypatch, category):
        """Its λ is the paper's on purpose; what else there is to warn of is shown."""

        def fit(*_, **options):
            assert options["l2"] == L2
            warn("l2: expected another", category)
            return "a fit"

        monkeypatch.setattr(reproduction, "fit", fit)
        experiment = SimpleNamespace(
            options=SimpleNamespace(seed=0, progress=False), memory_budget=None, device="cpu",
            data={"train": None},
        )  # fmt: skip
        asked = partial(reproduction.Experiment.fit_of, experiment, nn.Linear(1, 1), "opg", 3)
        if category is EvidenceWarning:
            assert asked() == "a fit"  # a warning would be an error
        else:
            with pytest.warns(category):
                asked()


class TestAgain:
    def test_a_second_run_computes_nothing(self, quick_run, capsys):
        before = (quick_run.out / "results.json").read_bytes()
        assert run("mnist", "--data", quick_run.data, "--out", quick_run.out, *QUICK) == 0
        printed, shown = capsys.readouterr()
        said = [line.removeprefix("… ") for line in shown.splitlines()]
        assert [line for line in said if "computing" in line] == []
        assert (quick_run.out / "results.json").read_bytes() == before
        assert printed == quick_run.done.stdout


def from_weights(quick_run, out):
    """The arguments of a run from trained weights, with nothing else beside it."""
    return (
        "reproduce", "mnist", "--data", quick_run.data, "--out", out,
        "--weights", quick_run.out / "stages" / "weights.npz", *SMALLER, "--rank", 2,
        "--initialisations", 1, "--bootstrap", 0, "--samples", 0,
    )  # fmt: skip


def test_a_run_from_weights_that_is_killed_and_resumed(quick_run, tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    done = deltabars(*from_weights(quick_run, whole), "--quiet")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()  # they are of a few steps
    assert line.startswith("deltabars: warning: Expected weights near an optimum")
    results = json.loads((whole / "results.json").read_text())
    with np.load(whole / "stages" / "weights.npz") as kept:
        for name in PaperNetwork().state_dict():
            np.testing.assert_array_equal(kept[name], quick_run.stage("weights")[name])
    assert "training" not in results["times"]
    assert results["training"] == quick_run.results["training"]
    assert not {"bootstrap", "samples"} & set(results)
    assert not (whole / "ensembles.png").exists()

    process = subprocess.Popen(
        command(*from_weights(quick_run, out)), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not (out / "stages" / "spectra.npz").is_file():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert stages_of(out) == ["fit", "spectra", "weights"]
    assert main([str(argument) for argument in from_weights(quick_run, out)]) == 0
    _, shown = capsys.readouterr()
    for name in ("weights", "spectra"):
        assert f"{name}: kept from before" in shown
    assert "predictions-train: computing" in shown
    assert without_times(json.loads((out / "results.json").read_text())) == without_times(results)
    assert stages_of(out) == stages_of(whole)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (("--rank", 0), "--rank: expected a whole number from 1 on, got 0"),
        (("--rank", 93_323), "--rank: expected at most the 93322 parameters, got 93323"),
        (("--test-images", 201), "expected 201 items or more, got 200"),
        (("--samples", -1), "--samples: expected 0 or a whole number from 2 on, got -1"),
        (("--bootstrap", 1), "--bootstrap: expected 0 or a whole number from 2 on, got 1"),
        (("--weights", "absent.npz"), "absent.npz, which does not exist"),
    ],
)
def test_options_that_are_refused(scans, tmp_path, capsys, option, match):
    out = tmp_path / "out"
    assert run("mnist", "--data", scans, "--small", "--out", out, *option) == 1
    assert match in only_line(capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("results.json", "results.json: Is a directory"),
        ("spectra.png", "spectra.png"),
    ],
)
def test_files_that_are_folders(quick_run, tmp_path, capsys, name, match):
    shutil.copytree(quick_run.out, tmp_path / "out")
    path = tmp_path / "out" / name
    path.unlink()
    path.mkdir()
    where = ("--data", quick_run.data, "--out", tmp_path / "out")
    assert run("mnist", *where, *QUICK, "--quiet") == 1
    assert match in only_line(capsys)
