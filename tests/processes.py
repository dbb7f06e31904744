"""Fits on several processes: how to launch them, what they fit, and in how many ways."""

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deltabars
from deltabars.errors import (
    DataWarning,
    EvidenceWarning,
    IntervalWarning,
    LossWarning,
    OptimumWarning,
    SpectrumWarning,
)
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.recipes.digits import train_to_convergence
from tests.networks import make_case
from tests.stopping import start

L2 = 0.02
CLASSES = 5
EXAMPLES = 101  # which no number of processes divides


class Outcome(NamedTuple):
    """What the work of a process returned, or what it raised, and the process's exit status."""

    result: Any
    error: str | None
    status: int


@dataclass(frozen=True)
class Launch:
    """Processes that are at work."""

    pids: list[int]
    folder: Path

    def outcomes(self, within: float = 60.0) -> list[Outcome]:
        """Return how each has ended, when all have; fail if one is still there after so long."""
        until, ended = time.monotonic() + within, []
        for process, pid in enumerate(self.pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            while not done and time.monotonic() < until:
                time.sleep(0.01)
                done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                for other in self.pids[process:]:
                    os.kill(other, signal.SIGKILL)
                raise AssertionError(f"Process {process} is still at work after {within} s.")
            path = self.folder / f"{process}.pt"
            said = torch.load(path, weights_only=False) if path.exists() else (None, None)
            ended.append(Outcome(*said, os.waitstatus_to_exitcode(status)))
        return ended


def launched(count: int, work: Callable[[int], Any], folder: Path, timeout: float = 60.0) -> Launch:
    """Start `work(process)` in so many forked processes of one group.

    Args:
        folder: a new one, for what they return.
        timeout: seconds that a collective may take.
    """
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def one(process: int) -> None:
        log = os.open(folder / f"{process}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)  # torch's own library writes there
        result, error, limit = None, None, timedelta(seconds=timeout)
        dist.init_process_group("gloo", address, limit, rank=process, world_size=count)
        try:
            result = work(process)
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        torch.save((result, error), folder / f"{process}.new")
        os.replace(folder / f"{process}.new", folder / f"{process}.pt")
        if error is not None:
            os._exit(1)
        with suppress(RuntimeError):
            dist.barrier()  # the store ends with the first process

    return Launch([start(lambda k=k: one(k)) for k in range(count)], folder)


def results(count: int, work: Callable[[int], Any], folder: Path, within: float = 100.0) -> list:
    """Return what `work(process)` returns in each process."""
    outcomes = launched(count, work, folder).outcomes(within)
    failed = [(outcome.error, outcome.status) for outcome in outcomes if outcome.status]
    assert not failed, f"{failed}\n{(folder / '0.log').read_text()}"
    return [outcome.result for outcome in outcomes]


@cache
def subject() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a trained network with ReLU units that no example switches on, and its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, CLASSES)).double()
        inputs = torch.randn(EXAMPLES, 10, dtype=torch.float64)
        targets = (inputs[:, :3].sum(1).mul(2).round().long() % CLASSES).clamp(0, CLASSES - 1)
    inputs[:, 9] = 0.0  # an input that says nothing
    train_to_convergence(model, inputs, targets, L2, steps=200)
    with torch.no_grad():
        model[0].bias[5:11] = -100.0
    return model, (inputs, targets)


@cache
def regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a trained network with real outputs, and its data."""
    case = make_case("dense", EXAMPLES, likelihood="gaussian")
    return case.model, case.data


def repeated() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a linear network whose GGN has each eigenvalue many times, and its data."""
    model = nn.Linear(8, 6, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    inputs = torch.eye(8, dtype=torch.float64).repeat_interleave(3, 0) * 2
    return model, (inputs, torch.arange(24) % 6)


def fit(model: nn.Module, data: Any, **options: Any) -> deltabars.DeltaFit:
    """Fit without the warnings about weights and data."""
    with warnings.catch_warnings():
        for category in (
            OptimumWarning, SpectrumWarning, LossWarning, DataWarning, EvidenceWarning,
            IntervalWarning,
        ):  # fmt: skip
            warnings.simplefilter("ignore", category)
        return deltabars.fit(model, data, **{"l2": L2, "rank": 12, "progress": False, **options})


_SINGLE = {"dtype": torch.float32}
_LOSS = nn.CrossEntropyLoss(
    weight=torch.linspace(0.2, 3.0, CLASSES, dtype=torch.float64), label_smoothing=0.1
)
# The options of fit, by the name of the case; `subject` and `vectors` are for `case`.
CASES: dict[str, dict[str, Any]] = {
    "opg krylov": {"estimator": "opg", "solver": "krylov"},
    "ggn incremental": {"estimator": "ggn", "solver": "incremental", "batch_size": 36, "rank": 60},
    "sandwich krylov, single": {"estimator": "sandwich", "solver": "krylov", **_SINGLE},
    "auto": {"estimator": "opg", "solver": "krylov", "rank": "auto", "tolerance": 0.2},
    "hessian dense": {"estimator": "hessian", "solver": "dense"},
    "sandwich arpack": {"estimator": "sandwich", "solver": "arpack"},
    "both ends": {"estimator": "hessian", "solver": "krylov", "smallest": 5},
    "patterns and weights": {"estimator": "sandwich", "solver": "krylov", "likelihood": _LOSS,
                             "l2": {"*": 0.02, "*.bias": 1e-3}},
    "last layer": {"estimator": "sandwich", "params": deltabars.last_layer()},
    "restarts": {"estimator": "hessian", "solver": "krylov", "rank": 8, "vectors": 24},
    "restarted blocks": {"estimator": "opg", "solver": "krylov", "rank": 20, "vectors": 36},
    "more pairs than are reached": {"estimator": "opg", "solver": "krylov", "rank": 500},
    "regression": {"estimator": "sandwich", "solver": "krylov", "subject": regression,
                   "likelihood": Gaussian(noise="estimate")},
    "repeated eigenvalues": {"estimator": "ggn", "solver": "krylov", "subject": repeated,
                             "rank": 40},
}  # fmt: skip


def case(name: str, count: int) -> dict[str, Any]:
    """Return what comes of one of the cases in this process, one of `count`."""
    options = dict(CASES[name])
    model, data = options.pop("subject", subject)()
    vectors = options.pop("vectors", None)
    if vectors is not None:  # a budget whose share for the basis has room for so many
        size = sum(weight.numel() for weight in model.parameters())
        options["memory_budget"] = 4 * vectors * 8 * -(-size // count)
    if "batch_size" in options:
        options["batch_size"] = -(-options["batch_size"] // count)
    found = fit(model, data, **options)
    predicted = found.predict(data[0][:17].to(found.network.dtype), moderation=None)
    return {
        "values": {name: pairs.values for name, pairs in found.spectra.items()},
        "smallest": {name: pairs.smallest for name, pairs in found.spectra.items()},
        "std": predicted.std,
        "high": predicted.std_high,
        "score": predicted.score,
        "examples": found.num_examples,
        "cost": found.diagnostics["cost"],
        "fingerprint": found.diagnostics["data_fingerprint"],
        "reached": found.diagnostics["parameters_reached"],
        "noise": found.noise,
        "restarts": {name: found.diagnostics[name].get("restarts") for name in found.spectra},
    }
