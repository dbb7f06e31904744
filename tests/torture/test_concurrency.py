"""Threads that predict and fits that are terminated, until the time is up."""

from __future__ import annotations

import random

import deltabars
from deltabars.cli.runs import Run
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from tests.networks import NETWORKS, make_case
from tests.runtime.test_concurrency import fit_of, in_threads, same, terminated
from tests.workshop import contents


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


def test_terminated(seconds_left, first_seed, capsys, workshop, tmp_path):
    turn, ended = 0, 0
    while seconds_left() > 0:
        draw = random.Random(f"terminated {first_seed + turn}")
        out, overwrite = tmp_path / str(turn) / "run", draw.random() < 0.5
        out.parent.mkdir()
        if overwrite:
            Run.create(out, workshop.fit(rank=5), NamedModel("a:b"), NamedData("c:d"))
        code, _ = terminated(workshop, out, draw.uniform(0, 1.5), overwrite)
        left = contents(out.parent)
        assert left in (set(), {"run", "run/fit.deltabars", "run/run.json"}), f"terminated {turn}"
        assert left or not overwrite, f"terminated {turn}"
        if left:
            assert deltabars.load(out / "fit.deltabars", workshop.model).rank in (5, 30)
        turn, ended = turn + 1, ended + (code == 1)
    with capsys.disabled():
        print(f"\nterminated: {turn} fits, {ended} of them before their end, no half a RUN")
