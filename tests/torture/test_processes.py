"""Fits of two to four processes that are killed at random moments, and resumed."""

from __future__ import annotations

import os
import random
import signal
import time

from tests import stopping
from tests.processes import launched

WAYS = ("lanczos", "block_krylov", "sandwich")


def test_killed_at_any_moment(tmp_path, seconds_left, first_seed):
    chance, fits, kills = random.Random(first_seed), 0, 0
    expected = {way: stopping.fit(**stopping.WAYS[way]).spectra for way in WAYS}
    while not fits or seconds_left() > 0:
        way, count = chance.choice(WAYS), chance.randint(2, 4)
        folder = tmp_path / f"kept {fits}"

        def work(process, folder=folder, way=way):
            found = stopping.fit(folder, **stopping.WAYS[way])
            return {name: pairs.values for name, pairs in found.spectra.items()}

        for attempt in range(8):
            launch = launched(count, work, tmp_path / f"{fits}-{attempt}")
            victim = chance.randrange(count)
            if attempt < 7:  # the last is left alone; one that is over stays until it is waited for
                time.sleep(chance.uniform(0, 3))
                os.kill(launch.pids[victim], signal.SIGKILL)
                kills += 1
            outcomes = launch.outcomes(120.0)
            if all(outcome.status == 0 for outcome in outcomes):
                break
            others = [outcome for k, outcome in enumerate(outcomes) if k != victim]
            assert all((each.error or "ProcessError").startswith("ProcessError") for each in others)
        for outcome in outcomes:
            for name, values in outcome.result.items():
                assert float((values / expected[way][name].values - 1).abs().max()) < 1e-6
        fits += 1
    print(f"\n{fits} fits, {kills} kills")
