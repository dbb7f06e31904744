from __future__ import annotations

import gc
import os
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.networks import NETWORKS, Case, make_case
from tests.scans import QUICK, Run, deltabars, write_scans
from tests.workshop import Workshop, make_workshop

# The networks are tiny: threads would only wait for one another, badly so on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

# The same examples every time, so that a failure is the change's; `make torture` looks further.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=6,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("fixed")

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


# The longest files, longest first: a worker that begins one at the end keeps the other waiting.
LONGEST = (
    "test_reproduction", "test_reproduction_numbers", "test_docs", "test_distributed",
    "test_estimators", "test_checkpoints", "test_package", "test_storage", "test_reached",
    "test_bench", "test_losses", "test_zoo", "test_concurrency", "test_properties", "test_memory",
    "test_regression", "test_hostile", "test_reference", "test_commands_processes",
    "test_numerical", "test_scoring_at_scale", "test_report_browser",
)  # fmt: skip
# What is made once a session is made once a worker: the files of quick_run go to one of them.
TOGETHER = LONGEST[:2]


def pytest_collection_modifyitems(items):
    def place(item):
        stem = item.path.stem
        return LONGEST.index(stem) if stem in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """Many tests collect garbage, or fork: all that is imported by now is left out of that."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole files to a worker, in the order above; of itself xdist begins with those of most tests,
    and the longest one, which has few, would come last.
    """
    from xdist.scheduler import LoadFileScheduling

    class InOrder(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return TOGETHER[0] if Path(file).stem in TOGETHER else file

    config.option.loadscopereorder = False
    return InOrder(config, log)
