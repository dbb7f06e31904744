"""Solvers that are left at any step and taken up again: the same bits as if they had gone on."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from deltabars.eigen.resuming import Rows

from deltabars.eigen import incremental_svd
from deltabars.eigen.basis import Projected
from deltabars.eigen.krylov import block_krylov, lanczos
from deltabars.errors import CheckpointMismatchError, CorruptFileError
from deltabars.runtime.vectors import Space
from tests.spectra import SPECTRA, matrix_with

MOST = 5  # states that are started from, spread over all; the first and the last two in any case
PARTS = ("values", "vectors", "residuals", "smallest", "smallest_residuals")


class Recorder:
    """Keeps a copy of every state, and starts from one of them."""

    def __init__(self, start=None):
        self.start, self.states = start, []

    def load(self, space):
        return self.start

    def is_due(self):
        return True

    def save(self, state):
        self.states.append(
            replace(
                state,
                tensors={name: part.clone() for name, part in state.tensors.items()},
                rows={
                    name: Rows(rows.epoch, [block.clone() for block in rows.blocks])
                    for name, rows in state.rows.items()
                },
            )
        )


class Enough:
    """A growth that is content with four values of a sum that the projections show."""

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


def check_every_state(solve, fewest):
    """`solve(checkpoint)` gives the same from each state that it ever saved."""
    plain, recorder = solve(None), Recorder()
    assert_same(solve(recorder), plain)
    assert len(recorder.states) >= fewest
    count = len(recorder.states)
    for number in sorted({*range(0, count, max(1, count // MOST)), count - 2, count - 1}):
        state = recorder.states[number]
        again = Recorder(state)
        assert_same(solve(again), plain)
        assert len(again.states) <= len(recorder.states) - number  # nothing was done twice
    return recorder.states


def assert_same(pairs, plain):
    for part in PARTS:
        assert torch.equal(getattr(pairs, part), getattr(plain, part)), part
    assert dict(pairs.statistics) == dict(plain.statistics)


@pytest.mark.parametrize("max_vectors", [None, 12])
@pytest.mark.parametrize(
    ("spectrum", "dtype"),
    [
        ("spread", torch.float32),
        ("decaying", torch.float64),
        ("repeated", torch.float32),
        ("repeated", torch.float64),
        ("indefinite", torch.float64),
    ],
)
@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_krylov_from_every_state(solver, spectrum, dtype, max_vectors):
    matrix = matrix_with(SPECTRA[spectrum]).to(dtype)
    states = check_every_state(
        lambda checkpoint: solver(matrix, 6, max_vectors=max_vectors, checkpoint=checkpoint), 3
    )
    if spectrum == "repeated":  # states within the searches for missed copies are among them
        assert any({"basis", "found"} <= set(state.rows) for state in states)


@pytest.mark.parametrize("solver", [lanczos, block_krylov])
def test_both_ends_and_a_limit_of_products(solver):
    matrix = matrix_with(SPECTRA["indefinite"])
    check_every_state(
        lambda checkpoint: solver(
            matrix, 5, smallest=3, max_vectors=14, seed=7, checkpoint=checkpoint
        ),
        20,
    )

    def limited(checkpoint):
        with pytest.warns(match="have not converged"):
            return solver(matrix, 5, max_products=17, checkpoint=checkpoint)

    check_every_state(limited, 4)


def test_a_limit_of_products_within_a_search_for_copies():
    matrix = matrix_with(SPECTRA["repeated"])
    needed = lanczos(matrix, 9).statistics["products"]
    for most in range(10, int(needed), 3):
        plain = lanczos_or_warning(matrix, most)
        recorder = Recorder()
        lanczos_or_warning(matrix, most, recorder)
        for state in recorder.states[-3:]:
            assert_same(lanczos_or_warning(matrix, most, Recorder(state)), plain)


def lanczos_or_warning(matrix, most, checkpoint=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lanczos(matrix, 9, max_products=most, checkpoint=checkpoint)


@pytest.mark.parametrize("block_size", [1, 3])
def test_a_growth_remembers_its_last_look(block_size):
    matrix = matrix_with(SPECTRA["decaying"])
    looks = []

    def solve(checkpoint):
        growth = Enough(len(matrix))
        pairs = block_krylov(
            matrix, 40, block_size=block_size, growth=growth, checkpoint=checkpoint
        )
        looks.append(growth.looks)
        return pairs

    check_every_state(solve, 5)
    assert len(set(looks)) == 1


@pytest.mark.parametrize("centred", [False, True])
def test_incremental_svd_from_every_state(centred):
    rows = torch.randn(90, 40, generator=torch.Generator().manual_seed(1))
    check_every_state(
        lambda checkpoint: incremental_svd(
            rows.split(8), 10, centred=centred, checkpoint=checkpoint
        ),
        12,
    )


def test_incremental_svd_of_a_matrix():
    matrix = matrix_with(SPECTRA["decaying"])
    recorder = Recorder()
    plain = incremental_svd(matrix, 12, checkpoint=recorder)
    again = incremental_svd(matrix, 12, checkpoint=Recorder(recorder.states[1]))
    assert torch.equal(again.vectors, plain.vectors)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.flip(0),
        lambda rows: torch.cat([rows[8:16], rows[:8], rows[16:]]),
        lambda rows: rows[:20],
        lambda rows: rows + 1e-6,
    ],
    ids=["reversed", "two blocks changed places", "too few", "other numbers"],
)
def test_incremental_svd_refuses_other_rows(change):
    """Resuming with the wrong rest would count some rows twice and others not at all."""
    rows = torch.randn(90, 40, generator=torch.Generator().manual_seed(1))
    recorder = Recorder()
    incremental_svd(rows.split(8), 10, checkpoint=recorder)
    with pytest.raises(CheckpointMismatchError, match=r"first 32 rows.*no shuffling"):
        incremental_svd(change(rows).split(8), 10, checkpoint=Recorder(recorder.states[3]))
    with pytest.raises(CheckpointMismatchError, match="first 32 rows"):
        incremental_svd(rows.split(7), 10, checkpoint=Recorder(recorder.states[3]))


@pytest.mark.parametrize(
    "alter",
    [
        lambda state: replace(state, numbers={}),
        lambda state: replace(state, tensors={}),
        lambda state: replace(state, rows={"basis": Rows("x", [torch.zeros(3, 7)])}),
        lambda state: replace(state, rows={"basis": Rows("x", [])}),
        lambda state: replace(state, numbers={**state.numbers, "size": 1}),
        lambda state: replace(state, tensors={**state.tensors, "generator": torch.zeros(3)}),
        lambda state: replace(
            state, tensors={**state.tensors, "places": state.tensors["places"] + 10**6}
        ),
    ],
)
def test_a_state_that_is_none_is_refused(alter):
    matrix = matrix_with(SPECTRA["spread"])
    recorder = Recorder()
    lanczos(matrix, 4, checkpoint=recorder)
    with pytest.raises(CorruptFileError, match="state of this solver"):
        lanczos(matrix, 4, checkpoint=Recorder(alter(recorder.states[5])))


def test_a_projected_matrix_comes_back_with_its_signs():
    """The sign of a zero decides on the sign of a reflection, and so of an eigenvector."""
    first, again = (Projected(torch.device("cpu"), Space(6)) for _ in range(2))
    middle = torch.tensor([[1.0, -0.0], [-0.0, 2.0]], dtype=torch.float64)
    coupling = torch.tensor([[0.5, -0.0], [0.0, -0.25]], dtype=torch.float64)
    for _ in range(3):
        first.append(middle, coupling)
    again.unpack(first.size, first.packed())
    parts = [(p._matrix.contiguous().view(torch.int64), p._coupling) for p in (first, again)]
    assert torch.equal(parts[0][0], parts[1][0])
    assert torch.equal(parts[0][1], parts[1][1])
    assert torch.equal(again.ritz().coordinates, first.ritz().coordinates)
