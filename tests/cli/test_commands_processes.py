"""The commands as a user's shell runs them: real processes, signals, terminals, and bash."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deltabars.cli import options as table
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.covariance.estimators import ESTIMATORS, SPREADS
from deltabars.errors import in_options, on_command_line, option
from deltabars.fitting.files import DTYPES
from deltabars.likelihoods.base import LOSSES
from deltabars.prediction.prediction import LEVELS
from deltabars.prediction.ranking import CRITERIA
from deltabars.problem.parameters import last_layer
from deltabars.recipes.paper import RECIPES
from tests.scans import command, environment
from tests.stopping import end, start
from tests.workshop import contents

SLOW = """\
import time, torch

make = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

class Slow(torch.utils.data.Dataset):
    __len__ = lambda self: 400

    def __getitem__(self, number):
        time.sleep(0.02)
        return torch.ones(1, 8, 8), number % 10
"""


TRAIN = """\
import time
from net import make

def retrain(sample):
    time.sleep(0.5)
    model = make()
    model[-1].bias.data[0] = float(sum(target for _, target in sample)) / 1000
    return model
"""


class TestParsing:
    def test_help_and_version_import_nothing_heavy(self):
        program = (
            "import sys\nfrom deltabars.cli import main\n"
            "for given in (['fit', '--help'], ['check', '--help'], ['--version'],\n"
            "    ['fit', '--rank', 'many']):\n"
            "    try:\n        main(given)\n    except SystemExit as end:\n"
            "        print(end.code)\n"
            "print(sorted({'torch', 'numpy', 'safetensors', 'tqdm'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        lines = done.stdout.splitlines()
        assert lines[-1] == "[]", done.stderr
        assert [line for line in lines if line in ("0", "2")] == ["0", "0", "0", "2"]

    def test_help_completion_and_choices(self, capsys):
        assert main([]) == 0
        whole = capsys.readouterr().out
        for name in table.COMMANDS:
            assert name in whole
            with pytest.raises(SystemExit):
                main([name, "--help"])
            text = capsys.readouterr().out
            assert re.search(rf"examples:\n  .*deltabars {name}", text)
        assert main(["completion", "bash"]) == 0
        script = capsys.readouterr().out
        assert all(word in script for word in ("reproduce", "--model-args", "sandwich"))
        check = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (check.returncode, check.stderr) == (0, "")
        # The table has them in full, so that nothing is imported to parse a line.
        library = {*LOSSES}, CRITERIA, tuple(DTYPES), tuple(RECIPES), SPREADS, {*ESTIMATORS}
        ours = {*table.LOSSES}, table.CRITERIA, table.STORED, table.EXPERIMENTS, table.SPREADS
        assert library == (*ours, {*table.ESTIMATORS})


def answers_to_ctrl_c():
    """In a process to be: whatever runs the tests may have it ignored, or blocked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class TestEndings:
    @pytest.mark.parametrize(
        ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
    )
    def test_a_fit_that_is_ended_leaves_no_half_run(self, tmp_path, number, word):
        (tmp_path / "net.py").write_text(SLOW)
        before = contents(tmp_path)
        line = "fit --model net.py:make --untrained --data net.py:Slow --l2 1 --out run"
        process = subprocess.Popen(
            command(*line.split()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(), cwd=tmp_path, preexec_fn=answers_to_ctrl_c,
        )  # fmt: skip
        assert process.stderr is not None
        assert "400 examples" in process.stderr.readline()
        time.sleep(0.5)
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, "")
        assert error.splitlines()[-1] == f"deltabars: {word}"
        assert "Traceback" not in error
        assert contents(tmp_path) == before

    def test_a_check_that_is_ended_keeps_what_is_trained(self, workshop, tmp_path):
        shutil.copytree(workshop.run, tmp_path / "run")
        shutil.copy(workshop.folder / "net.py", tmp_path / "net.py")
        (tmp_path / "train.py").write_text(TRAIN)
        asked = ("--inputs", workshop.folder / "test", "--train", "train.py:retrain")
        line = command("check", "run", *asked, "--count", "3")
        first = tmp_path / "run/check/replica-00.pt"
        options = {"env": environment(), "cwd": tmp_path, "text": True, "stderr": subprocess.PIPE}
        process = subprocess.Popen(line, preexec_fn=answers_to_ctrl_c, **options)
        until = time.monotonic() + 60
        while not first.is_file():
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error.splitlines()[-1]) == (1, "deltabars: terminated")
        kept = first.read_bytes()
        assert not any("draft" in name for name in contents(tmp_path))
        done = subprocess.run([*line, "--json"], stdout=subprocess.PIPE, **options)
        assert done.returncode == 0, done.stderr
        assert re.search("3 networks in run/check, [12] of them from before", done.stderr)
        assert json.loads(done.stdout)["replicas"] == 3
        assert first.read_bytes() == kept

    def test_of_two_processes_that_make_one_run_one_is_refused(self, workshop, tmp_path):
        make = [*map(str, ("fit", *workshop.options, "--out", tmp_path / "run", "--quiet"))]
        pids = [start(lambda: os._exit(main(make))) for _ in range(2)]
        assert sorted(map(end, pids)) == [0, 1]
        assert contents(tmp_path) == {"run", "run/fit.deltabars", "run/run.json"}
        assert Run.open(tmp_path / "run").load_fit().rank == 30

    def test_a_reader_that_has_seen_enough_is_no_error(self, workshop):
        """`deltabars spectrum run --json | head -c 1`."""
        with subprocess.Popen(
            command("spectrum", workshop.run, "--json"), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment(),
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 1


def test_a_terminal_that_lacks_characters_is_no_failure(workshop, monkeypatch):
    out, error = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", error)
    assert main(["spectrum", str(workshop.run)]) == 0
    assert main(["spectrum", str(workshop.run), "--values", "no/λ.csv"]) == 1
    error.flush()
    assert b"\\u03bb_K of opg" in out.buffer.getvalue()
    assert b"expected a folder that exists" in error.buffer.getvalue()


def test_a_run_of_version_0_5_loads(workshop, tmp_path, capsys):
    """Its run.json names predictions to look at, `aside`; its judgements have other evidence."""
    shutil.copytree(workshop.run, tmp_path / "run")
    for part in ("test", "flat"):
        line = ["predict", str(tmp_path / "run"), "--data", str(workshop.folder / part), "--quiet"]
        assert main(line) == 0
    for kept in tmp_path.glob("run/predictions/*.npz"):
        arrays = dict(np.load(kept))
        judgement = json.loads(str(arrays["judgement"]))
        judgement["evidence"] = {"rank": 30, "opg": True, "last_layer": False, "distance": None}
        np.savez(kept, **arrays | {"judgement": np.array(json.dumps(judgement))})
    path = tmp_path / "run" / "run.json"
    content = json.loads(path.read_text())
    del content["latest"], content["model"]["untrained"]
    content["aside"] = [list(content["predictions"])[-1]]
    path.write_text(json.dumps(content))
    found = Run.open(tmp_path / "run")
    assert found.load_fit().rank == 30
    assert found.latest().data.spec == str(workshop.folder / "test")


NET = """
import torch, warnings
from torch import nn

def net():
    for k in range(3):
        warnings.warn("mind\\nthe gap")
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))

def data():
    torch.manual_seed(1)
    return torch.randn(400, 4), torch.arange(400) % 3
"""


class TestLanguage:
    """The command line says things in its own words: options, judgements, foreign warnings."""

    def test_warnings_judgements_and_errors_name_options(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        Path("net.py").write_text(NET)
        layers = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)
        torch.save(nn.Sequential(*layers).state_dict(), "w.pt")

        def said(line, code=0):
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # as a process of its own has it
                assert main([*line.split(), "--quiet"]) == code
            return capsys.readouterr()

        fit = "fit --model net.py:net --weights w.pt --data net.py:data --out"
        text = said(f"{fit} run --l2 1e-4 --rank 20").err
        assert text.count("Expected weights near an optimum") == 1
        assert "--params last-layer" in text
        assert not re.search(r"params=|rank=|last_layer|\.py", text)
        assert text.splitlines().count("deltabars: warning: mind the gap") == 1
        for line in ("predict run --data net.py:data", "rank run"):
            assert re.search("^(meaningless|ranking only): ", said(line).out, re.MULTILINE)
            assert json.loads(said(f"{line} --json").out)["judgement"]["level"] in LEVELS[1:]
        error = said(f"{fit} new --l2 0.1 --rank 5 --tolerance 0.1", code=1).err
        assert "--rank auto" in error
        assert "rank=" not in error

    def test_no_name_is_taken_for_an_option(self):
        assert option("rank", "auto") == "rank='auto'"
        with on_command_line({"rank", "params", "dtype"}):
            assert option("rank", "auto") == "--rank auto"
            assert option("params", last_layer()) == "--params last-layer"
            assert option("dtype", torch.float64) == "--dtype float64"
            assert option("rank", None) == "no --rank"
            assert option("moderation", "auto") == "moderation='auto'"  # it has no such option
            mine = "rank: expected a number, got 'rank=3: expected params=x'."
            assert in_options(mine) == f"--{mine}"
            assert in_options("rank/5.pt: expected a file") == "rank/5.pt: expected a file"
