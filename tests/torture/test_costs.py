"""What checkpoints cost: the quickest of many fits with and without, by turns.

In seconds of a processor: other work on the machine does not count.
"""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import deltabars
from deltabars.errors import ConvergenceWarning, OptimumWarning, SpectrumWarning
from deltabars.fitting.checkpoints import CheckpointFolder

WAYS = {"without": None, "every minute": 60.0, "every step": 0.0}


def written() -> int:
    """Bytes that this process has written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def test_what_checkpoints_cost(seconds_left, first_seed, tmp_path):
    torch.manual_seed(first_seed)
    model = nn.Sequential(nn.Linear(400, 30), nn.Tanh(), nn.Linear(30, 10))
    data = torch.randn(300, 400), torch.randint(0, 10, (300,))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    size: dict[str, int] = {}
    while seconds_left() > 0 or not size:
        for way, interval in WAYS.items():
            folder = tmp_path / "kept"
            kept = None if interval is None else CheckpointFolder(folder, interval)
            before, began = written(), time.process_time()
            with warnings.catch_warnings():
                for kind in (OptimumWarning, SpectrumWarning, ConvergenceWarning):
                    warnings.simplefilter("ignore", kind)  # nobody trained it
                fit = deltabars.fit(
                    model, data, l2=0.01, estimator="hessian", rank=20, checkpoint=kept,
                    progress=False, memory_budget=1 << 30, max_products=200,
                )  # fmt: skip
            seconds[way].append(time.process_time() - began)
            size[way] = written() - before
            shutil.rmtree(folder, ignore_errors=True)
    pairs = fit.spectra["hessian"].vectors.nbytes
    plain = min(seconds["without"])
    told = ", ".join(
        f"{way} {min(seconds[way]) / plain - 1:+.1%} of the processor time and "
        f"{size[way] / pairs:.1f} times the eigenpairs written"
        for way in WAYS
        if way != "without"
    )
    print(
        f"\ncosts: {len(seconds['without'])} fits of {plain:.1f} s of a processor each way (P = "
        f"{fit.num_parameters:,}, {fit.rank} pairs of {pairs / 2**20:.0f} MiB, "
        f"{fit.diagnostics['hessian']['products']} products): {told}"
    )
    assert size["every minute"] < 1.5 * pairs + 100_000
