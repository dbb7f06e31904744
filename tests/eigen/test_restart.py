"""Solvers whose basis may not grow, or that are killed: restarted, they find the same pairs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import deltabars
from deltabars.eigen.krylov import block_krylov, lanczos
from deltabars.eigen.pairs import residual_scale
from deltabars.errors import ConvergenceWarning, CorruptFileError
from tests.spectra import SIZE, SPECTRA, matrix_with

SOLVERS = {"lanczos": lanczos, "block_krylov": block_krylov}


def measured(matrix, pairs):
    """‖Aq − λq‖ of each pair."""
    return (matrix @ pairs.vectors.T - pairs.vectors.T * pairs.values).norm(dim=0)


@pytest.mark.parametrize(("rank", "spare"), [(1, 1), (9, 15), (20, 1)])
@pytest.mark.parametrize("spectrum", list(SPECTRA))
@pytest.mark.parametrize("block_size", [1, 2, 7])
def test_finds_the_largest_pairs(block_size, spectrum, rank, spare):
    room = rank + 2 * block_size + spare
    matrix = matrix_with(SPECTRA[spectrum])
    pairs = block_krylov(matrix, rank, block_size=block_size, max_vectors=room)
    values = SPECTRA[spectrum].sort(descending=True).values[:rank]
    scale = residual_scale(values)
    eye = torch.eye(rank, dtype=torch.float64)
    torch.testing.assert_close(pairs.values, values, rtol=0, atol=1e-9 * float(scale.max()))
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-12)
    assert float((measured(matrix, pairs) / scale).max()) < 1e-9
    assert float(pairs.residuals.max()) <= 1e-10  # the tolerance
    assert bool((pairs.values.diff() <= 0).all())
    if spectrum in ("spread", "indefinite", "negative") and block_size < 7:  # no gaps
        assert pairs.statistics["restarts"] > 0


@pytest.mark.parametrize("spare", [0, 8])
@pytest.mark.parametrize("spectrum", ["indefinite", "negative", "spread"])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_both_ends_of_the_spectrum(solver, spectrum, spare):
    block = {"lanczos": 1, "block_krylov": 2}[solver]
    exact = SPECTRA[spectrum].sort().values
    pairs = SOLVERS[solver](
        matrix_with(SPECTRA[spectrum]), 5, smallest=6, max_vectors=11 + 2 * block + spare
    )
    torch.testing.assert_close(pairs.values, exact.flip(0)[:5], rtol=0, atol=5e-9)  # ‖A‖ up to 5
    assert pairs.statistics["restarts"] > 0
    torch.testing.assert_close(pairs.smallest[:6], exact[:6], rtol=0, atol=5e-9)
    assert float(pairs.smallest_residuals[:6].max()) <= 1e-10
    assert pairs.least == pytest.approx(float(exact[0]), abs=1e-9)


class Diagonal:
    """A matrix of many columns whose products cost nothing and hold nothing."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, values, size=30_000):
        self.shape = (size, size)
        self.diagonal = torch.zeros(size)
        self.diagonal[: len(values)] = values

    def matmat(self, rows):
        return rows * self.diagonal


def peak_rows(work, width):
    """The most rows of `width` float32 numbers that are held at a time while `work` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    ordered = sorted(memory, key=lambda event: event.start_ns())
    return result, max(accumulate(event.nbytes() for event in ordered)) / (4 * width)


VALUES = {
    "slow": torch.linspace(1, 2, 100),
    "repeated": torch.cat([torch.full((12,), 3.0), torch.linspace(1, 2, 100)]),
}


@pytest.mark.parametrize("values", list(VALUES))
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_the_basis_stays_within_its_room(solver, values):
    """What is held, the result included, is `max_vectors` rows and a few blocks."""
    block = {"lanczos": 1, "block_krylov": 2}[solver]
    matrix = Diagonal(VALUES[values])
    pairs, peak = peak_rows(
        lambda: SOLVERS[solver](matrix, 20, max_vectors=40, tolerance=1e-4), matrix.shape[0]
    )
    exact = VALUES[values].sort(descending=True).values[:20].double()
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-5)
    assert pairs.statistics["restarts"] > 0
    assert peak >= 20
    # Rows are added in panels of 16 (two may be begun: a second search is for missed copies); a
    # restart mixes 4,096 columns of two times 40 rows at a time.
    assert peak <= 40 + 2 * 16 + 4 * block + 80 * 4096 / matrix.shape[0]


def test_a_fit_with_a_small_budget_gives_the_same_pairs():
    """Everything is scarce at once: nothing is kept, and the bases are restarted."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5)).double()
        data = torch.randn(40, 6, dtype=torch.float64), torch.randint(0, 5, (40,))
    options = {"l2": 0.1, "rank": 8, "solver": "krylov", "progress": False}
    for estimator in ("hessian", "opg"):
        with pytest.warns(deltabars.errors.OptimumWarning):
            roomy, tight = (
                deltabars.fit(model, data, estimator=estimator, memory_budget=budget, **options)
                for budget in (1 << 30, 3 << 16)
            )
        few, many = (f.diagnostics[estimator]["restarts"] for f in (roomy, tight))
        assert many > few
        # Residuals of 1e-10: values to that; vectors to that over the gaps of some 1e-3.
        before, after = roomy.spectra[estimator], tight.spectra[estimator]
        torch.testing.assert_close(after.values, before.values, rtol=0, atol=1e-9)
        a, b = roomy.predict(data[0][:5]), tight.predict(data[0][:5])
        torch.testing.assert_close(a.std, b.std, rtol=1e-8, atol=0)


