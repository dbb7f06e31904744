"""Hostile files until the time is up."""

from __future__ import annotations

import random

from tests.hostile import mutated, subjects, try_all

ROUND = 200  # files of a kind in one child


def test_hostile_files(seconds_left, first_seed, capsys):
    readers, turn, count, refused, wrong = subjects(), 0, 0, 0, []
    peaks = {"pictures": 0, "other files": 0}
    while seconds_left() > 0:
        subject = readers[turn % len(readers)]
        seed = f"torture {first_seed + turn} {subject.name}"
        draw = random.Random(seed)
        tried = try_all(subject, [mutated(draw.choice(subject.seeds), draw) for _ in range(ROUND)])
        count, refused = count + ROUND, refused + tried.refused
        kind = "pictures" if subject.name.startswith("picture") else "other files"
        peaks[kind] = max(peaks[kind], tried.peak)
        if tried.wrong:
            wrong.append(f"{seed!r}: {tried.wrong[0]}")
        turn += 1
    most = ", ".join(f"{peak / 2**20:.0f} ({kind})" for kind, peak in peaks.items())
    with capsys.disabled():
        print(
            f"\nhostile files: {count:,} tried, {refused:,} refused, {len(wrong)} rounds with "
            f"something wrong, at most {most} MiB above the process"
        )
    assert wrong == []
