"""Run works one after the other, print what they find, and write it as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import deltabars
from benchmarks import table
from benchmarks.architectures import run_architectures
from benchmarks.context import Bench, release
from benchmarks.floor import run_floor, run_product
from benchmarks.growth import run_growth
from benchmarks.hessian import run_hessian, run_hessian1500
from benchmarks.memory import run_memory
from benchmarks.opg import run_opg
from benchmarks.predict import run_predict
from benchmarks.published import run_published
from benchmarks.results import Record
from benchmarks.sizes import Size
from benchmarks.sources import Sources, Spectra
from deltabars.errors import BadValueError

WORKS: dict[str, Callable[[Bench], Record]] = {
    "floor": run_floor,
    "product": run_product,
    "hessian": run_hessian,
    "hessian1500": run_hessian1500,
    "opg": run_opg,
    "predict": run_predict,
    "growth": run_growth,
    "memory": run_memory,
    "architectures": run_architectures,
    "published": run_published,
}


def run_bench(
    size: Size,
    sources: Sources,
    works: Sequence[str] | None = None,
    *,
    show: Callable[[str], None] = print,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure every work, or the named ones in the order of the table.

    Args:
        size: how large the works are.
        sources: files to read and a folder to keep eigenpairs in.
        works: names of `WORKS`; all that the size has by default.
        show: called with the table, part by part as it is found.
        say: called with lines on what is being done.

    Returns:
        The environment, the size, and a record a work, as JSON has them.

    Raises:
        BadValueError: there is no such device, or an unknown work is named.
    """
    chosen = _chosen(size, works)
    if size.device == "cuda" and not torch.cuda.is_available():
        raise BadValueError(
            "--gpu: expected a CUDA device that torch can use, got none. Leave it out for the "
            "small size."
        )
    for option, folder in (("--cache", sources.cache), ("--cifar10", sources.cifar10)):
        if folder is not None and not folder.is_dir():
            raise BadValueError(f"{option}: expected a folder that exists, got {folder}.")
    bench = Bench(size, sources, Spectra(sources.cache), say)
    started = time.perf_counter()
    records = []
    show(table.head())
    for name in chosen:
        say(name)
        records.append(_timed(WORKS[name], bench))
        show(table.section(records[-1]))
    elapsed = time.perf_counter() - started
    environment = describe_environment(bench)
    environment["seconds by work"] = ", ".join(f"{it.work} {it.elapsed:.0f}" for it in records)
    environment["seconds in all"] = round(elapsed, 1)
    show(f"\n{table.foot(environment)}")
    return {
        "environment": environment,
        "size": dataclasses.asdict(size),
        "records": [record.to_json() for record in records],
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report.

    Raises:
        BadValueError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise BadValueError(
            f"--json: expected a file that can be written, got {path}: {error}."
        ) from error


def describe_environment(bench: Bench) -> dict[str, Any]:
    """Device, versions, sizes and threads."""
    device, size = bench.device, bench.size
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "deltabars": deltabars.__version__,
        "python": platform.python_version(),
        "network and images": bench.subject.source,
        "training accuracy": round(bench.subject.accuracy, 4),
        "P": sum(weight.numel() for weight in bench.subject.model.parameters()),
        "N": f"{size.hessian_images} (hessian), {size.opg_images} (opg)",
        "K": f"{', '.join(map(str, size.hessian_ranks))} (hessian), {size.opg_rank} (opg)",
    }


def _chosen(size: Size, works: Sequence[str] | None) -> list[str]:
    """Return the works to run, in the order of the table."""
    unknown = sorted(set(works or ()) - set(WORKS))
    if unknown:
        raise BadValueError(f"works: expected some of {list(WORKS)}, got {unknown}.")
    if works is not None:
        return [name for name in WORKS if name in works]
    return [name for name in WORKS if name != "hessian1500" or len(size.hessian_ranks) > 1]


def _timed(work: Callable[[Bench], Record], bench: Bench) -> Record:
    started = time.perf_counter()
    with warnings.catch_warnings():
        # Ours are about weights that were trained briefly and fits that were cut short on
        # purpose, and residuals stand in the table; those of peers are not ours to mend.
        warnings.simplefilter("ignore")
        record = work(bench)
    release(bench.device)
    return dataclasses.replace(record, elapsed=time.perf_counter() - started)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
