from __future__ import annotations

import os
import time

import pytest

SECONDS = float(os.environ.get("DELTABARS_TORTURE_SECONDS", "600"))


@pytest.fixture
def seconds_left(request):
    """A function: the seconds that a campaign has left of its share of the time."""
    share = SECONDS / max(1, len(request.session.items))
    end = time.monotonic() + share
    return lambda: end - time.monotonic()
