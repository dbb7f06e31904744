"""Ranks of a process group, forked from the process of the tests, and a network that they fit."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deltabars
from deltabars.errors import DataWarning, LossWarning, OptimumWarning, SpectrumWarning
from deltabars.recipes.digits import train_to_convergence
from deltabars.runtime import distributed as watching
from tests.stopping import start

L2 = 0.02
CLASSES = 5
_EXAMPLES = 101  # which no number of ranks divides


@dataclass(frozen=True)
class Outcome:
    """How one rank has ended.

    Attributes:
        result: what its work returned; None where it failed.
        error: the kind and the text of what it raised; None where it did not.
        status: its exit status; below zero where it was killed.
        seconds: from its start to its end.
    """

    result: Any
    error: str | None
    status: int
    seconds: float


@dataclass(frozen=True)
class Launch:
    """Ranks that are at work."""

    pids: list[int]
    folder: Path

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send one of them a signal."""
        os.kill(self.pids[rank], number)

    def outcomes(self, within: float = 60.0) -> list[Outcome]:
        """How each has ended, when all have; those that are still there after so long fail."""
        began = time.monotonic()
        left, ended = dict(enumerate(self.pids)), {}
        while left and time.monotonic() - began < within:
            for rank, pid in list(left.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[rank] = os.waitstatus_to_exitcode(status)
                    del left[rank]
            time.sleep(0.01)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert not left, f"Still at work after {within} s: {sorted(left)}."
        return [self._outcome(rank, ended[rank]) for rank in range(len(self.pids))]

    def _outcome(self, rank: int, status: int) -> Outcome:
        path = self.folder / f"{rank}.pt"
        if not path.exists():
            return Outcome(None, None, status, 0.0)
        result, error, seconds = torch.load(path, weights_only=False)
        return Outcome(result, error, status, seconds)


def launched(
    count: int,
    work: Callable[[int], Any],
    folder: Path,
    timeout: float = 60.0,
    patience: float | None = None,
) -> Launch:
    """`work(rank)` on so many ranks, each a process of its own, without an agent over them.

    Args:
        folder: a new one, for what they return.
        timeout: seconds that a message may take.
        patience: seconds that a rank waits for a sign of another one, instead of half a minute.
    """
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def one(rank: int) -> None:
        began = time.monotonic()
        if patience is not None:
            watching._SILENCE = watching._ARRIVAL = patience
        said = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)  # torch's own library writes there
        result, error = None, None
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout),
        )
        try:
            result = work(rank)
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - began
        torch.save((result, error, seconds), folder / f"{rank}.new")
        os.replace(folder / f"{rank}.new", folder / f"{rank}.pt")
        if error is not None:
            os._exit(1)
        with suppress(RuntimeError):
            dist.barrier()  # the store ends with the first rank

    return Launch([start(lambda rank=rank: one(rank)) for rank in range(count)], folder)


def results(count: int, work: Callable[[int], Any], folder: Path, within: float = 100.0) -> list:
    """What `work(rank)` returns on each rank."""
    outcomes = launched(count, work, folder).outcomes(within)
    failed = [(outcome.error, outcome.status) for outcome in outcomes if outcome.status]
    assert not failed, f"{failed}\n{(folder / '0.log').read_text()}"
    return [outcome.result for outcome in outcomes]


@cache
def subject() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A trained network with ReLU units that no example switches on, and its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, CLASSES)).double()
        inputs = torch.randn(_EXAMPLES, 10, dtype=torch.float64)
        targets = (inputs[:, :3].sum(1).mul(2).round().long() % CLASSES).clamp(0, CLASSES - 1)
    inputs[:, 9] = 0.0  # an input that says nothing
    train_to_convergence(model, inputs, targets, L2, steps=200)
    with torch.no_grad():
        model[0].bias[5:11] = -100.0
    return model, (inputs, targets)


@cache
def regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A trained network with two real outputs, and its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        inputs = torch.randn(_EXAMPLES, 4, dtype=torch.float64)
        noise = 0.3 * torch.randn(_EXAMPLES, 2, dtype=torch.float64)
    targets = torch.stack([inputs.sum(1).sin(), inputs.prod(1)], 1) + noise
    loss = nn.functional.mse_loss
    train_to_convergence(model, inputs, targets, L2, steps=200, loss=loss)
    return model, (inputs, targets)


def fit(model: nn.Module, data: Any, **options: Any) -> deltabars.DeltaFit:
    """A fit without what it has to say of its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimumWarning)
        warnings.simplefilter("ignore", SpectrumWarning)
        warnings.simplefilter("ignore", LossWarning)
        warnings.simplefilter("ignore", DataWarning)
        return deltabars.fit(model, data, **{"l2": L2, "rank": 12, "progress": False, **options})
