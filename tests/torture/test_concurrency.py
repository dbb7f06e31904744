"""Threads that predict, until the time is up."""

from __future__ import annotations

import random

from tests.networks import NETWORKS, make_case
from tests.runtime.test_concurrency import fit_of, in_threads, same


def test_threads(seeds):
    for seed in seeds:
        draw = random.Random(seed)
        case, threads = make_case(draw.choice(sorted(NETWORKS)), seed=seed), draw.randint(2, 12)
        case.model.train(draw.random() < 0.5)
        fit = fit_of(case, estimator=draw.choice(["opg", "ggn", "sandwich"]), rank=4)

        def work(_, fit=fit, case=case):
            return [fit.predict(case.unseen[: n + 1]) for n in range(7)]

        alone = work(0)
        for each in in_threads(work, threads):
            assert all(map(same, each, alone)), f"threads {seed}"
