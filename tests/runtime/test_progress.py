"""Progress: a bar on a terminal, plain lines elsewhere, nothing when off."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
from contextlib import suppress
from itertools import product

import deltabars
from deltabars.runtime import progress as module
from deltabars.runtime.progress import Progress
from tests.conftest import cached_case
from tests.stopping import end, start


def fit(stderr, progress):
    """A fit in a process whose stderr is that file."""
    sys.stderr, case = os.fdopen(stderr, "w"), cached_case("dense")
    options = {"l2": case.l2, "estimator": "hessian", "rank": 4, "solver": "krylov"}
    deltabars.fit(case.model, case.data, **options, progress=progress)
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


def test_a_terminal_gets_a_bar_and_a_pipe_does_not():
    for progress in (True, False):
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        seen = written(ours, theirs, progress)
        parts = ("Eigenpairs of the hessian", "products", "\r")
        assert all(part in seen for part in parts) if progress else seen == ""
    assert "\r" not in written(*os.pipe(), True)


def test_predictions_show_it_as_asked_for(dense_case, capsys, monkeypatch):
    """`progress` of predict and certify, whatever the fit does."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    model, data, l2 = dense_case.model, dense_case.data, dense_case.l2
    for of_fit, asked in product((True, False), (True, False, None)):
        fitted = deltabars.fit(model, data, l2=l2, rank=4, progress=of_fit)
        capsys.readouterr()
        fitted.predict(data[0], progress=asked)
        fitted.certify(data[0][:2], data, progress=asked)
        said, expected = capsys.readouterr().err, of_fit if asked is None else asked
        assert ("Predicting" in said) is ("Certifying" in said) is expected
