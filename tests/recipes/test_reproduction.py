"""`deltabars reproduce` as a user runs it: what it writes, refuses, and goes on from."""

from __future__ import annotations

import json
import subprocess
import time

import numpy as np
import pytest
import torch

from deltabars.cli.entry import main
from deltabars.recipes.paper import PaperNetwork, paper_network
from deltabars.recipes.reproduction.settings import PUBLISHED, beside_published
from tests.scans import QUICK, SMALLER, STEPS, command, deltabars, environment, only_line, run

FIGURES = (
    "spectra", "uncertainty", "surfaces", "foreign", "rankings", "estimators", "ensembles",
)  # fmt: skip
PAIRS = ("hessian_opg", "hessian_sandwich", "opg_sandwich")
ESTIMATORS = ("hessian", "opg", "sandwich")


def without_times(value):
    """The same without any number of seconds."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in ("times", "seconds")}
        return {key: without_times(each) for key, each in kept.items()}
    return value


def stages_of(out):
    return sorted(path.stem for path in (out / "stages").iterdir() if path.suffix != ".json")


class TestWhatItWrites:
    def test_the_documented_numbers(self, quick_run):
        results = quick_run.results
        assert set(results) >= {
            "recipe", "size", "seed", "versions", "settings", "training", "eigenvalues",
            "effective_parameters", "regressions", "scores", "times", "foreign",
            "initialisations", "bootstrap", "samples",
        }  # fmt: skip
        assert set(results["training"]) == {
            "train_accuracy", "test_accuracy", "cost", "gradient_norm",
        }  # fmt: skip
        assert set(results["eigenvalues"]) == {"hessian", "opg", "hessian_smallest"}
        for part in ("train", "test"):
            assert set(results["regressions"][part]) == set(PAIRS)
            for pair in PAIRS:
                assert set(results["regressions"][part][pair]) == {"r2", "intercept", "slope"}
            assert set(results["scores"][part]) == set(ESTIMATORS)
            for name in ESTIMATORS:
                found = set(results["scores"][part][name])
                assert found >= {"mean", "true_positives", "false_positives"}
        assert set(results["versions"]) == {"deltabars", "torch", "python", "device"}
        assert results["versions"]["torch"] == torch.__version__
        assert results["seed"] == 0
        assert results["settings"]["parameters"] == 93_322
        assert results["settings"]["rank"] == 5
        assert set(results["times"]) == {
            "training", "hessian", "opg", "predicting_train", "predicting_test",
        }  # fmt: skip
        assert all(seconds > 0 for seconds in results["times"].values())
        assert set(results["bootstrap"]) == {"fixed", "varying"}
        assert set(results["samples"]) == set(ESTIMATORS)

    @pytest.mark.parametrize("name", FIGURES)
    def test_every_figure(self, quick_run, name):
        content = (quick_run.out / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        assert len(content) > 10_000

    def test_nothing_else(self, quick_run):
        names = sorted(path.name for path in quick_run.out.iterdir())
        assert names == sorted(["results.json", "stages", *(f"{name}.png" for name in FIGURES)])
        assert not list(quick_run.out.rglob("draft-*"))

    def test_the_printed_table_has_ours_and_the_published_numbers(self, quick_run):
        results, published = quick_run.results, PUBLISHED["mnist"]
        rows = [
            (key.replace("_", " "), results["training"][key], value)
            for key, value in published.training.items()
        ]
        for part, lines in published.regressions.items():
            for pair, line in zip(PAIRS, lines, strict=True):
                for key, value in zip(("r2", "intercept", "slope"), line, strict=True):
                    title = f"{part}: {pair.replace('_', ' → ')}, {key}"
                    rows.append((title, results["regressions"][part][pair][key], value))
        printed = quick_run.done.stdout.splitlines()
        assert printed[0].split() == ["ours", "paper", "difference"]
        assert len(rows) == 22
        for line, (title, ours, paper) in zip(printed[1:], rows, strict=False):
            assert line.startswith(title)
            numbers = [float(word) for word in line[len(title) :].split()]
            # As they are printed: four digits of ours, three of the paper's.
            assert numbers == pytest.approx([ours, paper, ours - paper], abs=6e-5)
        assert str(quick_run.out / "results.json") in quick_run.done.stdout

    def test_a_number_that_there_is_not_is_a_dash(self, quick_run):
        results = quick_run.results
        results["regressions"]["train"]["hessian_opg"]["r2"] = None
        row = "train: hessian → opg, r2                     –     0.997           –"
        assert row in beside_published("mnist", results).splitlines()


class TestAgain:
    def test_a_second_run_computes_nothing(self, quick_run, capsys):
        before = (quick_run.out / "results.json").read_bytes()
        assert run("mnist", "--data", quick_run.data, "--out", quick_run.out, *QUICK) == 0
        printed, told = capsys.readouterr()
        said = [line.removeprefix("… ") for line in told.splitlines()]
        kept = {line.partition(":")[0] for line in said if line.endswith(": kept from before")}
        # The fit is read where a stage needs it; none does.
        assert kept == set(stages_of(quick_run.out)) - {"fit"}
        assert [line for line in said if "computing" in line] == []
        assert (quick_run.out / "results.json").read_bytes() == before
        assert printed == quick_run.done.stdout

    def test_another_seed_is_refused(self, quick_run, capsys):
        where = ("--data", quick_run.data, "--out", quick_run.out)
        before = (quick_run.out / "results.json").read_bytes()
        assert run("mnist", *where, *QUICK, "--quiet", "--seed", 1) == 1
        line = only_line(capsys)
        assert "with seed 0 and not 1" in line
        assert "--fresh" in line
        assert (quick_run.out / "results.json").read_bytes() == before

    @pytest.mark.parametrize(
        ("option", "match"),
        [(("--steps", STEPS + 1), f"steps {STEPS} and not {STEPS + 1}"), (("--rank", 4), "rank 5")],
    )
    def test_another_size_is_refused(self, quick_run, capsys, option, match):
        where = ("--data", quick_run.data, "--out", quick_run.out)
        assert run("mnist", *where, *QUICK, "--quiet", *option) == 1
        assert match in only_line(capsys)


def from_weights(quick_run, out):
    """The arguments of a run from trained weights, with nothing else beside it."""
    return (
        "reproduce", "mnist", "--data", quick_run.data, "--out", out,
        "--weights", quick_run.out / "stages" / "weights.npz", *SMALLER, "--rank", 2,
        "--initialisations", 1, "--bootstrap", 0, "--samples", 0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def given(quick_run, tmp_path_factory):
    """A run from trained weights: the results, what was said, and the folder."""
    folder = tmp_path_factory.mktemp("given")
    assert set(quick_run.stage("weights")) == {*PaperNetwork().state_dict(), "seconds"}
    done = deltabars(*from_weights(quick_run, folder / "out"), "--quiet")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()  # they are of a few steps
    assert line.startswith("deltabars: warning: Expected weights near an optimum")
    return json.loads((folder / "out" / "results.json").read_text()), folder


class TestWeights:
    def test_they_are_taken_as_they_are(self, quick_run, given):
        results, folder = given
        with np.load(folder / "out" / "stages" / "weights.npz") as kept:
            for name, value in quick_run.stage("weights").items():
                if name != "seconds":
                    np.testing.assert_array_equal(kept[name], value)
        assert "training" not in results["times"]
        assert results["training"] == quick_run.results["training"]

    def test_what_is_not_asked_for_is_not_there(self, given):
        results, folder = given
        assert "bootstrap" not in results
        assert "samples" not in results
        assert results["initialisations"]["networks"] == 1
        assert len(results["eigenvalues"]["opg"]) == 2
        names = stages_of(folder / "out")
        assert [name for name in names if name.startswith(("boot", "sampl", "init"))] == []
        assert not (folder / "out" / "ensembles.png").exists()

    def test_eigenvalues_are_those_of_the_same_network(self, quick_run, given):
        results, _ = given
        # Both to the solver's tolerance, from start vectors of another number.
        for name in ("hessian", "opg"):
            more = quick_run.results["eigenvalues"][name][:2]
            assert results["eigenvalues"][name] == pytest.approx(more, rel=1e-4)

    def test_other_weights_are_another_run(self, quick_run, given, capsys):
        _, folder = given
        other = {name: value.numpy() for name, value in paper_network(3).state_dict().items()}
        np.savez(folder / "other.npz", **other)
        where = ("--data", quick_run.data, "--out", folder / "out", *SMALLER, "--rank", 2)
        assert run("mnist", *where, "--weights", folder / "other.npz") == 1
        assert "which holds a run with weights" in only_line(capsys)


def test_a_killed_run_goes_on_and_ends_the_same(quick_run, given, tmp_path, capsys):
    out = tmp_path / "out"
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
    assert process.returncode == -9
    assert not (out / "results.json").exists()
    assert stages_of(out) == ["fit", "spectra", "weights"]
    assert main([str(argument) for argument in from_weights(quick_run, out)]) == 0
    _, told = capsys.readouterr()
    for name in ("weights", "spectra"):
        assert f"{name}: kept from before" in told
    assert "predictions-train: computing" in told
    results, folder = given
    found = json.loads((out / "results.json").read_text())
    assert without_times(found) == without_times(results)
    assert stages_of(out) == stages_of(folder / "out")
