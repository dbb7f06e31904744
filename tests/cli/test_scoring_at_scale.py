"""Predictions to a folder: exactly once an input, whoever is killed, on any number of processes."""

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

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import deltabars
from deltabars.cli.blocks.plan import fit_fingerprint
from deltabars.cli.blocks.predicting import predict_to
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.errors import BadValueError, CorruptFileError, DataError, StorageError
from tests.launches import DATA, ROOT, ended, launch, rows_of, times_each
from tests.stopping import end, start
from tests.workshop import TEST

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]


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


def close(ours, theirs):
    """Whether rows are the same, numbers to float32's rounding: batches may be others."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, float):
                assert value == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
            else:
                assert value == other[name], name
    return True


def times(folder):
    """When each file was written, but for the lock."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "_lock"}


class TestOneProcess:
    def test_the_rows_are_those_of_a_file(self, workshop, place, capsys):
        test = ["predict", workshop.run, "--data", workshop.folder / "test", "--json"]
        assert command(*test, "--out", "all.parquet") == 0
        whole = json.loads(capsys.readouterr().out)
        assert command(*test, "--out", "one/", "--block-size", TEST) == 0
        found = json.loads(capsys.readouterr().out)
        assert command(*test, "--out", "many", "--block-size", 8) == 0
        rows = pyarrow.parquet.read_table("all.parquet").to_pylist()
        one, many = rows_of(Path("one")), rows_of(Path("many"))
        assert times_each(one, TEST) == times_each(many, TEST) == {1}
        assert [row.pop("number") for row in one] == list(range(TEST))  # in their order
        assert one == rows  # one batch in both cases: the same bits
        assert close([{k: v for k, v in row.items() if k != "number"} for row in many], rows)
        for name in ("inputs", "mean_score", "accuracy", "mean_score_right", "mean_score_wrong"):
            assert found[name] == pytest.approx(whole[name], rel=1e-6), name
        assert (found["computed"], found["blocks"]) == (TEST, 1)
        assert len(list(Path("many").glob("inputs-*.parquet"))) == 8

    def test_it_goes_on_with_what_is_missing(self, workshop, place, capsys):
        arguments = asked(workshop, "out/", 43, "--json", log="log")
        assert command(*arguments) == 0
        before, manifest = rows_of(Path("out")), Path("out/_manifest.json").read_text()
        for start_of in (0, 16, 40):
            Path(f"out/inputs-{start_of:012d}.parquet").unlink()
        Path("out/_draft-0123456789abcdef-inputs-000000000000.parquet").write_bytes(b"PAR1 half")
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
        assert command(*arguments) == 0
        assert json.loads(capsys.readouterr().out)["computed"] == 0

    @pytest.mark.parametrize("count", [1, 8, 21, 24])
    def test_a_stream(self, workshop, place, count, capsys):
        assert command(*asked(workshop, "stream/", count, "--json", data="Stream")) == 0
        assert command(*asked(workshop, "made/", count)) == 0
        rows = rows_of(Path("stream"))
        assert times_each(rows, count) == {1}
        assert close(rows, rows_of(Path("made")))
        Path("stream/inputs-000000000000.parquet").unlink()
        assert command(*asked(workshop, "stream/", count, data="Stream")) == 0
        assert rows_of(Path("stream")) == rows

    @pytest.mark.parametrize("data", ["loader", "odd_loader"])
    def test_loaders(self, workshop, place, data):
        """One that reads in order is read by number; of another the order is its own."""
        assert command(*asked(workshop, "made/", 5)) == 0
        assert command(*asked(workshop, "out/", 5, data=data, log="log")) == 0
        order = [1, 0, 4, 2, 3] if data == "odd_loader" else range(5)
        made = rows_of(Path("made"))
        expected = [made[k] | {"number": n, "input": str(n)} for n, k in enumerate(order)]
        assert close(rows_of(Path("out")), expected)
        by_number = len(Path("log").read_text().splitlines())
        assert by_number == (5 if data == "odd_loader" else 5 + 3)  # three make the digest

    def test_in_python(self, fit, tmp_path, workshop):
        inputs = workshop.test[0]
        written = predict_to(fit, inputs, tmp_path / "a", block_size=7, rank=5, classes="top2")
        rows = rows_of(tmp_path / "a")
        assert written.inputs == written.computed == len(rows) == TEST
        expected = fit.predict(inputs, rank=5, classes="top2")
        assert [row["score"] for row in rows] == pytest.approx(expected.score.tolist(), rel=1e-5)
        manifest = json.loads((tmp_path / "a" / "_manifest.json").read_text())
        assert [block["file"] for block in manifest["blocks"]] == list(written.blocks)
        assert sum(block["rows"] for block in manifest["blocks"]) == TEST
        assert manifest["fit"] == fit_fingerprint(fit)
        some = predict_to(fit, iter(inputs.split(9)), tmp_path / "b", rank=5, classes="top2")
        assert some.computed == TEST
        assert close(rows_of(tmp_path / "b"), rows)

    def test_the_python_it_stands_for(self, workshop, place, capsys):
        assert command(*asked(workshop, "out/", 20)) == 0
        capsys.readouterr()
        assert command(*asked(workshop, "again/", 20, "--print-python")) == 0
        text = capsys.readouterr().out
        exec(compile(text, "program", "exec"), {})
        assert rows_of(Path("again")) == rows_of(Path("out"))
        assert command(*asked(workshop, "again/", 20)) == 0  # the same to the plan


