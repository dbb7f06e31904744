"""Hostile files until the time is up."""

from __future__ import annotations

import random

from tests.hostile import mutated, subjects, try_all

ROUND = 200  # files of a kind in one child


def test_hostile_files(seeds):
    readers, count, refused, wrong, peak = subjects(), 0, 0, [], 0
    for turn, seed in enumerate(seeds):
        subject, draw = readers[turn % len(readers)], random.Random(seed)
        tried = try_all(subject, [mutated(draw.choice(subject.seeds), draw) for _ in range(ROUND)])
        count, refused, peak = count + ROUND, refused + tried.refused, max(peak, tried.peak)
        if tried.wrong:
            wrong.append(f"{seed} {subject.name}: {tried.wrong[0]}")
    print(f"\nhostile files: {count:,} tried, {refused:,} refused; {peak / 2**20:.0f} MiB")
    assert wrong == []
