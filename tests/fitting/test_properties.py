"""The laws of `tests.properties` on networks that Hypothesis makes up, and `make torture` runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

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
problem_of = cache(Problem.of)  # the laws are given the same networks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_network_obeys(law):
    @given(shapes)
    def obeys(shape):
        law(problem_of(shape))

    obeys()


def test_a_campaign_runs():
    """That of `make torture` on numbers, for a moment."""
    settings = {"DELTABARS_TORTURE_SECONDS": "2", "DELTABARS_TORTURE_SEED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "tests/torture/test_numbers.py"],
        env=os.environ | settings, cwd=Path(__file__).resolve().parents[2],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("networks: [1-9]", done.stdout), done.stdout
