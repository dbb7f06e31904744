"""What is done with little memory: chunks that fit, and smaller ones where memory runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from itertools import chain

import pytest
import torch

from deltabars.errors import BadValueError, MemoryWarning, NotEnoughMemoryError
from deltabars.problem.data import Batch
from deltabars.runtime.memory import (
    ChunkSize,
    attempt,
    chunk_within,
    ran_out,
    resolve_budget,
)

CPU = torch.device("cpu")
PLENTY = 1 << 50


def run_out():
    """A real failure: more than a 64-bit processor can address."""
    torch.empty(1 << 60, dtype=torch.uint8)


def batch(start, stop):
    return Batch(torch.arange(start, stop), None)


def sizes_and_sum(limit, seen):
    """Work that there is memory for up to `limit` examples at a time."""

    def work(part):
        seen.append(len(part))
        if len(part) > limit:
            run_out()
        return part.inputs.tolist()

    return work


def test_real_failures_are_known():
    with pytest.raises(RuntimeError) as failure:
        run_out()
    assert ran_out(failure.value)
    assert ran_out(MemoryError())
    assert ran_out(torch.OutOfMemoryError("CUDA out of memory."))
    assert not ran_out(RuntimeError("shapes do not match"))
    assert attempt(run_out) is None
    assert attempt(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="size mismatch"):
        attempt(lambda: torch.zeros(2, 3) @ torch.zeros(2))


@pytest.mark.parametrize(
    ("budget", "each", "most", "expected"),
    [
        (PLENTY, 1, 1000, 1000),  # no more than there are
        (8 << 30, 100_000, 10_000, 2048),
        (2 << 30, 100_000, 10_000, 2048),  # whatever happens to be free
        (PLENTY, 1 << 20, 1000, 256),  # a quarter of a gibibyte, however much is free
        (PLENTY, (1 << 20) + 1, 1000, 128),  # the power of two below 255.99
        (PLENTY, 1 << 40, 1000, 1),  # one at least
        (PLENTY, 0, 7, 7),
        (1, 1 << 20, 1000, 1),
        (64 << 20, 1 << 20, 1000, 16),  # a quarter of a scarce budget
        (64 << 20, 1 << 20, 5, 5),
    ],
)
def test_chunks_take_a_nominal_amount_or_less(budget, each, most, expected):
    assert chunk_within(budget, each, most, CPU) == expected


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "1e9"])
def test_budgets_are_whole_numbers_of_bytes(wrong):
    with pytest.raises(BadValueError, match="memory_budget: expected a whole number of bytes"):
        resolve_budget(wrong, CPU)


def test_chunks_are_halved_and_no_example_is_lost_or_moved():
    seen = []
    size = ChunkSize(1000)
    with pytest.warns(MemoryWarning, match=r"room for 20 examples .* continuing with 10") as caught:
        results = list(size.each([batch(0, 20), batch(20, 31)], sizes_and_sum(3, seen)))
    assert len(caught) == 1  # though memory ran out more than once
    assert [*chain(*results)] == list(range(31))
    assert seen[:4] == [20, 10, 5, 3]
    assert max(seen[3:]) == 3  # what was too much once is not tried again
    results = list(size.each([batch(0, 9)], sizes_and_sum(2, seen)))  # a warning were an error
    assert [*chain(*results)] == list(range(9))
    assert size.value == 2
    other = size.at_most(1)
    with pytest.raises(NotEnoughMemoryError, match=r"room for one example .*params="):
        list(other.each([batch(0, 4)], sizes_and_sum(0, [])))


def test_other_errors_are_not_swallowed():
    def work(part):
        raise RuntimeError("the model is wrong")

    with pytest.raises(RuntimeError, match="the model is wrong"):
        list(ChunkSize(4).each([batch(0, 4)], work))


# Each activation of all examples together takes half as much again as is left to the process.
LIMITED = textwrap.dedent("""
    import json, resource, sys, warnings
    import torch
    from torch import nn
    import deltabars
    from deltabars.errors import MemoryWarning

    WIDTH, COUNT, SMALL, ROOM = 1024, 3072, 64, 16 << 20
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    data = torch.randn(COUNT, 8).double(), torch.randint(0, 3, (COUNT,))
    options = {
        "l2": 0.1, "rank": 1, "solver": "krylov", "residual_tolerance": 1e-6,
        "params": ["*.bias"], "memory_budget": 64 << 20, "progress": False,
    }

    def fit(estimator, batch_size, data=data):
        fit = deltabars.fit(model, data, estimator=estimator, batch_size=batch_size, **options)
        return fit.spectra[estimator].values

    def predict(batch_size):
        return fitted.predict(data[0], batch_size=batch_size).std

    def held():
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("VmSize"))
        return int(line.split()[1]) * 1024

    def room(size):
        most = resource.RLIM_INFINITY if size is None else held() + size
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

    results = {}
    warnings.simplefilter("ignore")
    few = (data[0][:64], data[1][:64])
    fitted = deltabars.fit(model, few, estimator="opg", **options)
    works = {
        "hessian": lambda size: fit("hessian", size),
        "opg": lambda size: fit("opg", size),
        "predict": predict,
    }
    for name, work in works.items():
        expected = work(SMALL)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MemoryWarning)
            room(ROOM)
            got = work(COUNT)
            room(None)
        scale = float(expected.abs().max())
        results[name] = {
            "error": float((got - expected).abs().max()) / scale,
            "warnings": [str(w.message) for w in caught if w.category is MemoryWarning],
        }
    print(json.dumps(results))
""")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_where_memory_runs_out_the_work_continues_with_smaller_chunks():
    """Fits and a prediction in a process whose memory is limited, given far too large chunks."""
    # So that what is freed goes back to the system, and the limit holds for what is in use.
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "2097152"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, env=os.environ | settings
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == ["hessian", "opg", "predict"]
    for each in found.values():
        assert len(each["warnings"]) == 1
        assert "room for 3072 examples at a time" in each["warnings"][0]
        # Residuals of 1e-6 let eigenvalues differ by their squares; predictions by rounding.
        assert each["error"] < 1e-10
