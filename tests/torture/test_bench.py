"""The work of the benchmark that takes longest."""

from __future__ import annotations

from tests.benchmarks.test_bench import LINUX, TINY_GPU, record, run


@LINUX
def test_growth():
    growth = record(run(TINY_GPU, ["growth"])[0], "growth")
    assert len(growth["measures"]) >= 6  # times; of tiny fits not every peak shows
    assert len(growth["raw"]) == 10
    points = growth["raw"]["fit time of opg in K"]
    assert [point["rank"] for point in points] == [2, 4, 8]
    assert [point["products"] for point in points] == [4, 8, 16]
