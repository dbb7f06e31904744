"""memory: what a fit takes at its peak beyond its cached Jacobian or graph."""

from __future__ import annotations

import dataclasses

from benchmarks.context import Bench
from benchmarks.goals import MEMORY
from benchmarks.peak import Case, measure_peaks
from benchmarks.results import Measure, Record

UNKNOWN = "peak memory cannot be read on this platform (it takes Linux, or CUDA)"
_TRAINING_STEPS = 200


def run_memory(bench: Bench) -> Record:
    """Peaks of converged fits, in units of K·P numbers; the K eigenvectors count as 1."""
    size = bench.size
    cases = [
        Case(
            estimator,
            size.memory_width,
            size.memory_images,
            size.memory_rank,
            training_steps=_TRAINING_STEPS,
        )
        for estimator in ("opg", "hessian")
    ]
    peaks = measure_peaks(cases, bench.subject.train(size.memory_images))
    if peaks is None:
        return Record("memory", notes=(UNKNOWN,))
    measures = tuple(
        Measure(
            f"{case.estimator}, K={case.rank}, {peak.products} products",
            figure=peak.beyond_cache,
            unit="K·P",
            goal=MEMORY,
            products=peak.products,
        )
        for case, peak in zip(cases, peaks, strict=True)
    )
    notes = (
        f"dense network of P = {peaks[0].parameters:,}, N = {size.memory_images:,}; "
        + " and ".join(
            f"{peak.cached / 2**20:,.0f} MiB are cached ({case.estimator})"
            for case, peak in zip(cases, peaks, strict=True)
        ),
    )
    raw = {
        "cases": [dataclasses.asdict(case) for case in cases],
        "peaks": [dataclasses.asdict(peak) for peak in peaks],
    }
    return Record("memory", measures, notes, raw)
