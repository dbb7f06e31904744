from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from tests.networks import NETWORKS, Case, make_case

# The networks are tiny: threads would only wait for one another, badly so on a busy machine.
torch.set_num_threads(1)

cached_case = lru_cache(maxsize=None)(make_case)


@pytest.fixture(params=list(NETWORKS))
def case(request) -> Case:
    """Each kind of network in turn, trained once a session."""
    return cached_case(request.param)


@pytest.fixture
def dense_case() -> Case:
    return cached_case("dense")
