"""The plan of docs/scale.md: its tables are what the model says, and the model has limits."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import plan as planning
import pytest
from plan import CORE, H200, Work, plan
from plan_tables import PEAKS, RUNS, lines

from deltabars.eigen.basis import default_block_size
from deltabars.fitting.solving import _USUAL_GROWTH
from deltabars.runtime.memory import BASIS, CHUNK, KEPT, share

ROOT = Path(__file__).parents[2]

LARGE = Work(1e8, 1e6, 200, 64)
# Estimator, P, N, K, R, products, kept; messages and bytes as diagnostics["ranks"] had them.
COUNTED = [
    ("opg", 112_810, 500, 60, 2, 260, False, 531, 179.5e6),
    ("opg", 112_810, 500, 60, 4, 260, False, 532, 150.0e6),
    ("opg", 190_410, 400, 40, 2, 192, False, 574, 222.3e6),
    ("opg", 112_810, 500, 60, 2, 260, True, 489, 116.5e6),
    ("opg", 112_810, 500, 60, 4, 260, True, 489, 60.1e6),
    ("opg", 190_410, 300, 100, 2, 328, True, 393, 119.7e6),
    ("opg", 55_210, 1500, 40, 4, 212, True, 578, 86.5e6),
    ("hessian", 55_210, 1500, 20, 2, 158, True, 1053, 54.7e6),
    ("hessian", 55_210, 2000, 40, 4, 290, True, 1863, 85.5e6),
]


class TestDocuments:
    def test_tables_are_what_the_tool_prints(self):
        text = (ROOT / "docs" / "scale.md").read_text()
        missing = [line for line in lines() if line not in text]
        assert not missing, "\n".join(missing)

    def test_command(self):
        asked = "--parameters 1e8 --examples 1e6 --rank 200 --gpus 64"
        command = [sys.executable, ROOT / "tools" / "plan.py", *asked.split()]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        text = (ROOT / "docs" / "scale.md").read_text()
        assert f"python tools/plan.py {asked}" in text
        assert "what limits it: gradients" in said
        for line in said.splitlines():
            assert line in text


class TestModel:
    @pytest.mark.parametrize(("name", "machine", "work", "measured", "what"), RUNS)
    def test_of_measured_runs(self, name, machine, work, measured, what):
        found = plan(work, machine)
        ratio = (found.total if what == "fit" else found.seconds[what]) / measured
        assert (0.85 if "*" in name else 0.45) < ratio < (1.15 if "*" in name else 1.5)

    @pytest.mark.parametrize(("name", "machine", "work", "measured"), PEAKS)
    def test_of_measured_peaks(self, name, machine, work, measured):
        assert 0.65 < plan(work, machine).bytes / measured < 1.15

    @pytest.mark.parametrize(
        ("kind", "size", "examples", "rank", "count", "products", "kept", "messages", "sent"),
        COUNTED,
    )
    def test_of_counted_messages(
        self, kind, size, examples, rank, count, products, kept, messages, sent
    ):
        work = Work(size, examples, rank, count, kind, 1.0, products=products, keeps=kept)
        found = plan(work, CORE)
        single = plan(replace(work, estimator="hessian"), CORE)
        singles = planning.GUARD + 1
        assert work.blocks * found.messages + singles * single.messages == pytest.approx(
            messages, rel=0.04
        )
        bytes_ = (work.blocks + singles / work.block) * found.sent
        bytes_ += work.rows * size * 4 / count if found.keeps else 0  # once, to keep them
        assert bytes_ == pytest.approx(sent, rel=0.08)

    def test_constants_are_those_of_the_code(self):
        for rank in (1, 30, 200, 5000):
            assert Work(1e6, 1e4, rank).block == default_block_size(rank)
        assert planning.BASIS == _USUAL_GROWTH
        for name, part in (("kept", KEPT), ("basis", BASIS), ("chunk", CHUNK)):
            assert planning._EIGHTHS[name] == share(8, part)

    def test_memory_falls_with_ranks_until_blocks_are_what_is_left(self):
        found = [plan(replace(LARGE, ranks=ranks)) for ranks in (32, 64, 128, 256, 512, 1024)]
        assert [each.memory["basis"] for each in found] == pytest.approx(
            [found[0].memory["basis"] / 2**doubled for doubled in range(6)]
        )
        assert len({each.memory["blocks"] for each in found}) == 1
        totals = [each.bytes for each in found]
        assert totals == sorted(totals, reverse=True)
        rest = sum(found[-1].memory[name] for name in ("blocks", "weights", "chunk"))
        assert rest > 0.99 * found[-1].bytes

    @pytest.mark.parametrize("name", ["parameters", "examples", "rank", "reuse"])
    def test_more_takes_longer(self, name):
        for kind in ("opg", "ggn", "hessian"):
            work = replace(LARGE, estimator=kind)
            more = replace(work, **{name: 2 * getattr(work, name)})
            assert plan(more).total > plan(work).total
            assert plan(more).bytes >= plan(work).bytes

    def test_more_ranks_compute_less_each_and_send_no_less(self):
        few, many = plan(LARGE), plan(replace(LARGE, ranks=1024))
        for part in ("gradients", "products", "basis"):
            assert many.seconds[part] == pytest.approx(few.seconds[part] / 16)
        assert many.seconds["messages"] > few.seconds["messages"] > 0
        assert plan(replace(LARGE, ranks=1)).seconds["messages"] == 0

    def test_rows_are_kept_where_they_fit_and_save_their_gradients(self):
        small = replace(LARGE, examples=1e4, ranks=256)
        kept, again = plan(small), plan(replace(small, keeps=False))
        assert kept.keeps
        assert not plan(LARGE).keeps
        assert kept.seconds["gradients"] < again.seconds["gradients"] / 10
        assert kept.memory["blocks"] < again.memory["blocks"]
        assert kept.sent < again.sent

    def test_what_does_not_fit_is_said_to_be_limited_by_memory(self):
        found = plan(replace(LARGE, parameters=1e9))
        assert not found.fits
        assert found.limit == "memory: blocks"
        assert plan(replace(LARGE, parameters=1e9), replace(H200, memory=1e12)).fits

    def test_predictions_that_were_not_measured_are_no_number(self):
        found = plan(LARGE, CORE)
        assert math.isnan(found.seconds["10,000 predictions"])
        assert math.isfinite(found.total)
