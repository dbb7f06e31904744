"""One battery that every operator must pass, on every kind of network."""

from __future__ import annotations

import pytest
import torch

from deltabars import Problem
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.errors import BadValueError
from tests.conftest import cached_case
from tests.oracles import Oracle

OPERATORS = {"hessian": HessianOperator, "opg": OPGOperator, "ggn": GGNOperator}


@pytest.fixture(params=list(OPERATORS))
def name(request):
    return request.param


def test_products_and_the_dense_matrix(case, name):
    operator = OPERATORS[name](Problem(case.model, case.data, l2=case.l2))
    exact = case.oracle.matrix(name)
    assert operator.shape == (case.oracle.size, case.oracle.size)
    dense, rows = operator.to_dense(), torch.randn(5, case.oracle.size, dtype=torch.float64)
    torch.testing.assert_close(dense, exact, rtol=0, atol=1e-10)
    torch.testing.assert_close(operator.matmat(rows), rows @ exact, rtol=0, atol=1e-10)
    assert torch.equal(operator.to_dense(), dense)
    torch.testing.assert_close(dense, dense.T, rtol=0, atol=1e-13)  # float64 sums of O(1) terms


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_equals_the_dense_matrix_of_other_likelihoods(likelihood, name):
    case = cached_case("dense", likelihood=likelihood)
    operator = OPERATORS[name](Problem(case.model, case.data, likelihood, l2=case.l2))
    torch.testing.assert_close(operator.to_dense(), case.oracle.matrix(name), rtol=0, atol=1e-10)


def test_parameter_subset_is_the_block_of_the_matrix(dense_case, name):
    case = dense_case
    chosen = ["0.bias", "2.weight"]
    problem = Problem(case.model, case.data, parameters=chosen, l2=case.l2)
    oracle = Oracle(case.model, case.inputs, case.targets, case.l2, names=chosen)
    torch.testing.assert_close(
        OPERATORS[name](problem).to_dense(), oracle.matrix(name), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("chunk_size", [1, 4, 28, 29, 1000])
def test_chunks_only_change_rounding(dense_case, name, chunk_size):
    case = dense_case
    problem = Problem(case.model, case.data, l2=case.l2, chunk_size=chunk_size)
    torch.testing.assert_close(
        OPERATORS[name](problem).to_dense(), case.oracle.matrix(name), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["opg", "ggn"])
def test_rows_are_recomputed_where_they_do_not_fit(dense_case, kind):
    case = dense_case
    roomy = OPERATORS[kind](Problem(case.model, case.data, l2=case.l2))
    tight = OPERATORS[kind](Problem(case.model, case.data, l2=case.l2, memory_budget=9_000))
    assert roomy.keeps_rows
    assert not tight.keeps_rows
    torch.testing.assert_close(tight.to_dense(), roomy.to_dense(), rtol=0, atol=1e-12)


def test_float32_is_as_good_as_float32_can_be(dense_case, name):
    case = dense_case
    problem = Problem(case.model, case.data, l2=case.l2, dtype=torch.float32)
    operator = OPERATORS[name](problem)
    assert operator.dtype == torch.float32
    error = (operator.to_dense().double() - case.oracle.matrix(name)).abs().max()
    assert error < 1e-5  # a hundred units of rounding of entries of O(1)


@pytest.mark.parametrize(
    "vectors",
    [torch.zeros(3), torch.zeros(2, 7), torch.zeros(2, 43)],
    ids=["one-dimensional", "wrong width", "float32"],
)
def test_wrong_vectors_are_refused(dense_case, vectors):
    operator = HessianOperator(Problem(dense_case.model, dense_case.data, l2=0.1))
    with pytest.raises(BadValueError, match="Vectors: expected"):
        operator.matmat(vectors)
