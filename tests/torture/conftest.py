"""Campaigns that run until their time is up, and long cases; `make torture` runs them."""

from __future__ import annotations

import itertools
import os
import time

import pytest


@pytest.fixture
def seconds_left(request):
    """How many seconds a campaign has left: all share DELTABARS_TORTURE_SECONDS."""
    sharing = sum("seconds_left" in item.fixturenames for item in request.session.items)
    total = float(os.environ.get("DELTABARS_TORTURE_SECONDS", "600"))
    end = time.monotonic() + total / sharing
    return lambda: end - time.monotonic()


@pytest.fixture
def first_seed():
    """Where a campaign's seeds begin: DELTABARS_TORTURE_SEED, or the clock; printed."""
    seed = int(os.environ.get("DELTABARS_TORTURE_SEED", time.time_ns() % 2**31))
    print(f"\nDELTABARS_TORTURE_SEED={seed}")
    return seed


@pytest.fixture
def seeds(seconds_left, first_seed):
    """Seeds until the time is up."""
    return itertools.takewhile(lambda seed: seconds_left() > 0, itertools.count(first_seed))
