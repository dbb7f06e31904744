"""growth: how time and memory of a fit grow, with P, N and K each doubled twice."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from benchmarks.context import Bench, release
from benchmarks.goals import GROWTH
from benchmarks.memory import UNKNOWN
from benchmarks.peak import Case, Peak, limited_fit, measure_peaks
from benchmarks.plain import Data
from benchmarks.results import Measure, Record
from benchmarks.subject import wide_network
from benchmarks.timing import growth_exponent, interleaved

Series = dict[tuple[str, str], list[Case]]

_FACTORS = (1, 2, 4)
_REPEATS = 2
_PRODUCTS_A_PAIR = 2  # a fixed number, so that every point does the same work a pair
_MEMORY_RANK = 4  # times the rank of the time's points: memory is measured where K·P shows
_ESTIMATORS = ("hessian", "opg")
_FIELDS = {"P": "width", "N": "images", "K": "rank"}


def run_growth(bench: Bench) -> Record:
    """Exponents of fit time in P, N and K, and of peak memory in P and K."""
    size = bench.size
    first = Case("", size.growth_width, size.growth_images, size.growth_rank)
    data = bench.subject.train(max(_FACTORS) * size.growth_images)
    measures, raw = _time_growth(bench, _series(first, ("P", "N", "K")), data)
    base = dataclasses.replace(first, rank=_MEMORY_RANK * first.rank)
    some = (data[0][: size.growth_images], data[1][: size.growth_images])
    found = _memory_growth(_series(base, ("P", "K")), some)
    if found is None:
        return Record("growth", measures, (UNKNOWN,), raw)
    return Record("growth", measures + found[0], _notes(first), raw | found[1])


def _notes(first: Case) -> tuple[str, ...]:
    parameters = _parameters(first)
    return (
        f"dense network; from P = {parameters:,}, N = {first.images:,}, K = {first.rank}; "
        f"{_PRODUCTS_A_PAIR} products a pair; time shown: of the largest point",
    )


def _parameters(case: Case) -> int:
    return sum(weight.numel() for weight in wide_network(case.width).parameters())


def _series(first: Case, names: tuple[str, ...]) -> Series:
    """Return the points of each series, by estimator and by what grows."""
    return {
        (estimator, name): [
            _scaled(dataclasses.replace(first, estimator=estimator), name, factor)
            for factor in _FACTORS
        ]
        for estimator in _ESTIMATORS
        for name in names
    }


def _scaled(case: Case, name: str, factor: int) -> Case:
    field = _FIELDS[name]
    case = dataclasses.replace(case, **{field: getattr(case, field) * factor})
    return dataclasses.replace(case, max_products=_PRODUCTS_A_PAIR * case.rank)


def _distinct(series: Series) -> list[Case]:
    """Every point once: all series of an estimator start at the same one."""
    return list(dict.fromkeys(case for group in series.values() for case in group))


def _time_growth(
    bench: Bench, series: Series, data: Data
) -> tuple[tuple[Measure, ...], dict[str, Any]]:
    cases = _distinct(series)
    products: dict[Case, int] = {}

    def fit(case: Case) -> None:
        some = (data[0][: case.images], data[1][: case.images])
        found = limited_fit(case, wide_network(case.width).to(bench.device), some)
        products[case] = int(found.spectra[case.estimator].statistics["products"])

    tasks = {str(case): partial(fit, case) for case in cases}
    for estimator in _ESTIMATORS:  # a warm-up; the points themselves are long enough
        fit(Case(estimator, 2, 16, 1, max_products=2))
    seconds = interleaved(tasks, bench.device, _REPEATS, warm_ups=0)
    release(bench.device)
    measures, points = [], {}
    for (estimator, name), group in series.items():
        best = [min(seconds[str(case)]) for case in group]  # what disturbs a short run only adds
        text = f"fit time of {estimator} in {name}"
        exponent = growth_exponent(_FACTORS, best)
        measures.append(Measure(text, (best[-1],), exponent, "exp.", goal=GROWTH))
        points[text] = [
            dataclasses.asdict(case)
            | {
                "parameters": _parameters(case),
                "seconds": seconds[str(case)],
                "products": products[case],
                "seconds_a_product": min(seconds[str(case)]) / products[case],
            }
            for case in group
        ]
    return tuple(measures), points


def _memory_growth(series: Series, data: Data) -> tuple[tuple[Measure, ...], dict[str, Any]] | None:
    """Peaks of fits; all measured in one fresh process on a CPU. None: the platform cannot tell."""
    cases = _distinct(series)
    peaks = measure_peaks(cases, data)
    if peaks is None:
        return None
    found = dict(zip(cases, peaks, strict=True))
    measures, points = [], {}
    for (estimator, name), group in series.items():
        text = f"peak memory of {estimator} in {name}"
        points[text] = [_point(case, found[case]) for case in group]
        sizes = [found[case].peak for case in group]
        if min(sizes) > 0:  # a tiny fit may find all of its memory resident already
            exponent = growth_exponent(_FACTORS, sizes)
            measures.append(Measure(text, figure=exponent, unit="exp.", goal=GROWTH))
    return tuple(measures), points


def _point(case: Case, peak: Peak) -> dict[str, Any]:
    return dataclasses.asdict(case) | dataclasses.asdict(peak)