def test_a_cluster_that_the_basis_cannot_hold_ends_with_a_warning():
    """29 eigenvalues within 1e-7 of one another, and room for 33: it would never end."""
    new = {"generator": torch.Generator().manual_seed(3), "dtype": torch.float64}
    clusters = [1 + 1e-7 * torch.rand(29, **new), 0.5 + 1e-7 * torch.rand(23, **new)]
    matrix = matrix_with(torch.cat([*clusters, -torch.ones(9, dtype=torch.float64)]), 3)
    with pytest.warns(ConvergenceWarning, match=r"\d+ that have not converged"):
        pairs = block_krylov(matrix, 17, block_size=6, max_vectors=33)
    assert pairs.statistics["products"] < 10_000
    torch.testing.assert_close(pairs.residuals, measured(matrix, pairs), rtol=1e-3, atol=1e-13)
    assert float((1 - pairs.values).max()) < 1e-4


PARTS = ("values", "vectors", "residuals", "smallest", "smallest_residuals")


class Recorder:
    """Keeps a copy of every state, and starts from one of them."""

    def __init__(self, start=None):
        self.start, self.states = start, []

    def load(self):
        return self.start

    def is_due(self):
        return True

    def save(self, state):
        tensors = {name: part.clone() for name, part in state.tensors.items()}
        self.states.append(replace(state, tensors=tensors))


class Enough:
    """A growth that is content with a share of a sum that the projections show."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randn(3, size, generator=generator, dtype=torch.float64)
        self.looks = 0

    def is_enough(self, values, projections):
        self.looks += 1
        return float(projections.square().sum()) > 0.6 * float(self.rows.square().sum())

    def looked(self):
        return torch.tensor([float(self.looks)])

    def look_back(self, looked):
        self.looks = int(looked)


def same_bits(pairs, other):
    parts = all(torch.equal(getattr(pairs, part), getattr(other, part)) for part in PARTS)
    return parts and dict(pairs.statistics) == dict(other.statistics)


RESUMED = {
    "free": ("repeated", 6, {}),
    "float32": ("spread", 6, {"dtype": torch.float32}),
    "restarted": ("spread", 6, {"max_vectors": 12}),
    "copies": ("repeated", 6, {"max_vectors": 12, "dtype": torch.float32}),
    "both ends": ("indefinite", 5, {"smallest": 3, "max_vectors": 14, "seed": 7}),
    "few products": ("indefinite", 5, {"max_products": 17}),
    "growth": ("decaying", 40, {"growth": Enough}),
}


@pytest.mark.filterwarnings("ignore::deltabars.errors.ConvergenceWarning")
@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("block_size", [1, 2])
def test_the_same_bits_from_every_state(block_size, case):
    spectrum, rank, given = RESUMED[case]
    matrix = matrix_with(SPECTRA[spectrum]).to(given.get("dtype", torch.float64))

    def solve(checkpoint):
        options = {name: value for name, value in given.items() if name != "dtype"}
        if "growth" in options:
            options["growth"] = Enough(SIZE)
        return block_krylov(matrix, rank, block_size=block_size, checkpoint=checkpoint, **options)

    plain, recorder = solve(None), Recorder()
    assert same_bits(solve(recorder), plain)
    states = recorder.states
    assert len(states) >= 3
    for number in {*range(0, len(states), max(1, len(states) // 5)), len(states) - 1}:
        again = Recorder(states[number])
        assert same_bits(solve(again), plain)
        assert len(again.states) <= len(states) - number  # nothing was done twice
    if spectrum == "repeated":  # from within the search for missed copies, too
        assert "found.values" in states[-1].tensors


@pytest.mark.parametrize(
    "alter",
    [
        lambda state: replace(state, numbers={}),
        lambda state: replace(state, numbers={**state.numbers, "position": {"norm": 1.0}}),
        lambda state: replace(state, tensors={**state.tensors, "basis.0": torch.zeros(3, 7)}),
        lambda state: replace(state, tensors={**state.tensors, "projected": torch.zeros(3, 2)}),
    ],
)
def test_a_state_that_is_none_is_refused(alter):
    matrix = matrix_with(SPECTRA["spread"])
    recorder = Recorder()
    lanczos(matrix, 4, checkpoint=recorder)
    with pytest.raises(CorruptFileError, match="state of this solver"):
        lanczos(matrix, 4, checkpoint=Recorder(alter(recorder.states[5])))
