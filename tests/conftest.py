from __future__ import annotations

import os
from functools import lru_cache

import pytest
import torch

from tests.networks import NETWORKS, Case, make_case
from tests.scans import QUICK, Run, deltabars, write_scans
from tests.workshop import Workshop, make_workshop

# The networks are tiny: threads would only wait for one another, badly so on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

cached_case = lru_cache(maxsize=None)(make_case)


@pytest.fixture(params=list(NETWORKS))
def case(request) -> Case:
    """Each kind of network in turn, trained once a session."""
    return cached_case(request.param)


@pytest.fixture
def dense_case() -> Case:
    return cached_case("dense")


@pytest.fixture(scope="session")
def scans(tmp_path_factory):
    """A folder of files in MNIST's format."""
    return write_scans(tmp_path_factory.mktemp("scans"))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory) -> Workshop:
    """A model file, weights, folders of pictures, and a RUN of them; not to be changed."""
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def quick_run(scans, tmp_path_factory) -> Run:
    """`deltabars reproduce` with as little of everything as there can be."""
    out = tmp_path_factory.mktemp("reproduction") / "out"
    done = deltabars("reproduce", "mnist", "--data", scans, "--out", out, *QUICK, "--quiet")
    assert done.returncode == 0, done.stderr
    return Run(scans, out, done)


# The longest first: a worker that begins one at the end keeps the other waiting. (It needs
# --no-loadscope-reorder: of itself xdist begins with the files of most tests.)
LONGEST = (
    "test_reproduction_small",
    "reproduction",
    "test_bench",
    "test_estimators",
    "test_zoo",
)
# What is run once a session is so once a worker: the files that share it go to one of them.
SHARED = {"quick_run": "reproduction"}


def pytest_collection_modifyitems(items):
    files = {item.path: item.path.stem for item in items}
    for item in items:
        for fixture, group in SHARED.items():
            if fixture in getattr(item, "fixturenames", ()):
                files[item.path] = group

    def place(item):
        group = files[item.path]
        return LONGEST.index(group) if group in LONGEST else len(LONGEST)

    items.sort(key=place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(files[item.path]))