class TestRefused:
    def test_a_folder_of_something_else(self, fit, tmp_path, workshop):
        inputs, folder = workshop.test[0], tmp_path / "out"
        predict_to(fit, inputs, folder, block_size=20)
        before = times(folder)
        other = workshop.fit(rank=5)
        for said, arguments in (
            ("another fit", (other, inputs)),
            ("another fit", (fit.with_l2(0.5), inputs)),
            ("other data", (fit, inputs[:-1])),
            ("other data", (fit, inputs.flip(0))),
        ):
            with pytest.raises(StorageError, match=f"which has predictions of {said}"):
                predict_to(*arguments, folder)
        with pytest.raises(StorageError, match="of other data and other options"):
            predict_to(fit, inputs + 1, folder, rank=3)
        with pytest.raises(StorageError, match=r"in blocks of 9 inputs, got .* blocks of 20"):
            predict_to(fit, inputs, folder, block_size=9)
        assert times(folder) == before

    def test_a_folder_of_others(self, fit, tmp_path, workshop):
        (tmp_path / "photo.png").write_bytes(b"mine")
        with pytest.raises(StorageError, match=r"new or empty one, .* with photo\.png in it"):
            predict_to(fit, workshop.test[0], tmp_path)
        with pytest.raises(StorageError, match="a folder that exists"):
            predict_to(fit, workshop.test[0], tmp_path / "no" / "out")
        with pytest.raises(StorageError, match="Cannot write"):
            predict_to(fit, workshop.test[0], tmp_path / "photo.png")
        assert os.listdir(tmp_path) == ["photo.png"]

    def test_what_cannot_be_predicted_leaves_nothing(self, fit, tmp_path, workshop):
        inputs = workshop.test[0]
        shuffled = torch.utils.data.DataLoader(inputs, shuffle=True)
        for kind, data, options in (
            (DataError, inputs[:0], {}),
            (DataError, iter(()), {}),
            (DataError, shuffled, {}),
            (DataError, inputs[:, :, 1:], {}),
            (BadValueError, inputs, {"rank": 99}),
            (BadValueError, inputs, {"estimator": ["opg"]}),
            (BadValueError, inputs, {"block_size": 0}),
            (TypeError, inputs, {"color": "red"}),
        ):
            with pytest.raises(kind):
                predict_to(fit, data, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())

    def test_altered_blocks(self, fit, tmp_path, workshop):
        inputs, folder = workshop.test[0], tmp_path / "out"
        predict_to(fit, inputs, folder, block_size=20)
        block, other = (folder / f"inputs-{k:012d}.parquet" for k in (20, 0))
        content = block.read_bytes()
        block.write_bytes(content[:-30])
        with pytest.raises(CorruptFileError, match="cannot be read"):
            predict_to(fit, inputs, folder)
        shutil.copy(other, block)
        with pytest.raises(CorruptFileError, match="expected inputs 20 to 39, once each"):
            predict_to(fit, inputs, folder)
        table = pyarrow.parquet.read_table(folder / other.name)
        block.write_bytes(content)
        pyarrow.parquet.write_table(table.slice(0, 19), other)
        with pytest.raises(CorruptFileError, match="got 19 rows from 0 on"):
            predict_to(fit, inputs, folder)
        pyarrow.parquet.write_table(table, other, compression="none")
        with pytest.raises(CorruptFileError, match="its digest is not that"):
            predict_to(fit, inputs, folder)
        other.unlink()
        assert predict_to(fit, inputs, folder).computed == 20

    def test_altered_plans(self, fit, tmp_path, workshop):
        predict_to(fit, workshop.test[0], tmp_path / "out")
        plan = tmp_path / "out" / "_plan.json"
        content = json.loads(plan.read_text())
        for altered in ("{", "[]", "{}", json.dumps(content | {"block_size": 0})):
            plan.write_text(altered)
            with pytest.raises(CorruptFileError, match=r"_plan\.json is altered"):
                predict_to(fit, workshop.test[0], tmp_path / "out")
        plan.write_text(json.dumps(content | {"format": 2}))
        with pytest.raises(StorageError, match="newer deltabars"):
            predict_to(fit, workshop.test[0], tmp_path / "out")

    def test_a_stream_that_has_become_shorter(self, fit, tmp_path, workshop):
        inputs, folder = workshop.test[0], tmp_path / "out"
        predict_to(fit, iter(inputs.split(9)), folder, block_size=8)
        (folder / "inputs-000000000032.parquet").unlink()
        with pytest.raises(DataError, match="got others: 35 of them, where its blocks have 55"):
            predict_to(fit, iter(inputs[:35].split(9)), folder)
        assert not (folder / "_manifest.json").exists()

    def test_data_that_cannot_be_read(self, workshop, place, capsys):
        assert command(*asked(workshop, "out/", 30, fails_at=20)) == 1
        assert "expected inputs that can be read, got an error after 16" in capsys.readouterr().err
        assert command(*asked(workshop, "out/", 30)) == 1  # the arguments are other ones
        assert "other data" in capsys.readouterr().err
        assert not list(Path("out").glob("_draft*"))

    def test_two_launches_at_once(self, workshop, place, capsys):
        arguments = asked(workshop, "out/", 24, pause=0.05)
        first = start(lambda: os._exit(command(*arguments)))
        while not list(place.glob("out/inputs-*")):
            time.sleep(0.01)
        assert command(*arguments) == 1
        assert f"which process {first} is using" in capsys.readouterr().err
        assert end(first) == 0
        assert times_each(rows_of(Path("out")), 24) == {1}


