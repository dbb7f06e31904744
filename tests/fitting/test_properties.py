"""The laws of `tests.properties` on networks that Hypothesis makes up, and makes small again."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import LAWS
from tests.random_problems import BENDS, Problem, Shape

shapes = st.builds(
    Shape,
    inputs=st.integers(1, 4),
    hidden=st.integers(0, 4),
    outputs=st.integers(2, 4),
    count=st.integers(1, 14),
    bend=st.sampled_from(list(BENDS)),
    decade=st.integers(-4, 1),
    seed=st.integers(0, 2**32 - 1),
)
problem_of = lru_cache(maxsize=None)(Problem.of)  # the laws are given the same networks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_network_obeys(law):
    @given(shapes)
    def obeys(shape):
        law(problem_of(shape))

    obeys()
