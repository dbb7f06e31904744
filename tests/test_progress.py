"""Progress: a bar on a terminal, plain lines elsewhere, nothing when off."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios

import pytest

from deltabars import progress as module
from deltabars.progress import Progress

FIT = """
import torch, deltabars
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
data = torch.randn(50, 4), torch.randint(0, 3, (50,))
deltabars.fit(model, data, l2=1.0, estimator="hessian", rank=4, solver="krylov", progress=SHOW)
"""


@pytest.fixture
def no_wait(monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)


def test_plain_lines_tell_done_note_and_time_left(no_wait):
    stream = io.StringIO()
    with Progress("Eigenpairs", 10, "pair", stream=stream) as bar:
        bar.show_products(30, 5)
    line = stream.getvalue()
    assert line.startswith("Eigenpairs: 5/10 pairs, 30 products, ")
    assert "s left" in line
    assert line.count("\n") == 1
    assert "\r" not in line


def test_an_unknown_total_is_left_out(no_wait):
    stream = io.StringIO()
    with Progress("Reading", None, "example", stream=stream) as bar:
        bar.show(7, "read")
    assert stream.getvalue().startswith("Reading: 7 examples, read, ")


def test_lines_are_seldom():
    stream = io.StringIO()
    with Progress("Eigenpairs", 10, "pair", stream=stream) as bar:
        for done in range(10):
            bar.show(done)
    assert stream.getvalue() == ""


def test_off_is_silent(no_wait):
    stream = io.StringIO()
    with Progress("Eigenpairs", 10, "pair", enabled=False, stream=stream) as bar:
        bar.show(5)
    assert stream.getvalue() == ""


def run_on_terminal(program: str) -> str:
    """What a program writes to stderr when that is a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], stderr=theirs)
    os.close(theirs)
    seen = b""
    with open(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                part = terminal.read(65536)
            except OSError:  # the program has ended, and everything is read
                break
            seen += part
    assert process.wait() == 0
    return seen.decode()


def test_a_terminal_gets_a_bar_with_products():
    seen = run_on_terminal(FIT.replace("SHOW", "True"))
    assert "Eigenpairs of the hessian" in seen
    assert "products" in seen
    assert "\r" in seen


def test_a_terminal_gets_nothing_with_progress_false():
    assert run_on_terminal(FIT.replace("SHOW", "False")) == ""


def test_a_pipe_gets_no_bar():
    program = FIT.replace("SHOW", "True")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert "\r" not in done.stderr
