"""Peak memory of fits: of the device on CUDA, of a fresh process on a CPU.

Run as a program (`python -m benchmarks.peak REQUEST`) this is that fresh process.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

import deltabars
from benchmarks.context import release
from benchmarks.plain import Data
from benchmarks.subject import train_briefly, wide_network
from benchmarks.timing import stopwatch
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.errors import DeltaBarsError
from deltabars.problem.problem import Problem
from deltabars.recipes.paper import L2

T = TypeVar("T")

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_LEAST = torch.finfo(torch.float32).eps  # no pair converges to that
_OPERATORS = {"hessian": HessianOperator, "opg": OPGOperator}


@dataclass(frozen=True)
class Case:
    """A fit of the dense network of one hidden layer.

    Attributes:
        max_products: stop there; None to go on until the pairs have converged.
        training_steps: 0 where only the size of things matters.
    """

    estimator: str
    width: int
    images: int
    rank: int
    max_products: int | None = None
    training_steps: int = 0


@dataclass(frozen=True)
class Peak:
    """Bytes that a fit takes at its peak, beyond model and data.

    Attributes:
        parameters: P.
        peak: of the fit.
        cached: of which the operator holds after its first product: its Jacobian or graph.
        jacobian: what all N gradients take, N·P numbers.
        vectors: what K eigenvectors take, K·P numbers.
        products: that the fit needed.
    """

    parameters: int
    peak: int
    cached: int
    jacobian: int
    vectors: int
    products: int

    @property
    def beyond_cache(self) -> float:
        """The peak without what is cached, in units of K·P numbers."""
        return (self.peak - self.cached) / self.vectors


class Meter(Protocol):
    """Bytes in use now, and the most since the last reset."""

    def held(self) -> int:
        """In use now."""

    def reset(self) -> None:
        """Forget the peak."""

    def peak(self) -> int:
        """Return the most since then."""


class ProcessMeter:
    """The resident memory of the own process, as Linux counts it."""

    @staticmethod
    def works() -> bool:
        """Whether the platform tells, and lets the peak be reset."""
        try:
            _CLEAR.write_text("5")
            return read_status("VmHWM") > 0
        except (OSError, KeyError):
            return False

    def held(self) -> int:
        """VmRSS."""
        return read_status("VmRSS")

    def reset(self) -> None:
        """Set VmHWM back to VmRSS."""
        _CLEAR.write_text("5")

    def peak(self) -> int:
        """VmHWM."""
        return read_status("VmHWM")


class DeviceMeter:
    """What torch has allocated on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        """Allocated now."""
        return torch.cuda.memory_allocated(self._device)

    def reset(self) -> None:
        """Forget the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Return the most that was allocated."""
        return torch.cuda.max_memory_allocated(self._device)


def with_peak(device: torch.device, function: Callable[[], T]) -> tuple[T, float, int | None]:
    """Return what a function returns, its seconds, and its peak in bytes beyond what was held."""
    release(device)
    meter = find_meter(device)
    if meter is None:
        return *stopwatch(function, device), None
    meter.reset()
    before = meter.held()
    result, seconds = stopwatch(function, device)
    return result, seconds, meter.peak() - before


def read_status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    fields = dict(line.partition(":")[::2] for line in _STATUS.read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def find_meter(device: torch.device) -> Meter | None:
    """Return a meter of the bytes of a device or of this process, or None if there is none."""
    if device.type == "cuda":
        return DeviceMeter(device)
    return ProcessMeter() if ProcessMeter.works() else None


def measure_peaks(cases: list[Case], data: Data) -> list[Peak] | None:
    """Return the peaks of fits on the first images of `data`, or None if they are unknown."""
    device = data[0].device
    meter = find_meter(device)
    if meter is None:
        return None
    if device.type == "cuda":
        return [_measure(case, data, meter) for case in cases]
    return _in_fresh_process(cases, data)


def _in_fresh_process(cases: list[Case], data: Data) -> list[Peak]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.pt"
        torch.save(data, path)
        request = {
            "data": str(path),
            "threads": torch.get_num_threads(),
            "cases": [dataclasses.asdict(case) for case in cases],
        }
        # Every larger block goes back to the system when it is freed: the C library else keeps
        # some, and they would count as held.
        clean = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.peak", json.dumps(request)],
            capture_output=True,
            text=True,
            env=os.environ | clean,
        )
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:]
        raise DeltaBarsError(f"Memory: expected a process that measures it, got {reason}.")
    return [Peak(**found) for found in json.loads(done.stdout)]


def _measure(case: Case, data: Data, meter: Meter) -> Peak:
    images, labels = data[0][: case.images], data[1][: case.images]
    model = wide_network(case.width).to(images.device)
    if case.training_steps:
        train_briefly(model, (images, labels), case.training_steps)
    limited_fit(
        dataclasses.replace(case, rank=2, max_products=4), model, (images[:16], labels[:16])
    )
    cached = _held_by_operator(case, model, (images, labels), meter)
    gc.collect()
    meter.reset()
    before = meter.held()
    fit = limited_fit(case, model, (images, labels))
    peak = meter.peak() - before
    pairs = fit.spectra[case.estimator]
    row = fit.num_parameters * pairs.vectors.element_size()
    products = int(pairs.statistics["products"])
    vectors = case.rank * row
    return Peak(fit.num_parameters, peak, cached, case.images * row, vectors, products)


def _held_by_operator(case: Case, model: torch.nn.Module, data: Data, meter: Meter) -> int:
    problem = Problem(model, data, l2=L2)
    gc.collect()
    before = meter.held()
    operator = _OPERATORS[case.estimator](problem)
    operator.matmat(torch.ones(1, operator.shape[0], device=operator.device))
    gc.collect()
    return max(0, meter.held() - before)


def limited_fit(case: Case, model: torch.nn.Module, data: Data) -> deltabars.DeltaFit:
    """Return a Krylov fit, with exactly as many products as the case says where it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that are hardly trained, and of the limit
        return deltabars.fit(
            model,
            data,
            l2=L2,
            estimator=case.estimator,
            rank=case.rank,
            solver="krylov",  # small points would else be solved densely
            max_products=case.max_products,
            residual_tolerance=None if case.max_products is None else _LEAST,  # use them all
            progress=False,
        )


def main(request: str) -> None:
    """Measure the cases of a request, and print the peaks as JSON."""
    gc.freeze()  # or every collection walks through all that was imported
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    data = torch.load(asked["data"], weights_only=True)
    peaks = [_measure(Case(**case), data, ProcessMeter()) for case in asked["cases"]]
    print(json.dumps([dataclasses.asdict(peak) for peak in peaks]))


if __name__ == "__main__":
    main(sys.argv[1])
