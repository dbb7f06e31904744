"""Predictions to a folder: exactly once an input, whoever is killed, on one process or several."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from deltabars.blocks import predict_to
from torch.utils.data import DataLoader, Dataset

from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.errors import BadValueError, DataError, StorageError
from tests.launches import DATA, ROOT, ended, launch, rows_of, times_each
from tests.stopping import end, start
from tests.workshop import TEST

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "deltabars"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, with data.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.py").write_text(DATA)
    return tmp_path


@pytest.fixture(scope="module")
def fit(workshop):
    return workshop.fit()


def asked(workshop, out, count, *more, data="Made", **options):
    """The arguments of `predict` for data that are made."""
    arguments = json.dumps({"count": count, **options})
    return ["predict", workshop.run, "--data", f"data.py:{data}", "--data-args", arguments,
            "--out", out, "--block-size", 8, "--device", "cpu", *more]  # fmt: skip


def command(*arguments):
    return main([str(argument) for argument in (*arguments, "--quiet")])


def block(folder, start):
    return Path(folder, f"inputs-{start:012d}.parquet")


class TestOneProcess:
    def test_the_rows_and_the_summary_are_those_of_a_file(self, workshop, place, capsys):
        test = ["predict", workshop.run, "--data", workshop.folder / "test", "--json"]
        assert command(*test, "--out", "all.parquet") == 0
        whole = json.loads(capsys.readouterr().out)
        assert command(*test, "--out", "one/", "--block-size", TEST) == 0
        found = json.loads(capsys.readouterr().out)
        rows, one = pyarrow.parquet.read_table("all.parquet").to_pylist(), rows_of(Path("one"))
        assert [row.pop("number") for row in one] == list(range(TEST))  # in their order
        assert one == rows  # one batch in both cases: the same bits
        for name in ("inputs", "mean_score", "accuracy", "mean_score_right", "mean_score_wrong"):
            assert found[name] == pytest.approx(whole[name], rel=1e-6), name
        assert (found["computed"], found["blocks"]) == (TEST, 1)

    @pytest.mark.parametrize("data", ["Made", "loader"])
    def test_missing_blocks_alone_are_written_and_read(self, workshop, place, capsys, data):
        arguments = asked(workshop, "out/", 43, "--json", data=data, log="log")
        assert command(*arguments) == 0
        before, manifest = rows_of(Path("out")), Path("out/_manifest.json").read_text()
        for first in (0, 16, 40):
            block("out", first).unlink()
        Path("out/_notes.txt").write_text("mine")
        Path("log").unlink()
        capsys.readouterr()
        assert command(*arguments) == 0
        assert json.loads(capsys.readouterr().out)["computed"] == 8 + 8 + 3
        assert rows_of(Path("out")) == before
        assert Path("out/_manifest.json").read_text() == manifest
        read = [int(line.split()[1]) for line in Path("log").read_text().splitlines()]
        assert sorted(read) == sorted([0, 21, 42, *range(8), *range(16, 24), *range(40, 43)])
        assert {path.name for path in Path("out").glob("_*")} == {
            "_lock", "_manifest.json", "_notes.txt", "_plan.json"
        }  # fmt: skip

    def test_in_python_and_the_printed_python(self, fit, workshop, place, capsys):
        inputs, options = workshop.test[0], {"rank": 5, "classes": "top2"}
        written, rows = predict_to(fit, inputs, "a", block_size=7, **options), rows_of(Path("a"))
        assert written.inputs == written.computed == len(rows) == TEST
        expected = fit.predict(inputs, **options).score.tolist()
        assert [row["score"] for row in rows] == pytest.approx(expected, rel=1e-5)
        manifest = json.loads(Path("a/_manifest.json").read_text())
        assert [each["file"] for each in manifest["blocks"]] == list(written.blocks)
        assert command(*asked(workshop, "again/", 20, "--print-python")) == 0
        exec(compile(capsys.readouterr().out, "program", "exec"), {})
        assert command(*asked(workshop, "again/", 20, "--json")) == 0  # the same to the plan
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["computed"] == 0


class TestRefused:
    def test_a_folder_of_something_else(self, fit, tmp_path, workshop):
        inputs, folder = workshop.test[0], tmp_path / "out"
        predict_to(fit, inputs, folder, block_size=20)
        (tmp_path / "photo.png").write_bytes(b"mine")
        for said, arguments, options in (
            ("another fit", (fit.with_l2(0.5), inputs, folder), {}),
            ("another data", (fit, inputs[:-1], folder), {}),
            ("another data and asked", (fit, inputs + 1, folder), {"rank": 3}),
            ("another block size", (fit, inputs, folder), {"block_size": 9}),
            (r"new or empty one, .* in it", (fit, inputs, tmp_path), {}),
            ("a folder that exists", (fit, inputs, tmp_path / "no" / "out"), {}),
            ("Cannot write", (fit, inputs, tmp_path / "photo.png"), {}),
        ):
            before = {path: path.stat().st_mtime_ns for path in folder.glob("*.*")}
            with pytest.raises(StorageError, match=said):
                predict_to(*arguments, **options)
            assert {path: path.stat().st_mtime_ns for path in folder.glob("*.*")} == before

    def test_what_cannot_be_predicted_leaves_nothing(self, fit, tmp_path, workshop):
        inputs = workshop.test[0]
        for kind, data, options in (
            (DataError, inputs[:0], {}),
            (DataError, iter(inputs.split(9)), {}),  # has no numbers
            (DataError, DataLoader(inputs, shuffle=True), {}),
            (DataError, inputs[:, :, 1:], {}),
            (BadValueError, inputs, {"rank": 99}),
            (BadValueError, inputs, {"estimator": ["opg"]}),
            (BadValueError, inputs, {"block_size": 0}),
            (TypeError, inputs, {"color": "red"}),
        ):
            with pytest.raises(kind):
                predict_to(fit, data, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())

    def test_altered_blocks_and_plans(self, fit, tmp_path, workshop):
        inputs, folder = workshop.test[0], tmp_path / "out"
        predict_to(fit, inputs, folder, block_size=20)
        (first, second), plan = (block(folder, k) for k in (0, 20)), folder / "_plan.json"
        content, table = second.read_bytes(), pyarrow.parquet.read_table(first)
        good = json.loads(plan.read_text())

        def refused(said):
            with pytest.raises(StorageError, match=said):
                predict_to(fit, inputs, folder)

        second.write_bytes(content[:-30])
        refused("is altered")
        shutil.copy(first, second)
        refused("expected the inputs from 20 on, once each")
        second.write_bytes(content)
        pyarrow.parquet.write_table(table.slice(0, 19), first)
        refused("expected the inputs from 0 on, once each")
        first.unlink()
        assert predict_to(fit, inputs, folder).computed == 20
        for altered in ("{", "[]", "{}"):
            plan.write_text(altered)
            refused(r"_plan\.json is altered")
        plan.write_text(json.dumps(good | {"format": 2}))
        refused("of another format")

    def test_data_that_cannot_be_read_and_two_launches_at_once(self, workshop, place, capsys):
        assert command(*asked(workshop, "bad/", 30, fails_at=20)) == 1
        assert "expected inputs that can be read, got an error after 16" in capsys.readouterr().err
        arguments = asked(workshop, "out/", 24, pause=0.05)
        first = start(lambda: os._exit(command(*arguments)))
        while not list(place.glob("out/inputs-*")):
            time.sleep(0.01)
        assert command(*arguments) == 1
        assert f"which process {first} is using" in capsys.readouterr().err
        assert end(first) == 0
        assert times_each(rows_of(Path("out")), 24) == {1}


class TestSeveralProcesses:
    def test_the_rows_are_those_of_one(self, workshop, place):
        assert command(*asked(workshop, "one/", 43)) == 0
        arguments = asked(workshop, "two/", 43, log="log")
        assert ended(launch(2, arguments, place / "said")) == [0, 0]
        assert rows_of(Path("two")) == rows_of(Path("one"))  # the same blocks: the same bits
        assert Path("said.1").read_text() == ""
        assert len(Path("said.0").read_text().splitlines()) == 11
        lines = [line.split() for line in Path("log").read_text().splitlines()]
        assert len(lines) == 43 + 2 * 3  # besides three that make the digest, each is read once
        assert {rank for rank, _ in lines} == {"0", "1"}

    def test_refusals(self, workshop, place):
        arguments = asked(workshop, "out/", 60, fails_at=44)
        assert ended(launch(2, arguments, place / "said")) == [1, 1]
        said = [Path(f"said.{rank}").read_text().splitlines()[-1] for rank in range(2)]
        assert sum("expected inputs that can be read" in line for line in said) == 1
        assert sum("Another process has failed" in line for line in said) == 1
        assert [line.startswith("deltabars: process 1: ") for line in said] == [False, True]
        file = ["predict", workshop.run, "--data", workshop.folder / "test", "--out", "x.csv"]
        for arguments, line in (
            ([*file, "--device", "cpu"], "--out: expected a folder under torchrun"),
            (["spectrum", workshop.run], "torchrun: expected `fit` or `predict`"),
        ):
            assert 1 in ended(launch(2, arguments, place / "said"))
            assert line in Path("said.0").read_text()
        arguments = [*asked(workshop, "out/", 20), "--rank-timeout", "2"]
        assert ended(launch(1, arguments, place / "said", WORLD_SIZE="2")) == [1]
        assert "expected 2 to meet within 2 s" in Path("said.0").read_text()

    def test_a_fit_in_two_processes_is_that_of_one(self, workshop, place):
        arguments = ["fit", *workshop.options, "--out", "run", "--quiet"]
        assert ended(launch(2, arguments, place / "said")) == [0, 0]
        found, alone = Run.open("run").load_fit().spectra["opg"], workshop.fit().spectra["opg"]
        assert float(found.values[0]) == pytest.approx(float(alone.values[0]), rel=1e-6)

    def test_a_process_that_is_killed_under_torchrun(self, workshop, place):
        """torchrun names it and ends the other; one process writes the rest."""
        arguments = [str(text) for text in asked(workshop, "out/", 60, pause=0.05)]
        running = subprocess.Popen(
            [*TORCHRUN, *arguments], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        while len(list(place.glob("out/inputs-*"))) < 2:
            assert running.poll() is None
            time.sleep(0.01)
        pids = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(running.pid)]).split()
        os.kill(int(pids[-1]), signal.SIGKILL)
        _, said = running.communicate(timeout=60)
        assert running.returncode == 1
        assert re.search(r"rank +: \d ", said), said
        assert not Path("out/_manifest.json").exists()
        assert 16 <= len(rows_of(Path("out"))) < 60
        assert command(*arguments) == 0
        assert times_each(rows_of(Path("out")), 60) == {1}


def test_inputs_are_read_a_block_at_a_time(fit, tmp_path):
    """So that memory holds a batch, however many inputs there are."""
    seen = []

    class Watched(Dataset):
        def __len__(self):
            return 200

        def __getitem__(self, number):
            seen.append((number, len(list(tmp_path.glob("out/inputs-*")))))
            return torch.full((1, 8, 8), number / 200)

    predict_to(fit, Watched(), tmp_path / "out", block_size=50)
    assert all(written == number // 50 for number, written in seen[3:])
