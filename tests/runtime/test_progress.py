"""Progress: a bar on a terminal, plain lines elsewhere, nothing when off."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
import time
import warnings
from contextlib import suppress

import pytest
import torch

import deltabars
from deltabars.fitting import forecast as forecasting
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


@pytest.fixture
def no_wait(monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)


def test_plain_lines_tell_done_note_and_time_left(no_wait):
    stream = io.StringIO()
    with Progress("Eigenpairs", 10, "pair", stream=stream) as bar:
        bar.show(5, "30 products")
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


def test_a_terminal_gets_a_bar_with_products():
    seen = on_terminal(True)
    assert "Eigenpairs of the hessian" in seen
    assert "products" in seen
    assert "\r" in seen


def test_a_terminal_gets_nothing_with_progress_false():
    assert on_terminal(False) == ""


def test_a_pipe_gets_no_bar():
    assert "\r" not in written(*os.pipe(), True)


def test_predictions_show_it_as_asked_for(no_wait, capsys):
    """`progress` of predict and certify, whatever the fit does."""
    model = torch.nn.Linear(4, 3).double()
    data = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3
    for of_fit in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = deltabars.fit(model, data, l2=1.0, rank=4, progress=of_fit)
        capsys.readouterr()
        for asked in (True, False, None):
            shown = of_fit if asked is None else asked
            fitted.predict(data[0], progress=asked)
            assert ("Predicting" in capsys.readouterr().err) is shown
            fitted.certify(data[0][:2], data, progress=asked)
            assert ("Certifying" in capsys.readouterr().err) is shown
    with pytest.raises(deltabars.errors.BadValueError, match="progress: expected True, False or"):
        fitted.predict(data[0], progress="yes")


class Slow(torch.nn.Module):
    """A network that takes its time."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(12, 30), torch.nn.Tanh(), torch.nn.Linear(30, 10)
            )
        self.double()

    def forward(self, inputs):
        time.sleep(0.004)
        return self.layers(inputs)


@pytest.mark.parametrize(
    ("options", "cheaper"),
    [
        ({"estimator": "ggn", "rank": 20}, ["estimator='opg'", "in place of 10", "last_layer()"]),
        (
            {"estimator": "hessian", "rank": 10, "memory_budget": 400_000},
            ["estimator='opg'", "last_layer()"],
        ),
        ({"estimator": "ggn", "rank": "auto", "solver": "krylov"}, ["a larger tolerance"]),
    ],
)
def test_the_time_is_foreseen_and_a_cheaper_way_is_named(options, cheaper, capsys, monkeypatch):
    """From the first products, about right, and said once where it is long."""
    monkeypatch.setattr(forecasting, "_WORTH_SAYING", 0.1)  # seconds, for a minute
    monkeypatch.setattr(forecasting, "_ENOUGH", 0.01)
    data = torch.randn(60, 12, dtype=torch.float64), torch.arange(60) % 10
    given = {"l2": 0.05, "batch_size": 15, "memory_budget": 8_000_000, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = deltabars.fit(Slow(), data, **given)
    name = options["estimator"]
    told = fitted.diagnostics["forecast"][name]
    lines = [line for line in capsys.readouterr().err.splitlines() if "expected about" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"Eigenpairs of the {name}: expected about")
    assert " products of " in lines[0]
    assert [words for words in cheaper if words not in lines[0]] == [], lines
    assert 0 < told["seconds_each"] < told["seconds"]
    assert 0 < told["bytes"] < 10_000_000
    if options["rank"] != "auto":
        took = fitted.diagnostics[name]["seconds"]
        assert took / 4 < told["seconds"] < 4 * took  # on a machine that is busy with other things


def test_what_is_short_is_not_spoken_of(capsys):
    data = torch.randn(60, 12, dtype=torch.float64), torch.arange(60) % 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = deltabars.fit(Slow(), data, l2=0.05, rank=10)
    assert "expected about" not in capsys.readouterr().err
    assert set(fitted.diagnostics["forecast"]) == {"opg"}
