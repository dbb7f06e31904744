"""What `deltabars reproduce` refuses, with one line that says why."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest

from deltabars.recipes.paper import PaperNetwork
from tests.scans import QUICK, idx_bytes, only_line, run


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (("--rank", 0), "--rank: expected a whole number from 1 on, got 0"),
        (("--rank", 93_323), "--rank: expected at most the 93322 parameters, got 93323"),
        (("--hessian-rank", 93_323), "--hessian-rank: expected at most the 93322 parameters"),
        (("--train-images", 0), "--train-images: expected a whole number from 1 on, got 0"),
        (("--test-images", 201), "expected 201 items or more, got 200"),
        (("--steps", 0), "--steps: expected a whole number from 1 on, got 0"),
        (("--samples", -1), "--samples: expected a whole number from 0 on, got -1"),
        (("--samples", 1), "--samples: expected 0 or a whole number from 2 on, got 1"),
        (("--bootstrap", 1), "--bootstrap: expected 0 or a whole number from 2 on, got 1"),
        (("--seed", -1), "--seed: expected a whole number from 0 to 2147483647, got -1"),
        (("--device", "nonsense"), "--device: expected cpu, cuda or cuda:N, got 'nonsense'"),
        (("--weights", "absent.npz"), "absent.npz, which does not exist"),
    ],
)
def test_options(scans, tmp_path, capsys, option, match):
    out = tmp_path / "out"
    assert run("mnist", "--data", scans, "--small", "--out", out, *option) == 1
    assert match in only_line(capsys)
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"text"])
def test_weights_that_are_none(scans, tmp_path, capsys, content):
    path = tmp_path / "w.npz"
    path.write_bytes(content)
    options = ("--small", "--out", tmp_path / "out", "--weights", path)
    assert run("mnist", "--data", scans, *options) == 1
    assert "w.npz, which is truncated or is none" in only_line(capsys)


def test_weights_of_the_other_network(scans, tmp_path, capsys):
    state = PaperNetwork(3, 32).state_dict()
    np.savez(tmp_path / "w.npz", **{name: value.numpy() for name, value in state.items()})
    options = ("--small", "--out", tmp_path / "out", "--weights", tmp_path / "w.npz")
    assert run("mnist", "--data", scans, *options) == 1
    assert "names and shapes of the paper's network" in only_line(capsys)


@pytest.mark.parametrize("recipe", ["mnist", "cifar10"])
def test_data(tmp_path, capsys, recipe):
    (tmp_path / "file").write_text("")
    out = tmp_path / "out"
    for data in (tmp_path / "file", tmp_path / "absent"):
        assert run(recipe, "--data", data, "--small", "--out", out) == 1
        assert f"--data: expected a folder, got {data}" in only_line(capsys)
    (tmp_path / "empty").mkdir()
    assert run(recipe, "--data", tmp_path / "empty", "--small", "--out", out) == 1
    assert str(tmp_path / "empty") in only_line(capsys)
    assert not out.exists()


def test_missing_matplotlib_is_known_before_anything_is_computed(
    scans, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("mnist", "--data", scans, "--small", "--out", tmp_path / "out") == 1
    assert "pip install 'deltabars[figures]'" in only_line(capsys)
    assert not (tmp_path / "out").exists()


def test_too_few_images(scans, tmp_path, capsys):
    assert run("mnist", "--data", scans, "--out", tmp_path / "out") == 1  # the paper's size
    assert "expected 60000 items or more, got 600" in only_line(capsys)


def test_a_file_where_the_results_are_to_be(scans, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert run("mnist", "--data", scans, "--small", "--out", tmp_path / "out") == 1
    assert "Cannot write to" in only_line(capsys)


def test_a_stage_that_is_cut_short(quick_run, tmp_path, capsys):
    shutil.copytree(quick_run.out, tmp_path / "out")
    path = tmp_path / "out" / "stages" / "weights.npz"
    path.write_bytes(path.read_bytes()[:1000])
    where = ("--data", quick_run.data, "--out", tmp_path / "out")
    assert run("mnist", *where, *QUICK, "--quiet") == 1
    assert "Stage weights (remove it to compute it again)" in only_line(capsys)


def test_another_experiment(tmp_path):
    with pytest.raises(SystemExit) as caught:
        run("imagenet", "--data", tmp_path)
    assert caught.value.code == 2


def test_a_class_that_is_none(scans, tmp_path, capsys):
    shutil.copytree(scans, tmp_path / "data")
    labels = np.full(600, 10, dtype=np.uint8)
    (tmp_path / "data" / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    assert run("mnist", "--data", tmp_path / "data", "--small", "--out", tmp_path / "out") == 1
    assert "classes from 0 to 9, got 10" in only_line(capsys)


def test_a_folder_in_the_way_of_the_results(quick_run, tmp_path, capsys):
    shutil.copytree(quick_run.out, tmp_path / "out")
    (tmp_path / "out" / "results.json").unlink()
    (tmp_path / "out" / "results.json").mkdir()
    where = ("--data", quick_run.data, "--out", tmp_path / "out")
    assert run("mnist", *where, *QUICK, "--quiet") == 1
    assert "results.json: Is a directory" in only_line(capsys)


def test_a_folder_in_the_way_of_a_figure(quick_run, tmp_path, capsys):
    shutil.copytree(quick_run.out, tmp_path / "out")
    (tmp_path / "out" / "spectra.png").unlink()
    (tmp_path / "out" / "spectra.png").mkdir()
    where = ("--data", quick_run.data, "--out", tmp_path / "out")
    assert run("mnist", *where, *QUICK, "--quiet") == 1
    assert "spectra.png" in only_line(capsys)


def test_a_fit_that_is_cut_short(quick_run, tmp_path, capsys):
    shutil.copytree(quick_run.out, tmp_path / "out")
    path = tmp_path / "out" / "stages" / "fit.deltabars"
    path.write_bytes(path.read_bytes()[:1000])
    (tmp_path / "out" / "stages" / "surfaces.npz").unlink()  # a stage that needs it
    where = ("--data", quick_run.data, "--out", tmp_path / "out")
    assert run("mnist", *where, *QUICK, "--quiet") == 1
    assert "fit.deltabars" in only_line(capsys)
