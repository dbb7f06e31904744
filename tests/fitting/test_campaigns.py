"""The campaigns of `make torture` that need no time to show something, for a moment each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("test_numbers.py", (r"spectra: [1-9]", r"networks: [1-9]", r"laws: [1-9]")),
        ("test_hostile.py", (r"hostile files: [1-9]",)),
    ],
)
def test_they_run(file, told):
    settings = {"DELTABARS_TORTURE_SECONDS": "2", "DELTABARS_TORTURE_SEED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", f"tests/torture/{file}"],
        env=os.environ | settings, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in told:
        assert re.search(pattern, done.stdout), done.stdout
