"""How long a campaign may go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

SECONDS = float(os.environ.get("DELTABARS_TORTURE_SECONDS", "600"))


@pytest.fixture
def seconds_left(request) -> Callable[[], float]:
    """The seconds that are left of this campaign's equal share of the time."""
    until = time.monotonic() + SECONDS / len(request.session.items)
    return lambda: until - time.monotonic()
