"""Hessian products by a linear part that is traced once: every way to the same product.

Each is compared with second derivatives by plain autograd, in float64. Rounding of sums of a few
thousand terms of O(1) is some 1e-13; 1e-10 leaves room, and a wrong graph is off by O(1).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.runtime.memory import KEPT, share
from tests.architectures import (
    ARCHITECTURES,
    COUNT,
    L2,
    Architecture,
    Wired,
    cached_hessian,
    cached_sample,
    sample_of,
)  # fmt: skip

PRECISION = {"rtol": 0, "atol": 1e-10}


def operator_of(kind, data=None, **options) -> HessianOperator:
    sample = cached_sample(kind)
    return HessianOperator(Problem(sample.model, data or sample.data, l2=L2, **options))


def rows_for(operator, count=5):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, operator.shape[0], generator=generator, dtype=torch.float64)


def budget_for(room):
    """A memory budget of which a linear part may keep `room` bytes."""
    budget = 1
    while share(budget, KEPT) < room:
        budget += 1
    return budget


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_one_vector_and_several(kind):
    operator = operator_of(kind)
    exact = cached_hessian(kind)
    torch.testing.assert_close(operator.to_dense(), exact, **PRECISION)
    assert operator.kept_bytes > 0
    rows = rows_for(operator)
    together = operator.matmat(rows)
    one_by_one = torch.cat([operator.matmat(row[None]) for row in rows])
    torch.testing.assert_close(together, rows @ exact, **PRECISION)
    torch.testing.assert_close(one_by_one, rows @ exact, **PRECISION)


@pytest.mark.parametrize(("kind", "chunk_size"), [("batch norm", 3), ("embedding", 1000)])
def test_what_is_kept_gives_the_same_as_what_is_computed_again(kind, chunk_size):
    everything = operator_of(kind, chunk_size=chunk_size)
    rows = rows_for(everything)
    exact = rows @ cached_hessian(kind)
    first, again = everything.matmat(rows), everything.matmat(rows)
    torch.testing.assert_close(first, exact, **PRECISION)
    assert torch.equal(first, again)  # the same operations on the same numbers
    # Room for less than all of them, in data that are in memory.
    room = int(0.6 * everything.kept_bytes)
    some = operator_of(kind, chunk_size=chunk_size, memory_budget=budget_for(room))
    assert some.problem.data.is_uniform
    assert torch.equal(some.matmat(rows), first)
    assert torch.equal(some.matmat(rows), first)
    assert some.kept_bytes <= room
    assert (some.kept_bytes > 0) == (chunk_size < COUNT)


def test_a_shuffled_loader_read_again_or_kept():
    kind = "batch norm"
    sample = cached_sample(kind)
    rows = rows_for(operator_of(kind))
    exact = rows @ cached_hessian(kind)
    for budget in (1, None):  # bytes: for not even one example; for everything
        generator = torch.Generator().manual_seed(0)
        dataset = TensorDataset(*sample.data)
        loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
        operator = operator_of(kind, loader, memory_budget=budget, chunk_size=3)
        assert operator.problem.data.in_memory == (budget is None)
        for _ in range(3):  # each in another order, where it is read again
            torch.testing.assert_close(operator.matmat(rows), exact, **PRECISION)
        assert (operator.kept_bytes > 0) == (budget is None)


def test_chunks_that_another_operator_made_smaller_are_not_taken_for_kept_ones():
    """Operators of one problem share its chunk size, which is halved when memory runs out."""
    sample = cached_sample("gelu")
    problem = Problem(sample.model, sample.data, l2=L2, chunk_size=4)
    operator = HessianOperator(problem)
    rows = rows_for(operator)
    operator.matmat(rows)
    problem.chunk_size.value = 2
    torch.testing.assert_close(operator.matmat(rows), rows @ cached_hessian("gelu"), **PRECISION)


def test_a_model_that_cannot_be_traced_is_computed_as_it_is():
    """F.one_hot looks at the values of its argument, which a trace does not have."""

    def marked(net, x):
        mark = nn.functional.one_hot((x.sum(1) > 0).long(), 3).to(x)
        return net.a(x).tanh() * (1 + mark)

    sample = sample_of(Architecture(lambda: Wired(marked, a=nn.Linear(4, 3)), (4,)))
    operator = HessianOperator(Problem(sample.model, sample.data, l2=L2, chunk_size=3))
    exact = sample.oracle.hessian()
    torch.testing.assert_close(operator.to_dense(), exact, rtol=0, atol=1e-12)
    assert operator.kept_bytes == 0
