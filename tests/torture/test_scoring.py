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

from deltabars.cli.entry import main
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
                wait(place, chance)
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


def wait(place, chance):
    """Some time from the start on, or until some blocks are there and a little longer."""
    if chance.random() < 0.4:
        time.sleep(chance.uniform(0, 1.2))
        return
    until, latest = blocks(place) + chance.randint(1, 3), time.monotonic() + 2
    while blocks(place) < until and time.monotonic() < latest:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02))


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
    """Its agent, whose processes may live on for a while, one of the processes, or all of them."""
    total: Counter[str] = Counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "-m", "deltabars"]
    while seconds_left() > 0:
        seed = first_seed + total["folders"]
        chance = random.Random(seed)
        count, arguments = a_case(chance, workshop.run)
        kills = 0
        while True:
            processes = f"--nproc-per-node={chance.choice([1, 2, 4])}"
            program = subprocess.Popen(
                [*run[:3], processes, *run[3:], *arguments, "--out", "out/"],
                env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            total["launches"] += 1
            until = blocks(place) + chance.randint(1, 3) if kills < 4 else None
            while program.poll() is None and (until is None or blocks(place) < until):
                time.sleep(0.005)
            if program.poll() is None:
                total["amid"] += is_amid(place / "out")
                victims = [program.pid, *children(program.pid)]
                for pid in chance.choice([victims, victims[:1], victims[-1:]]):
                    os.kill(pid, signal.SIGKILL)
                kills += 1
            said = program.communicate()[1]
            if program.returncode == 0:
                break
            assert kills or "is using" in said, (seed, said)
        rows = rows_of(place / "out")
        assert times_each(rows, count) == {1}, seed
        total += Counter(folders=1, inputs=count, kills=kills)
        shutil.rmtree("out")
    print(f"\nscoring under torchrun: {dict(total)}, each input once")


def blocks(place):
    """How many blocks are there."""
    return len(list((place / "out").glob("inputs-*")))


def children(pid):
    """The processes that a process has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]
