"""The command line says things in its own words: options, judgements, foreign warnings."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from torch import nn

from deltabars.cli.entry import main
from deltabars.errors import BadValueError, in_options, on_command_line, option
from deltabars.prediction.prediction import LEVELS
from deltabars.problem.parameters import last_layer

MODEL = """
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
FIT = "fit --model net.py:net --weights w.pt --data net.py:data --quiet --out"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    torch.manual_seed(0)
    torch.save(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)).state_dict(), "w.pt"
    )

    def start(line, code=0):
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # as a process of its own has it
            assert main(line.split()) == code
        return capsys.readouterr()

    return start


def test_warnings_and_judgements_name_options(run):
    said = run(f"{FIT} run --l2 1e-4 --rank 20").err
    assert said.count("Expected weights near an optimum") == 1
    assert "--params last-layer" in said
    assert not re.search(r"params=|rank=|last_layer|\.py", said)
    assert said.splitlines().count("deltabars: warning: mind the gap") == 1
    assert "last-layer" not in run(f"{FIT} last --params last-layer --l2 1e-4 --rank 9").err
    for line in ("predict run --data net.py:data --quiet", "rank run --quiet"):
        assert re.search("^(meaningless|ranking only): ", run(line).out, re.MULTILINE)
        told = json.loads(run(f"{line} --json").out)
        assert told["judgement"]["level"] in LEVELS[1:]
    assert {"saturated", "impossible"} <= set(told["rows"][0])


def test_errors_name_options_as_the_command_line_has_them(run):
    assert "--l2: expected" in run(f"{FIT} run --l2 -1", code=1).err
    said = run(f"{FIT} run --l2 0.1 --rank 5 --tolerance 0.1", code=1).err
    assert "--rank auto" in said
    assert "rank=" not in said


def test_the_language_is_that_of_the_caller_and_no_name_is_taken_for_an_option():
    assert option("rank", "auto") == "rank='auto'"
    assert option("params", last_layer()) == "params=last_layer()"
    with on_command_line({"rank", "params", "dtype", "memory_budget"}):
        assert option("rank", "auto") == "--rank auto"
        assert option("params", last_layer()) == "--params last-layer"
        assert option("dtype", torch.float64) == "--dtype float64"
        assert option("memory_budget=") == "--memory-budget"
        assert option("rank", None) == "no --rank"
        assert option("moderation", "auto") == "moderation='auto'"  # it has no such option
        mine = "rank: expected a number, got 'rank=3: expected params=x'."
        assert in_options(mine) == f"--{mine}"
        assert in_options("rank/5.pt: expected a file") == "rank/5.pt: expected a file"
        with pytest.raises(BadValueError, match=r"got '--l2: params=x'"):
            raise BadValueError("l2: expected a number, got '--l2: params=x'.")
    assert option("rank", "auto") == "rank='auto'"
