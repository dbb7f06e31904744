"""Fits that are stopped: a problem whose eigenpairs take many steps, and processes to be killed."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deltabars
from deltabars.errors import StorageError
from deltabars.fitting.checkpoints import CheckpointFolder
from deltabars.storage import format as storage

L2 = 0.05
PARTS = ("values", "vectors", "residuals", "smallest", "smallest_residuals")
# Each way of finding eigenpairs; a small budget makes Lanczos restart.
WAYS: dict[str, dict[str, Any]] = {
    "lanczos": {"estimator": "hessian", "rank": 10},
    "restarted lanczos": {"estimator": "hessian", "rank": 10, "memory_budget": 600_000},
    "both ends": {"estimator": "hessian", "rank": 8, "smallest": 4},
    "block_krylov": {"estimator": "opg", "rank": 24},
    "ggn": {"estimator": "ggn", "rank": 24},
    "incremental": {"estimator": "opg", "rank": 10, "solver": "incremental", "batch_size": 6},
    "sandwich": {"estimator": "sandwich", "rank": 10},
    "auto": {"estimator": "opg", "rank": "auto", "tolerance": 0.02},
}
LONGER: dict[str, dict[str, Any]] = {
    "auto sandwich": {"estimator": "sandwich", "rank": "auto", "tolerance": 1.0},
}


@cache
def subject() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A network with more parameters than are formed as a matrix, and its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 10)).double()
        data = torch.randn(60, 12, dtype=torch.float64), torch.randint(0, 10, (60,))
    return model, data


def fit(folder: Path | None = None, seconds: float = 0.0, **options: Any) -> deltabars.DeltaFit:
    """A fit of the subject, which saves every step; its weights are random, which is no matter."""
    model, data = subject()
    options = {"l2": L2, "solver": "krylov", "progress": False, **options}
    kept = None if folder is None else CheckpointFolder(folder, seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deltabars.errors.OptimumWarning)
        warnings.simplefilter("ignore", deltabars.errors.SpectrumWarning)
        return deltabars.fit(
            options.pop("model", model), options.pop("data", data), checkpoint=kept, **options
        )


def differing(found: deltabars.DeltaFit, plain: deltabars.DeltaFit) -> list[str]:
    """What of two fits is not the same to the bit."""
    different = ["rank"] * (plain.diagnostics.get("rank") != found.diagnostics.get("rank"))
    for name, pairs in plain.spectra.items():
        other = found.spectra[name]
        same = {part: torch.equal(getattr(pairs, part), getattr(other, part)) for part in PARTS}
        different += [f"{name}.{part}" for part in PARTS if not same[part]]
        ours, theirs = ({**each.diagnostics[name], "seconds": 0} for each in (plain, found))
        different += [name] * (ours != theirs)
    return different


def start(work: Callable[[], object]) -> int:
    """A process that does something and ends; its id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def end(pid: int) -> int:
    """Wait for a process; its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_until_it_ends(
    folder: Path, chance: random.Random, steps: int, most: int, **options: Any
) -> tuple[int, int]:
    """Start a fit, kill it when it has saved up to so many states, and again until it ends.

    After `most` kills it is let live. Returns how often it was killed, and with a state on disk.
    """
    kills = with_state = 0
    while True:
        pid = start(lambda: fit(folder, **options))
        until = saved(folder) + chance.randint(0, steps)
        while kills >= most or saved(folder) < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert status == 0
                return kills, with_state
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.01))  # in the middle of a product as well as of a file
        os.kill(pid, signal.SIGKILL)
        assert end(pid) in (-signal.SIGKILL, 0)
        kills += 1
        with_state += saved(folder) > 0


def saved(folder: Path) -> int:
    """How many states a fit has saved in a folder."""
    total = 0
    for path in folder.glob("[a-z]*.safetensors"):
        with suppress(StorageError):
            total += int(storage.read_header(path)["number"])
    return total


def kill_after(folder: Path, states: int, **options: Any) -> None:
    """Kill a fit when it has saved so many states."""
    pid = start(lambda: fit(folder, **options))
    while saved(folder) < states:
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "The fit ended before that."
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    assert end(pid) == -signal.SIGKILL


@contextmanager
def full_disk(most: int = 2000) -> Iterator[None]:
    """No file may become longer than `most` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
