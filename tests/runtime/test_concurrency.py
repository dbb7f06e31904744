"""Threads, forks, processes that write to one place, signals; memory and file handles."""

from __future__ import annotations

import copy
import gc
import linecache
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import deltabars
from deltabars.errors import ModelWarning
from tests.conftest import cached_case
from tests.networks import make_case
from tests.stopping import differing, end, start
from tests.workshop import contents

FIELDS = ("mean", "std", "std_error", "std_low", "std_high", "score", "label")
MIB = 1 << 20


def fit_of(case, **options) -> deltabars.DeltaFit:
    arguments = {"l2": case.l2, "rank": 6, "estimator": "opg", "progress": False, **options}
    return deltabars.fit(case.model, arguments.pop("data", case.data), **arguments)


def same(a, b) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def in_threads(work, count: int = 8) -> list:
    """The results of work(0), work(1) …"""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


@pytest.fixture
def eager_switches():
    """Threads take turns far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Stepwise(nn.Sequential):
    """A network whose Hessian products cannot be traced: its way depends on the numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x[:, 0].nonzero()) else -x)


@pytest.mark.usefixtures("eager_switches")
class TestThreads:
    @pytest.mark.parametrize("kind", ["dense", "batch_norm", "shared"])
    def test_predictions_are_those_of_one_thread(self, kind):
        case = make_case(kind)
        case.model.train()  # dropout would show, and so would statistics of the batch
        fit = fit_of(case, estimator="sandwich")
        state = case.model.state_dict(keep_vars=True)
        numbers = {name: value.clone() for name, value in state.items()}

        def predictions(fit, number=0):
            return [fit.predict(case.unseen[: n + 1]) for n in range(7)]

        alone = predictions(fit)
        fresh = pickle.loads(pickle.dumps(fit))  # nothing is known yet of its layers
        filters = list(warnings.filters)
        for each in (fit, fresh):
            for found in in_threads(partial(predictions, each)):
                assert all(map(same, found, alone))
        assert all(module.training for module in case.model.modules())
        for name, value in case.model.state_dict(keep_vars=True).items():
            assert value is state[name]
            assert torch.equal(value, numbers[name])
        assert warnings.filters == filters
        assert torch.backends.mha.get_fastpath_enabled()

    def test_fits_are_those_of_one_thread(self):
        """Beside the user's own forward derivatives, which have one level in the process."""
        torch.set_num_threads(1)
        cases = [make_case(kind) for kind in ("dense", "batch_norm", "convolutional")]
        ways = [(case, kind) for case in cases for kind in ("sandwich", "ggn")]
        ways.append((replace(cases[0], model=Stepwise(*cases[0].model)), "hessian"))

        def found(case, kind):
            loader = DataLoader(TensorDataset(*case.data), 16, shuffle=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ModelWarning)
                return fit_of(copy.deepcopy(case), estimator=kind, data=loader)

        def own_derivative(x=cases[0].unseen):
            time.sleep(0.01)  # with pauses, in which ours can begin
            of = torch.func.grad(lambda x: cases[0].model(x).square().sum())
            return torch.func.jvp(of, (x,), (x,))[1]

        alone, right = [found(*way) for way in ways], own_derivative()
        state = torch.get_rng_state()

        def fit_some(number):
            if not number:
                return [torch.equal(own_derivative(), right) for _ in range(100)]
            order = random.Random(number).sample(range(len(ways)), 4)
            return [not differing(found(*ways[k]), alone[k]) for k in order]

        def work():
            signal.alarm(300)  # on a machine with other work
            assert all(all(same) for same in in_threads(fit_some, 4))
            assert torch.equal(torch.get_rng_state(), state)

        assert end(start(work)) == 0  # a process that may die


class Predicted(TensorDataset):
    """Error bars as items: each is predicted where the item is asked for."""

    fit: deltabars.DeltaFit

    def __getitem__(self, number: int) -> Tensor:
        return self.fit.predict(self.tensors[0][number : number + 1]).std[0]


class TestProcesses:
    @pytest.mark.parametrize("way", ["fork", "spawn"])
    def test_prediction_in_a_worker_of_a_loader(self, way):
        case = cached_case("dense")
        items = Predicted(case.unseen)
        items.fit = fit_of(case)
        loader = DataLoader(items, 3, num_workers=1, multiprocessing_context=way)
        assert torch.equal(torch.cat(list(loader)), torch.stack([items[n] for n in range(7)]))

    def test_a_fork_while_another_thread_predicts(self):
        case = make_case("dense")
        inside, leave = threading.Event(), threading.Event()
        parent = os.getpid()

        def wait(module, arguments):
            if os.getpid() == parent and threading.current_thread() is not threading.main_thread():
                inside.set()
                leave.wait(20)

        case.model.register_forward_pre_hook(wait)
        fit = fit_of(case)
        here = fit.predict(case.unseen).std
        thread = threading.Thread(target=fit.predict, args=(case.unseen,))
        thread.start()
        assert inside.wait(20)
        child = os.fork()
        if child == 0:  # the other thread is not here, and what it held cannot be given back
            signal.alarm(20)
            os._exit(0 if torch.equal(fit.predict(case.unseen).std, here) else 3)
        status = os.waitpid(child, 0)[1]
        leave.set()
        thread.join()
        assert os.waitstatus_to_exitcode(status) == 0


def held() -> tuple[int, int]:
    """The tensors of the process, and its bytes in memory."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return tensors, pages * os.sysconf("SC_PAGESIZE")


# A tensor of the size of F, 7×3×69, kept each time would be 5 MiB; fits' allocators take 12.
@pytest.mark.parametrize(
    ("kind", "times", "warm", "most"),
    [("predict", 400, 50, 4 * MIB), ("opg", 30, 8, 24 * MIB), ("hessian", 8, 3, 24 * MIB)],
)
def test_nothing_is_left_in_memory(kind, times, warm, most, tmp_path):
    case, known = cached_case("convolutional" if kind == "predict" else "dense"), []
    fit = fit_of(case, estimator="sandwich")

    def work():
        if kind == "predict":
            fit.predict(case.unseen)
        else:
            fit_of(case, estimator=kind).save(tmp_path / "a")
            deltabars.load(tmp_path / "a", case.model)
        known.append(len(linecache.cache))  # torch would put the text of graphs there

    for _ in range(warm):
        work()
    tensors, before = held()
    for _ in range(times):
        work()
    assert held()[0] == tensors
    assert held()[1] - before < most
    assert known[-1] == known[warm]


def test_a_fit_is_loaded_while_processes_replace_it(tmp_path):
    case, path, stop = make_case("dense"), tmp_path / "a", tmp_path / "stop"
    fits = [fit_of(case, rank=rank) for rank in (3, 20)]
    fits[0].save(path)

    def write():
        while not stop.exists():
            for fit in fits:
                fit.save(path)

    writers = [start(write) for _ in range(2)]
    seen = set()
    while len(seen) < 2:
        seen.add(deltabars.load(path, case.model).rank)
    stop.touch()
    assert [end(writer) for writer in writers] == [0, 0]
    assert deltabars.load(path, case.model).rank in seen == {3, 20}
    assert contents(tmp_path) == {"a", "stop"}
