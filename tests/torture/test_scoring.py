"""Predictions to a folder whose processes are killed again and again: each input is there once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from deltabars.cli import main
from tests.launches import DATA, ROOT, ended, launch, rows_of, times_each

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
    data = chance.choice(["Made", "Stream", "loader"])
    return count, [
        "predict", str(run), "--data", f"data.py:{data}", "--data-args", json.dumps(options),
        "--block-size", str(chance.randint(1, 30)), "--device", "cpu", "--quiet", "--json",
        "--rank-timeout", "10",
    ]  # fmt: skip


def test_kills_of_ranks(seconds_left, first_seed, workshop, place):
    """Some or all of one to four processes; the next launch may not wait for those that live."""
    total: Counter[str] = Counter()
    while seconds_left() > 0:
        seed = first_seed + total["folders"]
        chance = random.Random(seed)
        count, arguments = a_case(chance, workshop.run)
        assert main([*arguments, "--out", "once/"]) == 0
        left_over: list[int] = []
        while True:
            processes = chance.randint(1, 4)
            pids = launch(processes, [*arguments, "--out", "out/"], place / "said")
            total["launches"] += 1
            if chance.random() < 0.15 or total["in a row"] > 12:
                if ended(pids) == [0] * processes:
                    break
                assert left_over, (seed, (place / "said.0").read_text())  # they hold it up
            else:
                time.sleep(chance.uniform(0, 1.2))
                total["amid"] += is_amid(place / "out")
                victims = chance.sample(pids, chance.randint(1, processes))
                for pid in victims:
                    os.kill(pid, chance.choice(SIGNALS))
                total["kills"] += len(victims)
                total["in a row"] += 1
            if chance.random() < 0.7:
                ended([pid for pid in pids + left_over if alive(pid)])
                left_over = []
            else:
                left_over += pids
        total["in a row"] = 0
        ended([pid for pid in left_over if alive(pid)])
        rows = rows_of(place / "out")
        assert times_each(rows, count) == {1}, seed
        assert rows == rows_of(place / "once"), seed
        assert (place / "out" / "_manifest.json").exists()
        total["folders"] += 1
        total["inputs"] += count
        shutil.rmtree("out")
        shutil.rmtree("once")
    del total["in a row"]
    print(f"\nscoring: {dict(total)}, each input once, 0 rows that differ in a bit")


def is_amid(folder):
    """Whether some blocks are there, and not all."""
    return any(folder.glob("inputs-*")) and not (folder / "_manifest.json").exists()


def alive(pid):
    """Whether a process of ours has still to be waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_kills_under_torchrun(seconds_left, first_seed, workshop, place):
    """Whole launches of two and four processes, with an agent, killed as one group."""
    total: Counter[str] = Counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    while seconds_left() > 0:
        seed = first_seed + total["folders"]
        chance = random.Random(seed)
        count, arguments = a_case(chance, workshop.run)
        while True:
            run = [sys.executable, "-m", "torch.distributed.run", "-m", "deltabars"]
            run.insert(3, f"--nproc-per-node={chance.choice([1, 2, 4])}")
            program = subprocess.Popen(
                [*run, *arguments, "--out", "out/"], env=environment, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
            try:
                said = program.communicate(timeout=chance.uniform(4, 30))[1]
                assert program.returncode == 0, (seed, said.decode())
                break
            except subprocess.TimeoutExpired:
                total["amid"] += is_amid(place / "out")
                os.killpg(program.pid, signal.SIGKILL)
                program.communicate()
                total["kills"] += 1
        rows = rows_of(place / "out")
        assert times_each(rows, count) == {1}, seed
        total["folders"] += 1
        total["inputs"] += count
        shutil.rmtree("out")
    print(f"\nscoring under torchrun: {dict(total)}, each input once")
