"""What holds of every problem: the algebra of error bars, one function a law."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from deltabars.errors import SpectrumWarning
from tests.random_problems import ESTIMATORS, THEOREM, Problem

# An inverse of condition κ is right to κ·eps; those of random problems have 1e6 at most.
CLOSE = {"rtol": 1e-7, "atol": 1e-10}
SLACK = 1e-9


def close(found, expected, **options):
    torch.testing.assert_close(found, expected, **{**CLOSE, **options})


def dense_values_at_full_rank(problem: Problem) -> None:
    for estimator, out in problem.predictions().items():
        exact = problem.oracle.std(estimator, problem.unseen)
        close(out.std, exact)
        close(out.score.square(), exact.square().sum(1))


def covariances_are_positive_semidefinite(problem: Problem) -> None:
    for estimator in ESTIMATORS:
        fit = problem.fit(estimator)
        for rank in {1, min(6, fit.rank), fit.rank}:
            for full in (True, False):
                out = fit.predict(problem.unseen, rank=rank, full_rank=full, covariance=True)
                found = out.covariance
                assert torch.equal(found, found.mT)
                close(found.diagonal(dim1=1, dim2=2), out.variance)
                least = torch.linalg.eigvalsh(found)[:, 0]
                assert bool((least >= -1e-9 * found.abs().amax((1, 2)) - 1e-14).all())


def batches_are_nothing(problem: Problem) -> None:
    parts = problem.predictions(6, batch_size=max(1, len(problem.targets) // 2))
    for estimator, out in problem.predictions(6).items():
        close(parts[estimator].std, out.std)
        if estimator in THEOREM:
            close(parts[estimator].std_high, out.std_high)
    fit = problem.fit("opg")
    close(fit.predict(problem.unseen, batch_size=2).std, fit.predict(problem.unseen).std)


def each_example_again_divides_the_variance(problem: Problem) -> None:
    """The mean loss and its curvature are the same, and N is k times as much."""
    times = 2 + len(problem.targets) % 3
    other = replace(
        problem,
        inputs=problem.inputs.repeat_interleave(times, 0),
        targets=problem.targets.repeat_interleave(times),
    )
    for rank in (None, 4):
        found = other.predictions(rank)
        for estimator, out in problem.predictions(rank).items():
            close(found[estimator].variance * times, out.variance)
            if estimator in THEOREM:  # elsewhere it depends on which of equal ones are computed
                close(found[estimator].std_high.square() * times, out.std_high.square())


def a_moved_l2_is_a_fresh_fit(problem: Problem) -> None:
    for rank in (None, 3):
        fresh = replace(problem, l2=4 * problem.l2).predictions(rank)
        for estimator in ("sandwich", "ggn"):
            fit = problem.fit(estimator, rank)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Expected eigenvalues of the", SpectrumWarning)
                moved = fit.with_l2(4 * problem.l2)
            served = ["hessian", "opg", "sandwich"] if estimator == "sandwich" else [estimator]
            for name, out in moved.predict(problem.unseen, estimator=served).items():
                close(out.std, fresh[name].std)
                if name in THEOREM:
                    close(out.std_error, fresh[name].std_error)


def a_large_l2_leaves_the_length_of_f(problem: Problem) -> None:
    """With λ above all curvature Σ is I/(λN), whatever the estimator."""
    lengths = problem.oracle.sensitivity(problem.unseen, "probability").norm(dim=-1)
    expected = lengths / (1e12 * len(problem.targets)) ** 0.5
    for out in replace(problem, l2=1e12).predictions(2).values():
        close(out.std, expected, rtol=1e-6, atol=0)


def low_rank_is_less_than_full_rank(problem: Problem) -> None:
    for estimator in ("hessian", "opg", "ggn"):
        fit = problem.fit(estimator)
        before = torch.zeros(len(problem.unseen), problem.last.out_features, dtype=torch.float64)
        for rank in range(1, fit.rank + 1):
            options = {"rank": rank, "moderation": None}
            low = fit.predict(problem.unseen, full_rank=False, **options).std
            assert bool((before <= low + SLACK).all())
            assert bool((low <= fit.predict(problem.unseen, **options).std + SLACK).all())
            before = low


def intervals_narrow_and_hold(problem: Problem) -> None:
    """At every rank; with all pairs known the sandwich's holds too, and is not wider at the end."""
    for estimator in (*THEOREM, "sandwich"):
        fit = problem.fit(estimator)
        exact = problem.oracle.std(estimator, problem.unseen)
        score = exact.square().sum(1).sqrt()
        former = None
        for rank in range(1, fit.rank + 1):
            out = fit.predict(problem.unseen, rank=rank, moderation=None)
            slack = SLACK + 1e-7 * exact
            assert bool((out.std_low - slack <= exact).all()), (estimator, rank)
            assert bool((exact <= out.std_high + slack).all()), (estimator, rank)
            assert bool(((out.std - exact).abs() <= out.std_error + slack).all()), (estimator, rank)
            assert bool(((out.score - score).abs() <= out.score_error + slack.amax(1)).all())
            if former is not None and estimator in THEOREM:
                assert bool((out.std_low >= former.std_low - slack).all()), (estimator, rank)
                assert bool((out.std_high <= former.std_high + slack).all()), (estimator, rank)
            former = out
        assert bool((out.std_error <= slack).all())


LAWS: tuple[Callable[[Problem], None], ...] = (
    dense_values_at_full_rank,
    covariances_are_positive_semidefinite,
    batches_are_nothing,
    each_example_again_divides_the_variance,
    a_moved_l2_is_a_fresh_fit,
    a_large_l2_leaves_the_length_of_f,
    low_rank_is_less_than_full_rank,
    intervals_narrow_and_hold,
)
