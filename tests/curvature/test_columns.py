"""The columns that are kept of rows of derivatives, and products of models that bear no slicing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deltabars import Problem
from deltabars.curvature.base import kept_parts
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.problem.parameters import ParameterSpace
from tests.oracles import Oracle
from tests.silence import COUNT, L2, PRECISION, labels, randn, seeded, silence

OPERATORS = {"opg": OPGOperator, "ggn": GGNOperator, "hessian": HessianOperator}
SPACE = ParameterSpace(("bias", "weight", "scale"), ((4,), (4, 3), (2,)))


def parts_of(*places: int):
    return kept_parts(SPACE, torch.tensor(places, dtype=torch.long))


def test_everything_is_in_its_place():
    parts = kept_parts(SPACE, None)
    assert [part.place for part in parts.values()] == [slice(0, 4), slice(4, 16), slice(16, 18)]
    assert all(part.numbers is None for part in parts.values())


def test_crossings_of_rows_and_columns():
    parts = parts_of(1, 4, 6, 13, 15, 16, 17)
    assert parts["bias"].numbers.tolist() == [1]
    assert parts["bias"].outputs is None
    weight = parts["weight"]
    assert weight.place == slice(1, 5)
    assert weight.numbers.tolist() == [0, 2, 9, 11]
    assert (weight.outputs.tolist(), weight.inputs.tolist()) == ([0, 3], [0, 2])
    assert parts["scale"].place == slice(5, 7)
    assert parts["scale"].numbers is None


def test_numbers_that_are_no_crossings():
    weight = parts_of(4, 8)["weight"]
    assert weight.numbers.tolist() == [0, 4]
    assert weight.outputs is None
    assert weight.inputs is None


def test_a_parameter_that_is_not_reached_at_all():
    parts = parts_of(0, 16)
    assert parts["weight"].place == slice(1, 1)
    assert parts["weight"].numbers.tolist() == []


class Twice(nn.Module):
    """A layer that is called on two inputs, of which each reaches other columns of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = silence(nn.Linear(5, 4), 0, 2)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        low, high = x.clone(), x.clone()
        low[:, 3:], high[:, :2] = 0.0, 0.0
        return self.last(F.relu(self.first(low)) + F.relu(self.first(high)))


@pytest.mark.parametrize("name", ["opg", "ggn", "hessian"])
def test_a_weight_of_two_calls(name):
    model, data = seeded(Twice), (randn(COUNT, 5), labels())
    operator = OPERATORS[name](Problem(model, data, l2=L2))
    assert operator.reached is not None
    exact = Oracle(model, *data, L2).matrix(name)
    torch.testing.assert_close(operator.to_dense(), exact, **PRECISION)


class Particular(nn.Module):
    """A layer that can only be traced whole: it looks at the number of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = silence(nn.Linear(5, 4), 0, 2)
        self.last = nn.Linear(4, 3)
        self.fewest = 4

    def forward(self, x):
        hidden = F.relu(self.first(x))
        derivative = torch._C._functorch.maybe_current_level() is not None
        if derivative and self.last_width(hidden) < self.fewest:
            raise RuntimeError("Too few.")
        return self.last(hidden)

    @staticmethod
    def last_width(hidden) -> int:
        with torch._C.DisableTorchFunction():
            return hidden.shape[1]


def test_a_model_that_bears_no_slicing_under_derivatives():
    """The check of single gradients passes; products go on with all units."""
    model, data = seeded(Particular), (randn(COUNT, 5), labels())
    problem = Problem(model, data, l2=L2)
    assert problem.reached is not None
    exact = Oracle(model, *data, L2).hessian()
    torch.testing.assert_close(HessianOperator(problem).to_dense(), exact, **PRECISION)
