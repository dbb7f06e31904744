"""Threads that predict, until the time is up."""

from __future__ import annotations

import random

from tests.networks import NETWORKS, make_case
from tests.runtime.test_concurrency import fit_of, in_threads, same


def test_threads(seconds_left, first_seed, capsys):
    turn, predictions = 0, 0
    while seconds_left() > 0:
        draw = random.Random(f"threads {first_seed + turn}")
        kind = draw.choice(sorted(NETWORKS))
        case, threads = make_case(kind, seed=draw.randrange(2**31)), draw.randint(2, 12)
        case.model.train(draw.random() < 0.5)
        fit = fit_of(case, estimator=draw.choice(["opg", "ggn", "sandwich"]), rank=4)
        alone = [fit.predict(case.unseen[: n + 1]) for n in range(7)]
        found = in_threads(
            lambda _, fit=fit, case=case: [fit.predict(case.unseen[: n + 1]) for n in range(7)],
            threads,
        )
        for each in found:
            assert all(map(same, each, alone)), f"threads {turn}"
        turn, predictions = turn + 1, predictions + 7 * threads
    with capsys.disabled():
        print(f"\nthreads: {predictions:,} predictions of {turn} fits, all of them bitwise right")
