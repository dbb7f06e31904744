"""Fits of one to four ranks: all kinds, their memory, and one rank killed at a random moment."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import stopping
from tests.launches import ROOT
from tests.ranked import launched, results
from tests.ranked_cases import CASES, DATA
from tests.runtime.test_distributed import check_same, check_same_data, work
from tests.runtime.test_distributed_failures import PATIENCE, WAYS, work_with
from tests.runtime.test_distributed_results import memory_of

PROGRAM = """\
import sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
from tests import stopping
dist.init_process_group("gloo")
found = stopping.fit(sys.argv[1], estimator="sandwich", rank=10)
if dist.get_rank() == 0:
    torch.save(found.spectra["hessian"].values, sys.argv[2])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("count", [2, 3, 4])
def test_everything_on_ranks(tmp_path, count):
    found = results(count, work(CASES, DATA, count), tmp_path / "ranks", within=600.0)
    off = {name: check_same(name, [cases[name] for cases, _ in found]) for name in CASES}
    for kind, names in {
        "float64": [name for name in CASES if "single" not in name],
        "float32": [name for name in CASES if "single" in name],
    }.items():
        values, bars = (max(off[name][part] for name in names) for part in (0, 1))
        print(f"\n{count} ranks, {len(names)} fits in {kind}: eigenvalues {values:.1e}", end="")
        print(f", predictions {bars:.1e}")
    for kind in DATA:
        check_same_data(kind, [kinds[kind] for _, kinds in found])


def test_under_torchrun(tmp_path):
    """A program of one's own: its agent names the rank that was killed; the next launch goes on."""
    program, folder, out = (tmp_path / name for name in ("program.py", "kept", "values.pt"))
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(program), str(folder), str(out)]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    running = subprocess.Popen(
        command, env=os.environ | paths, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    while not any(folder.glob("state-*")) or stopping._newest(folder) < 8:
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.002)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, said = running.communicate(timeout=90)
    assert running.returncode == 1
    assert re.search(r"rank +: 1 ", said), said
    began = stopping._newest(folder)
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain = stopping.fit(tmp_path / "plain", estimator="sandwich", rank=10)
    assert stopping._newest(folder) - began < stopping._newest(tmp_path / "plain") - 3
    torch.testing.assert_close(torch.load(out), plain.spectra["hessian"].values, rtol=1e-6, atol=0)


def test_killed_at_any_moment(tmp_path, seconds_left, first_seed):
    chance = random.Random(first_seed)
    expected = {way: work_with(None, **options)(0) for way, options in WAYS.items()}
    fits = kills = worst = 0
    while not fits or seconds_left() > 0:
        way = chance.choice(list(WAYS))
        folder, fixed = tmp_path / f"kept {fits}", chance.randint(2, 4)
        for attempt in range(100):
            # Rows that come in another order cannot be told from other rows.
            count = fixed if way == "incremental" else chance.randint(1, 4)
            where = tmp_path / f"{fits}-{attempt}"
            launch = launched(count, work_with(folder, **WAYS[way]), where, patience=PATIENCE)
            until = (stopping._newest(folder) if folder.exists() else 0) + chance.randint(0, 25)
            victim = chance.randrange(count)
            while attempt > 5 or stopping._newest(folder) < until:
                if os.waitid(os.P_PID, launch.pids[victim], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break
                time.sleep(0.001)
            else:
                time.sleep(chance.uniform(0, 0.02))
                launch.kill(victim)
                kills += 1
            outcomes = launch.outcomes(120.0)
            if all(outcome.status == 0 for outcome in outcomes):
                break
            for rank, outcome in enumerate(outcomes):
                if rank != victim and outcome.status:
                    assert f"rank {victim}" in (outcome.error or ""), outcome
        values, std, _ = expected[way]
        for found, predicted, _ in (outcome.result for outcome in outcomes):
            worst = max(
                worst,
                *(float((found[name] / values[name] - 1).abs().max()) for name in values),
            )
            torch.testing.assert_close(predicted, std, rtol=1e-5, atol=0)
        assert worst < 1e-6
        fits += 1
    print(f"{fits} fits, {kills} kills, worst relative error of an eigenvalue {worst:.1e}")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_memory_falls_with_the_ranks(tmp_path):
    found = memory_of((1, 2, 4), tmp_path)
    most = {count: (round(peak / 1e6), kept / 1e6) for count, (peak, kept) in found.items()}
    print(f"\nmegabytes of a rank, at the most and of eigenvectors: {most}")
    peaks = [peak for peak, _ in found.values()]
    assert peaks[2] < 0.65 * peaks[0]
    assert found[4][1] <= found[1][1] / 4 + 40 * 4