class TestSeveralProcesses:
    @pytest.mark.parametrize("data", ["Made", "Stream"])
    def test_the_rows_are_those_of_one(self, workshop, place, data):
        assert command(*asked(workshop, "one/", 43, data=data)) == 0
        arguments = asked(workshop, "two/", 43, data=data, log="log", pause=0.002)
        assert ended(launch(2, arguments, place / "said")) == [0, 0]
        assert rows_of(Path("two")) == rows_of(Path("one"))  # the same blocks: the same bits
        assert Path("said.1").read_text() == ""
        assert len(Path("said.0").read_text().splitlines()) == 10
        lines = [line.split() for line in Path("log").read_text().splitlines()]
        if data == "Made":  # besides three that make the digest, no input is read by both
            assert len(lines) == 43 + 2 * 3
        assert {rank for rank, _ in lines} == {"0", "1"}

    def test_a_slow_one_does_not_hold_up_the_rest(self, workshop, place):
        arguments = asked(workshop, "out/", 80, log="log", pause=0.05, slow_rank=1)
        assert ended(launch(2, arguments, place / "said")) == [0, 0]
        assert times_each(rows_of(Path("out")), 80) == {1}
        ranks = [line.split()[0] for line in Path("log").read_text().splitlines()]
        assert ranks.count("0") > 2 * ranks.count("1")

    def test_one_is_killed(self, workshop, place):
        """The other says which; then three go on."""
        arguments = asked(workshop, "out/", 60, pause=0.02)
        pids = launch(2, arguments, place / "said")
        while len(list(place.glob("out/inputs-*"))) < 2:
            time.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        assert ended(pids) == [1, -signal.SIGKILL]
        assert time.monotonic() - began < 20
        assert "got nothing any more from rank 1" in Path("said.0").read_text().splitlines()[-1]
        assert not Path("out/_manifest.json").exists()
        there = len(rows_of(Path("out")))
        assert ended(launch(3, [*arguments, "--json"], place / "again")) == [0, 0, 0]
        said = json.loads(Path("again.0").read_text().splitlines()[-1])
        assert (said["inputs"], said["computed"]) == (60, 60 - there)
        assert times_each(rows_of(Path("out")), 60) == {1}

    def test_one_fails(self, workshop, place):
        arguments = asked(workshop, "out/", 60, fails_at=44)
        assert ended(launch(2, arguments, place / "said")) == [1, 1]
        said = [Path(f"said.{rank}").read_text().splitlines()[-1] for rank in range(2)]
        own = next(k for k in range(2) if "got an error on rank" not in said[k])
        assert "expected inputs that can be read" in said[own]
        assert f"got an error on rank {own}: Data: expected inputs that can be" in said[1 - own]
        for rank, line in enumerate(said):
            assert line.startswith("deltabars: rank 1: " if rank else "deltabars: ")

    def test_other_data_on_another_rank(self, workshop, place):
        arguments = asked(workshop, "out/", 20, data="Stream", of_rank=True)
        assert ended(launch(2, arguments, place / "said")) == [1, 1]
        assert "expected the same inputs on every rank, got 20 and 23" in (
            Path("said.0").read_text()
        )

    def test_what_is_for_one_process(self, workshop, place):
        file = ["predict", workshop.run, "--data", workshop.folder / "test", "--out", "x.csv"]
        for arguments, line in (
            ([*file, "--device", "cpu"], "--out: expected a folder under torchrun"),
            (["spectrum", workshop.run], "torchrun: expected `fit` or `predict`"),
            (["fit", *workshop.options, "--out", workshop.run], "Give --overwrite to replace it"),
        ):
            assert ended(launch(2, arguments, place / "said")) == [1, 1]
            assert line in Path("said.0").read_text()
        assert ended(launch(1, [*file, "--device", "cpu"], place / "said")) == [0]

    def test_a_launcher_that_says_nonsense(self, workshop, place, monkeypatch, capsys):
        for name, value in {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WORLD_SIZE", "two")
        assert command("predict", workshop.run, "--data", "data.py:Made") == 1
        assert "WORLD_SIZE: expected a whole number" in capsys.readouterr().err

    def test_others_do_not_come(self, workshop, place):
        arguments = [*asked(workshop, "out/", 20), "--rank-timeout", "2"]
        assert ended(launch(1, arguments, place / "said", WORLD_SIZE="2")) == [1]
        assert "expected 2 processes to meet within 2 s" in Path("said.0").read_text()


class TestTorchrun:
    def test_fit(self, workshop, place):
        done = subprocess.run(
            [*TORCHRUN, "-m", "deltabars", "fit", *workshop.options, "--out", "run", "--json"],
            capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1
        assert json.loads(done.stdout)["parameters"] == 460
        found, plain = (Run.open(path).load_fit() for path in ("run", workshop.run))
        ours, theirs = (fit.spectra["opg"].values.numpy() for fit in (found, plain))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert sorted(os.listdir()) == ["data.py", "run"]

    def test_predict_and_a_rank_that_is_killed(self, workshop, place):
        """torchrun names it and ends the other; one process goes on."""
        arguments = [str(text) for text in asked(workshop, "out/", 60, pause=0.05)]
        running = subprocess.Popen(
            [*TORCHRUN, "-m", "deltabars", *arguments], stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        while len(list(place.glob("out/inputs-*"))) < 2:
            assert running.poll() is None
            time.sleep(0.01)
        os.kill(process_of(1, running.pid), signal.SIGKILL)
        _, said = running.communicate(timeout=60)
        assert running.returncode == 1
        assert re.search(r"rank +: 1 ", said), said
        there = len(rows_of(Path("out")))
        assert 16 <= there < 60
        assert command(*arguments) == 0
        assert times_each(rows_of(Path("out")), 60) == {1}
        assert not list(place.glob("out/_draft-*"))


def process_of(rank, launcher):
    """The process of a rank that a launcher has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (
                (path / "environ").read_bytes().split(b"\0")
            ):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("no such process")


class Large(Dataset):
    """Pictures of a quarter of a megabyte each, made when they are asked for."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return torch.full((1, 256, 256), number / self.count)


def test_memory_does_not_grow_with_the_inputs(tmp_path):
    """Peaks of processes that predict 50 and 200 megabytes of inputs, as the system has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(64), nn.Flatten(), nn.Linear(16, 3))
    data = torch.rand(30, 1, 256, 256), torch.arange(30) % 3
    with pytest.warns(deltabars.errors.OptimumWarning):
        fit = deltabars.fit(model, data, l2=0.1, rank=5, progress=False)

    def peak(count):
        read, write = os.pipe()

        def work():
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
            before = resident("VmRSS")
            predict_to(fit, Large(count), tmp_path / str(count), block_size=50)
            os.write(write, str(resident("VmHWM") - before).encode())

        assert end(start(work)) == 0
        return int(os.read(read, 64))

    few, many = peak(200), peak(800)
    assert len(rows_of(tmp_path / "800")) == 800
    assert many - few < 15e6  # of 157 million bytes of inputs that are more
    assert many < 150e6


def resident(name):
    line = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) * 1024
