"""What is done with little memory: chunks that fit, and smaller ones where memory runs out."""

from __future__ import annotations

import ctypes
import re
import resource
import subprocess
import sys
import warnings
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import MemoryWarning, NotEnoughMemoryError
from deltabars.problem.data import Batch
from deltabars.runtime.memory import ChunkSize, attempt, chunk_within, ran_out

CPU = torch.device("cpu")
PLENTY = 1 << 50


def run_out():
    """A real failure: more than a 64-bit processor can address."""
    torch.empty(1 << 60, dtype=torch.uint8)


def done(size, limit, *ends):
    """The examples and chunks that are processed, of batches with memory for `limit` at a time."""
    seen = []

    def work(part):
        seen.append(len(part))
        if len(part) > limit:
            run_out()
        return part.inputs.tolist()

    batches = [Batch(torch.arange(a, b), None) for a, b in pairwise((0, *ends))]
    return [*chain(*size.each(batches, work))], seen


def test_real_failures_are_known():
    assert all(map(ran_out, (MemoryError(), torch.OutOfMemoryError("CUDA out of memory."))))
    assert attempt(run_out) is None
    with pytest.raises(RuntimeError, match="size mismatch"):
        attempt(lambda: torch.zeros(2, 3) @ torch.zeros(2))


@pytest.mark.parametrize(
    ("budget", "each", "most", "expected"),
    [
        (PLENTY, 1, 1000, 1000),  # no more than there are
        (PLENTY, 1 << 20, 1000, 256),  # a quarter of a gibibyte, however much is free
        (PLENTY, (1 << 20) + 1, 1000, 128),  # the power of two below 255.99
        (PLENTY, 0, 7, 7),
        (1, 1 << 20, 1000, 1),  # one at least
        (64 << 20, 1 << 20, 1000, 16),  # a quarter of a scarce budget
    ],
)
def test_chunks_take_a_nominal_amount_or_less(budget, each, most, expected):
    assert chunk_within(budget, each, most, CPU) == expected


def test_chunks_are_halved_and_no_example_is_lost_or_moved():
    size = ChunkSize(1000)
    with pytest.warns(MemoryWarning, match=r"room for 20 examples .* continuing with 10") as caught:
        examples, seen = done(size, 3, 20, 31)
    assert len(caught) == 1  # though memory ran out more than once
    assert examples == list(range(31))
    assert seen[:4] == [20, 10, 5, 3]
    assert max(seen[3:]) == 3  # what was too much once is not tried again
    assert done(size, 2, 9)[0] == list(range(9))  # a warning were an error
    assert size.value == 2
    with pytest.raises(NotEnoughMemoryError, match=r"room for one example .*params="):
        done(size.at_most(1), 0, 4)


def work_with_little_memory():
    """Fits and a prediction where each activation of all examples takes more than there is."""
    ctypes.CDLL(None).mallopt(-3, 2 << 20)  # what is freed goes back to the system
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 3)).double()
    data = torch.randn(3072, 8).double(), torch.randint(0, 3, (3072,))
    options = {
        "l2": 0.1, "rank": 1, "solver": "krylov", "residual_tolerance": 1e-6,
        "params": ["*.bias"], "memory_budget": 128 << 20, "progress": False,
    }  # fmt: skip

    def values(name, size):
        fit = deltabars.fit(model, data, estimator=name, batch_size=size, **options)
        return fit.spectra[name].values

    def limit(room):
        (line,) = re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
        most = int(line) * 1024 + room if room else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    warnings.simplefilter("ignore")
    small = deltabars.fit(model, [part[:64] for part in data], **options)
    predicted = lambda size: small.predict(data[0], batch_size=size).std  # noqa: E731
    for work in (partial(values, "hessian"), partial(values, "opg"), predicted):
        expected = work(64)
        limit(40 << 20)  # below one activation of all, far above what 64 examples take
        with pytest.warns(MemoryWarning, match="room for 3072 examples at a time") as caught:
            found = work(3072)
        limit(None)
        assert sum(each.category is MemoryWarning for each in caught) == 1
        # Residuals of 1e-6 let eigenvalues differ by their squares; predictions by rounding.
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_where_memory_runs_out_the_work_continues_with_smaller_chunks():
    code = "from tests.runtime.test_memory import work_with_little_memory as work; work()"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
