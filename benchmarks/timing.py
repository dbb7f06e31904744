"""Wall-clock seconds of computations, on a CPU or a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def stopwatch(function: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return what a function returns, and the seconds until the device has done all of it."""
    synchronise(device)
    started = time.perf_counter()
    result = function()
    synchronise(device)
    return result, time.perf_counter() - started


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    warm_ups: int = 1,
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each function, `repeats` times, in turns.

    Turns let a machine that slows down or speeds up do so for all of them alike.
    """
    for _ in range(warm_ups):
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(stopwatch(function, device)[1])
    return {name: tuple(found) for name, found in seconds.items()}


def synchronise(device: torch.device) -> None:
    """Wait for what was asked of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """B of cost = a·sizeᵇ, by least squares through the logarithms."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    ).slope
