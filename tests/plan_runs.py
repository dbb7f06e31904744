"""The runs on a CPU that the plan of docs/scale.md is held to: `python -m tests.plan_runs`."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranked import fit, results

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from plan_tables import ON_CORES

_INPUTS, _CLASSES = 64, 10


def measured(kind: str, size: int, examples: int, rank: int, count: int, keeps: bool) -> Any:
    """Seconds of CPU of the first of so many ranks, and what it counted."""
    torch.set_num_threads(1)
    # w² + 76w + 10 parameters
    width = round(math.sqrt(size - _CLASSES + 38**2) - 38)
    torch.manual_seed(0)
    layers = [nn.Linear(_INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, _CLASSES))
    data = torch.randn(examples, _INPUTS), torch.randint(0, _CLASSES, (examples,))
    options: dict[str, Any] = {"rank": rank, "estimator": kind, "l2": 0.01, "solver": "krylov"}
    if not keeps:
        options["memory_budget"] = 4 * size * examples // count

    def work(_: int) -> Any:
        began = time.process_time()
        found = fit(model, data, residual_tolerance=1e-4, **options).diagnostics
        seconds = time.process_time() - began
        sent = found.get("ranks", {"messages": 0, "bytes": 0})
        return seconds, found[kind]["products"], sent["messages"], sent["bytes"]

    if count == 1:
        return work(0)
    with tempfile.TemporaryDirectory() as folder:
        return results(count, work, Path(folder) / "ranks", within=600)[0]


if __name__ == "__main__":
    for kind, size, examples, rank, count, _, keeps, _ in ON_CORES:
        seconds, products, messages, sent = measured(kind, size, examples, rank, count, keeps)
        print(
            f"{kind}, P = {size:,}, N = {examples:,}, K = {rank}, R = {count}: {seconds:.2f} s, "
            f"{products} products, {messages} messages, {sent / 1e6:.1f} MB",
            flush=True,
        )
