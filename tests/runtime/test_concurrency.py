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
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import deltabars
from deltabars.errors import ModelWarning
from deltabars.runtime.precision import same_bits
from tests.conftest import cached_case
from tests.networks import make_case
from tests.stopping import differing, end, start
from tests.workshop import contents

THREADS = 8
FIELDS = ("mean", "std", "std_error", "std_low", "std_high", "score", "label")
MIB = 1 << 20


def fit_of(case, **options) -> deltabars.DeltaFit:
    arguments = {"l2": case.l2, "rank": 6, "estimator": "opg", "progress": False, **options}
    return deltabars.fit(case.model, arguments.pop("data", case.data), **arguments)


def same(a, b) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def in_threads(work, count: int = THREADS) -> list:
    """The results of work(0), work(1) …, begun at the same moment."""
    gate = threading.Barrier(count)

    def begin(number):
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.fixture
def eager_switches():
    """Threads take turns far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Stepwise(nn.Module):
    """A network whose Hessian products cannot be traced: its way depends on the numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) if len(x[:, 0].nonzero()) else self.model(-x)


@pytest.mark.usefixtures("eager_switches")
class TestThreads:
    @pytest.mark.parametrize("kind", ["dense", "batch_norm", "shared"])
    def test_predictions_are_those_of_one_thread(self, kind):
        case = make_case(kind)
        case.model.train()  # dropout would show, and so would statistics of the batch
        fit = fit_of(case, estimator="sandwich")
        weights = dict(case.model.named_parameters())
        numbers = [value.clone() for value in case.model.state_dict().values()]
        alone = [fit.predict(case.unseen[: n + 1]) for n in range(7)]
        fresh = pickle.loads(pickle.dumps(fit))  # nothing is known yet of its layers
        filters = list(warnings.filters)
        for each in (fit, fresh):
            found = in_threads(
                lambda number, each=each: [each.predict(case.unseen[: n + 1]) for n in range(7)]
            )
            for predictions in found:
                assert all(map(same, predictions, alone))
        assert case.model.training
        assert all(module.training for module in case.model.modules())
        assert dict(case.model.named_parameters()).keys() == weights.keys()
        for name, value in case.model.named_parameters():
            assert value is weights[name]
        assert all(map(torch.equal, case.model.state_dict().values(), numbers))
        assert warnings.filters == filters

    def test_fits_are_those_of_one_thread(self):
        """Beside the user's own forward derivatives, which have one level in the process."""
        torch.set_num_threads(1)
        cases = [make_case(kind) for kind in ("dense", "batch_norm", "convolutional")]
        ways = [(case, kind) for case in cases for kind in ("sandwich", "ggn")]
        ways.append((replace(cases[0], model=Stepwise(cases[0].model)), "hessian"))

        def found(case, kind):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ModelWarning)
                return fit_of(copy.deepcopy(case), estimator=kind)

        def own_derivative(x=cases[0].unseen):
            time.sleep(0.01)  # with pauses, in which ours can begin
            of = torch.func.grad(lambda x: cases[0].model(x).square().sum())
            return torch.func.jvp(of, (x,), (x,))[1]

        alone, right = [found(*way) for way in ways], own_derivative()

        def fit_some(number):
            if not number:
                return [torch.equal(own_derivative(), right) for _ in range(100)]
            order = random.Random(number).sample(range(len(ways)), 4)
            return [not differing(found(*ways[k]), alone[k]) for k in order]

        def work():
            signal.alarm(100)
            assert all(all(same) for same in in_threads(fit_some, 4))

        assert end(start(work)) == 0  # a process that may die

    def test_random_numbers_of_loaders_are_those_of_one_thread(self):
        case = cached_case("dense")
        pairs = list(zip(*case.data, strict=True))
        torch.manual_seed(7)
        state = torch.get_rng_state()

        def work(number):
            loader = DataLoader(pairs, 4, shuffle=True)
            return [fit_of(case, data=loader) for _ in range(2)]

        alone = work(0)[0]
        for fits in in_threads(work, 4):
            assert not any(differing(fit, alone) for fit in fits)
        assert torch.equal(torch.get_rng_state(), state)

    def test_attention_keeps_its_switches(self):
        attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        model = nn.Sequential(nn.Unflatten(1, (1, 4)), attention, nn.Flatten(), nn.Linear(4, 3))
        inputs = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
        switches = (
            torch.backends.mha.get_fastpath_enabled,
            torch.backends.cuda.flash_sdp_enabled,
            torch.backends.cuda.mem_efficient_sdp_enabled,
        )
        assert all(switch() for switch in switches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that were not trained
            data, options = (inputs, torch.arange(9) % 3), {"l2": 0.1, "rank": 3, "progress": False}
            fits = [deltabars.fit(copy.deepcopy(model), data, **options) for _ in range(4)]
        alone = fits[0].predict(inputs)
        assert all(same(each, alone) for each in in_threads(lambda n: fits[n % 4].predict(inputs)))
        assert all(switch() for switch in switches)


def test_switches_are_put_back_by_the_last_one_out():
    before = torch.are_deterministic_algorithms_enabled()
    entered, leave = threading.Barrier(2), threading.Event()

    def work(number):
        with same_bits(True):
            entered.wait(10)
            if number:
                leave.wait(10)
            is_on = torch.are_deterministic_algorithms_enabled()
        leave.set()
        return is_on

    assert in_threads(work, 2) == [True, True]
    with pytest.raises(KeyError), same_bits(True):
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() is before


class Predicted(Dataset):
    """Error bars as items: each is predicted where the item is asked for."""

    def __init__(self, fit: deltabars.DeltaFit, inputs: Tensor) -> None:
        self.fit, self.inputs = fit, inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> Tensor:
        return self.fit.predict(self.inputs[number : number + 1]).std[0]


class TestProcesses:
    @pytest.mark.parametrize("way", ["fork", "spawn"])
    def test_prediction_in_a_worker_of_a_loader(self, way):
        case = cached_case("dense")
        fit = fit_of(case)
        here = torch.stack([Predicted(fit, case.unseen)[n] for n in range(7)])
        loader = DataLoader(
            Predicted(fit, case.unseen), 3, num_workers=1, multiprocessing_context=way
        )
        assert torch.equal(torch.cat(list(loader)), here)

    def test_a_fork_while_another_thread_predicts(self):
        case = make_case("dense")
        inside, leave = threading.Event(), threading.Event()
        parent = os.getpid()

        def wait(module, arguments):
            if os.getpid() == parent and threading.current_thread() is not threading.main_thread():
                inside.set()
                leave.wait(20)

        handle = case.model.register_forward_pre_hook(wait)
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
        handle.remove()
        assert os.waitstatus_to_exitcode(status) == 0


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def growth(work, times: int, warm: int) -> tuple[int, int]:
    """By how many tensors and bytes the process grows, after some turns to get warm."""
    for _ in range(warm):
        work()
    tensors, before = live_tensors(), resident()
    for _ in range(times):
        work()
    return live_tensors() - tensors, resident() - before


class TestResources:
    def test_predictions_leave_nothing(self):
        case = cached_case("convolutional")
        fit = fit_of(case, estimator="sandwich")
        tensors, grown = growth(lambda: fit.predict(case.unseen), 400, 50)
        assert tensors == 0
        assert grown < 4 * MIB  # a tensor of the size of F, 7×3×69, kept each time would be 5

    @pytest.mark.parametrize(("estimator", "times", "warm"), [("opg", 30, 8), ("hessian", 8, 3)])
    def test_fits_leave_nothing(self, estimator, times, warm, tmp_path):
        case = cached_case("dense")
        known = []

        def work():
            fit = fit_of(case, estimator=estimator)
            fit.save(tmp_path / "a")
            deltabars.load(tmp_path / "a", case.model)
            known.append(len(linecache.cache))  # torch would put the text of graphs there

        tensors, grown = growth(work, times, warm)
        assert tensors == 0
        assert known[-1] == known[warm]
        assert grown < 24 * MIB  # of which the allocator takes half, in the first fits


@pytest.mark.parametrize("options", [{}, {"max_file_size": 2000}], ids=["file", "folder"])
def test_a_fit_is_loaded_while_processes_replace_it(tmp_path, options):
    case, path = make_case("dense"), tmp_path / "a"
    fits = [fit_of(case, rank=rank) for rank in (3, 20)]
    fits[0].save(path, **options)

    def write():
        for number in range(40):
            fits[number % 2].save(path, **options)

    writers = [start(write) for _ in range(1 if options else 2)]
    seen = set()
    while len(seen) < 2:
        seen.add(deltabars.load(path, case.model).rank)
    assert [end(writer) for writer in writers] == [0] * len(writers)
    assert deltabars.load(path, case.model).rank in seen == {3, 20}
    assert options or contents(tmp_path) == {"a"}
