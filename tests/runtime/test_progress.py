"""Progress: a bar on a terminal, plain lines elsewhere, nothing when off."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
import warnings
from contextlib import suppress

import pytest
import torch

import deltabars
from deltabars.runtime import progress as module
from deltabars.runtime.progress import Progress
from tests.stopping import end, start


def fit(stderr, progress):
    """A fit in a process whose stderr is that file."""
    sys.stderr = os.fdopen(stderr, "w")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    data = torch.randn(50, 4), torch.randint(0, 3, (50,))
    warnings.simplefilter("ignore")
    options = {"l2": 1.0, "estimator": "hessian", "rank": 4, "solver": "krylov"}
    deltabars.fit(model, data, **options, progress=progress)
    sys.stderr.flush()


def shown(enabled=True, total=10):
    """What a loop of ten shows in a file."""
    stream = io.StringIO()
    with Progress("Eigenpairs", total, "pair", enabled, stream) as bar:
        for done in range(1, 11):
            bar.show(done, "30 products")
    return stream.getvalue().splitlines()


def test_plain_lines_have_done_note_and_time_left(monkeypatch):
    assert shown() == []  # lines are seldom
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    lines = shown()
    assert len(lines) == 10
    assert lines[4].startswith("Eigenpairs: 5/10 pairs, 30 products, ")
    assert "s left" in lines[4]
    assert shown(total=None)[6].startswith("Eigenpairs: 7 pairs, 30 products, ")
    assert shown(enabled=False) == []


def written(ours: int, theirs: int, progress: bool) -> str:
    """What a fit writes to stderr when that is one end of these."""
    process = start(lambda: fit(theirs, progress))
    os.close(theirs)
    seen = b""
    with open(ours, "rb", buffering=0) as stream, suppress(OSError):  # a terminal's at its end
        while part := stream.read(65536):
            seen += part
    assert end(process) == 0
    return seen.decode()


def on_terminal(progress: bool) -> str:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    return written(ours, theirs, progress)


def test_a_terminal_gets_a_bar_and_a_pipe_does_not():
    seen = on_terminal(True)
    assert all(part in seen for part in ("Eigenpairs of the hessian", "products", "\r"))
    assert on_terminal(False) == ""
    assert "\r" not in written(*os.pipe(), True)


def test_predictions_show_it_as_asked_for(capsys, monkeypatch):
    """`progress` of predict and certify, whatever the fit does."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    model = torch.nn.Linear(4, 3).double()
    data = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3
    for of_fit in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = deltabars.fit(model, data, l2=1.0, rank=4, progress=of_fit)
        capsys.readouterr()
        for asked in (True, False, None):
            expected = of_fit if asked is None else asked
            fitted.predict(data[0], progress=asked)
            assert ("Predicting" in capsys.readouterr().err) is expected
            fitted.certify(data[0][:2], data, progress=asked)
            assert ("Certifying" in capsys.readouterr().err) is expected
    with pytest.raises(deltabars.errors.BadValueError, match="progress: expected True, False or"):
        fitted.predict(data[0], progress="yes")
