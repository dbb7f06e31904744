"""Fits of two to four processes: killed at random moments, and under torchrun."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests import stopping
from tests.processes import launched

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("lanczos", "block_krylov", "sandwich")
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


def test_killed_at_any_moment(tmp_path, seconds_left, first_seed):
    chance, fits, kills, worst = random.Random(first_seed), 0, 0, 0.0
    expected = {way: stopping.fit(**stopping.WAYS[way]).spectra for way in WAYS}
    while not fits or seconds_left() > 0:
        way, count = chance.choice(WAYS), chance.randint(2, 4)
        folder = tmp_path / f"kept {fits}"

        def work(process, folder=folder, way=way):
            found = stopping.fit(folder, **stopping.WAYS[way])
            return {name: pairs.values for name, pairs in found.spectra.items()}

        for attempt in range(8):
            launch = launched(count, work, tmp_path / f"{fits}-{attempt}")
            victim, waits = chance.randrange(count), chance.uniform(0, 3)
            began = time.monotonic()
            is_over = False
            while attempt < 7 and not is_over and time.monotonic() - began < waits:
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                is_over = os.waitid(os.P_PID, launch.pids[victim], flags) is not None
                time.sleep(0.001)
            if attempt < 7 and not is_over:
                os.kill(launch.pids[victim], signal.SIGKILL)
                kills += 1
            outcomes = launch.outcomes(120.0)
            if all(outcome.status == 0 for outcome in outcomes):
                break
            others = [outcome for k, outcome in enumerate(outcomes) if k != victim]
            assert all((each.error or "ProcessError").startswith("ProcessError") for each in others)
        for outcome in outcomes:
            for name, values in outcome.result.items():
                off = (values / expected[way][name].values - 1).abs().max()
                worst = max(worst, float(off))
        assert worst < 1e-6
        fits += 1
    print(f"\n{fits} fits, {kills} kills, worst relative error of an eigenvalue {worst:.1e}")


def test_under_torchrun(tmp_path):
    """A program under the launcher, which names the process that was killed; then once more."""
    program, folder, out = (tmp_path / name for name in ("program.py", "kept", "values.pt"))
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(program), str(folder), str(out)]
    options = {"env": os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, "cwd": tmp_path}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)
    while not any(folder.glob("*.safetensors")):
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.002)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, said = running.communicate(timeout=90)
    assert running.returncode == 1
    assert re.search(r"rank +: 1 ", said), said
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    values = stopping.fit(estimator="sandwich", rank=10).spectra["hessian"].values
    torch.testing.assert_close(torch.load(out), values, rtol=1e-6, atol=0)
