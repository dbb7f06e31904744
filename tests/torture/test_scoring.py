"""Predictions to a folder whose processes are killed again and again: each input is there once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest

from deltabars.cli.entry import main
from tests.launches import DATA, ended, launch, rows_of, times_each

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.py").write_text(DATA)
    return tmp_path


def a_case(chance, run):
    """The arguments of `predict` but for --out, and how many inputs there are."""
    count = chance.randint(1, 120)
    options = {"count": count, "pause": chance.choice([0.002, 0.01, 0.03])}
    return count, [
        "predict", str(run), "--data", f"data.py:{chance.choice(['Made', 'loader'])}",
        "--data-args", json.dumps(options), "--block-size", str(chance.randint(1, 30)),
        "--device", "cpu", "--quiet", "--json", "--rank-timeout", "10",
    ]  # fmt: skip


def test_kills(seeds, workshop, place):
    """Some or all of one to four processes; then the same command, until it ends by itself."""
    total: Counter[str] = Counter()
    for seed in seeds:
        chance = random.Random(seed)
        count, arguments = a_case(chance, workshop.run)
        assert main([*arguments, "--out", "once/"]) == 0
        for kills in range(100):
            processes = chance.randint(1, 4)
            pids = launch(processes, [*arguments, "--out", "out/"], place / "said")
            total["launches"] += 1
            if kills > 6 or chance.random() < 0.15:
                assert ended(pids) == [0] * processes, (seed, (place / "said.0").read_text())
                break
            until, latest = blocks(place) + chance.randint(0, 3), time.monotonic() + 2
            while blocks(place) < until and time.monotonic() < latest:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.02))
            for pid in chance.sample(pids, chance.randint(1, processes)):
                with suppress(ProcessLookupError):
                    os.kill(pid, chance.choice(SIGNALS))
                total["kills"] += 1
            ended(pids)
        rows = rows_of(place / "out")
        assert times_each(rows, count) == {1}, seed
        assert rows == rows_of(place / "once"), seed
        assert (place / "out" / "_manifest.json").exists()
        total += Counter(folders=1, inputs=count)
        shutil.rmtree("out")
        shutil.rmtree("once")
    print(f"\nscoring: {dict(total)}, each input once, 0 rows that differ in a bit")


def blocks(place):
    """How many blocks are there."""
    return len(list((place / "out").glob("inputs-*")))
