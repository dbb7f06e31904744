"""Fits of one to four ranks, one of which is killed at a random moment, until the time is up."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from tests import stopping
from tests.ranked import launched, results
from tests.ranked_cases import CASES, DATA
from tests.test_distributed import check_same, check_same_data, work
from tests.test_distributed_failures import WAYS, work_with


@pytest.mark.parametrize("count", [2, 3, 4])
def test_everything_on_ranks(tmp_path, count):
    found = results(count, work(CASES, DATA, count), tmp_path / "ranks", within=600.0)
    off = {name: check_same(name, [cases[name] for cases, _ in found]) for name in CASES}
    for kind, names in {
        "float64": [name for name in CASES if "single" not in name],
        "float32": [name for name in CASES if "single" in name],
    }.items():
        values, bars = (max(off[name][part] for name in names) for part in (0, 1))
        print(f"\n{count} ranks, {len(names)} fits in {kind}: eigenvalues {values:.1e}", end="")
        print(f", predictions {bars:.1e}")
    for kind in DATA:
        check_same_data(kind, [kinds[kind] for _, kinds in found])


def test_killed_at_any_moment(tmp_path, seconds_left, first_seed):
    chance = random.Random(first_seed)
    expected = {way: work_with(None, **options)(0) for way, options in WAYS.items()}
    fits = kills = worst = 0
    while not fits or seconds_left() > 0:
        way = chance.choice(list(WAYS))
        folder, fixed = tmp_path / f"kept {fits}", chance.randint(2, 4)
        for attempt in range(100):
            # Rows that come in another order cannot be told from other rows.
            count = fixed if way == "incremental" else chance.randint(1, 4)
            where = tmp_path / f"{fits}-{attempt}"
            launch = launched(count, work_with(folder, **WAYS[way]), where)
            until = (stopping._newest(folder) if folder.exists() else 0) + chance.randint(0, 25)
            victim = chance.randrange(count)
            while attempt > 5 or stopping._newest(folder) < until:
                if os.waitid(os.P_PID, launch.pids[victim], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break
                time.sleep(0.001)
            else:
                time.sleep(chance.uniform(0, 0.02))
                launch.kill(victim)
                kills += 1
            outcomes = launch.outcomes(120.0)
            if all(outcome.status == 0 for outcome in outcomes):
                break
            for rank, outcome in enumerate(outcomes):
                if rank != victim and outcome.status:
                    assert f"rank {victim}" in (outcome.error or ""), outcome
        values, std, _ = expected[way]
        for found, predicted, _ in (outcome.result for outcome in outcomes):
            worst = max(
                worst,
                *(float((found[name] / values[name] - 1).abs().max()) for name in values),
            )
            torch.testing.assert_close(predicted, std, rtol=1e-5, atol=0)
        assert worst < 1e-6
        fits += 1
    print(f"{fits} fits, {kills} kills, worst relative error of an eigenvalue {worst:.1e}")
