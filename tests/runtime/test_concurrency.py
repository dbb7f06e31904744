"""Threads, forks, processes that write to one place, signals; memory and file handles."""

from __future__ import annotations

import copy
import gc
import linecache
import multiprocessing
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
from deltabars.runtime.precision import Shared, Turns, same_bits
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
        cases = [make_case(kind) for kind in ("dense", "rectified", "batch_norm", "convolutional")]
        ways = [(case, kind) for case in cases for kind in ("sandwich", "ggn")]
        own = Stepwise(cases[0].model)
        ways.append((replace(cases[0], model=own), "hessian"))

        def found(case, kind):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ModelWarning)
                return fit_of(copy.deepcopy(case), estimator=kind)

        alone = [found(*way) for way in ways]
        model, inputs = copy.deepcopy(cases[0].model), cases[0].unseen
        weights = {name: value.detach() for name, value in model.named_parameters()}

        def own_derivative():
            def total(weights):
                return torch.func.functional_call(model, weights, inputs).square().sum()

            return torch.func.jvp(torch.func.grad(total), (weights,), (weights,))[1]

        right = own_derivative()

        def work():
            signal.alarm(100)
            is_over, wrong = threading.Event(), []

            def derive():
                while not is_over.wait(0.01):
                    mine = own_derivative()
                    wrong.extend(name for name in mine if not torch.equal(mine[name], right[name]))

            def fit_some(number):
                order = random.Random(number).sample(range(len(ways)), 4)
                return [(k, found(*ways[k])) for k in order]

            with ThreadPoolExecutor(1) as pool:
                user = pool.submit(derive)
                try:
                    for fits in in_threads(fit_some, 3):
                        for k, fit in fits:
                            assert not differing(fit, alone[k])
                            unseen = ways[k][0].unseen
                            assert same(fit.predict(unseen), alone[k].predict(unseen))
                finally:
                    is_over.set()
                user.result()
            assert not wrong

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

    def test_deterministic_algorithms_are_put_back_by_the_last_one_out(self):
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
        assert torch.are_deterministic_algorithms_enabled() is before

    def test_switches_of_the_process_are_put_back(self):
        attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        model = nn.Sequential(nn.Unflatten(1, (1, 4)), attention, nn.Flatten(), nn.Linear(4, 3))
        inputs = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(9) % 3
        switches = (
            torch.backends.mha.get_fastpath_enabled,
            torch.backends.cuda.flash_sdp_enabled,
            torch.backends.cuda.mem_efficient_sdp_enabled,
        )
        before = [switch() for switch in switches]
        assert all(before)
        models = [pickle.loads(pickle.dumps(model)) for _ in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that were not trained
            fits = [
                deltabars.fit(each, (inputs, labels), l2=0.1, rank=3, progress=False)
                for each in models
            ]
        alone = fits[0].predict(inputs)
        found = in_threads(lambda n: fits[n % 4].predict(inputs))
        assert all(same(prediction, alone) for prediction in found)
        assert [switch() for switch in switches] == before

    def test_saving_to_one_file(self, tmp_path):
        case = cached_case("dense")
        fits = [fit_of(case, rank=rank) for rank in (3, 9)]

        def work(number):
            for _ in range(5):
                fits[number % 2].save(tmp_path / "a")
                assert deltabars.load(tmp_path / "a", case.model).rank in (3, 9)

        in_threads(work)
        assert contents(tmp_path) == {"a"}


class TestTurns:
    def test_one_thread_at_a_time_at_an_object(self):
        turns, inside, most = Turns(), [], []
        things = [object(), object()]

        def work(number):
            with turns.at(things[0]), turns.at(things[0]):
                inside.append(number)
                time.sleep(0.002)
                most.append(len(inside))
                inside.remove(number)

        in_threads(work)
        assert max(most) == 1

    def test_the_last_one_out_closes(self):
        events = []

        class Context:
            def __enter__(self):
                events.append("open")

            def __exit__(self, *error):
                events.append("close")

        shared, leave = Shared(Context), threading.Event()

        def work(number):
            with shared():
                if number:
                    leave.wait(10)
            if not number:
                leave.set()

        in_threads(work, 2)
        assert events in (["open", "close"], ["open", "close"] * 2)
        with pytest.raises(KeyError), shared():
            raise KeyError
        assert events[-2:] == ["open", "close"]


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
        assert end(start(work)) == 0  # a process that may die
    tensors, before = live_tensors(), resident()
    for _ in range(times):
        assert end(start(work)) == 0  # a process that may die
    return live_tensors() - tensors, resident() - before


class TestResources:
    def test_a_thousand_predictions_leave_nothing(self):
        case = cached_case("convolutional")
        fit = fit_of(case, estimator="sandwich")
        tensors, grown = growth(lambda: fit.predict(case.unseen), 1000, 50)
        assert tensors == 0
        assert grown < 4 * MIB  # a tensor of the size of F, 7×3×69, kept each time would be 12

    @pytest.mark.parametrize(("estimator", "times", "warm"), [("opg", 50, 8), ("hessian", 8, 3)])
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


def _save_often(path: Path, rank: int, gate) -> None:
    torch.set_num_threads(1)
    case = make_case("dense")
    fit = fit_of(case, rank=rank)
    gate.wait()
    for _ in range(40):
        fit.save(path)


def _save_files_often(path: Path, case, fits, gate) -> None:
    gate.wait()
    for number in range(60):
        fits[number % 2].save(path, max_file_size=2000)


class TestOnePlace:
    def test_two_processes_write_one_file(self, tmp_path):
        case, context = make_case("dense"), multiprocessing.get_context("fork")
        gate = context.Barrier(3)
        writers = [
            context.Process(target=_save_often, args=(tmp_path / "a", rank, gate))
            for rank in (3, 20)
        ]
        for writer in writers:
            writer.start()
        gate.wait()
        seen = set()
        while any(writer.is_alive() for writer in writers):
            if (tmp_path / "a").exists():
                seen.add(deltabars.load(tmp_path / "a", case.model).rank)
        assert [writer.exitcode for writer in writers] == [0, 0]
        assert seen <= {3, 20}
        assert deltabars.load(tmp_path / "a", case.model).rank in seen
        assert contents(tmp_path) == {"a"}

    def test_a_folder_is_loaded_while_it_is_replaced(self, tmp_path):
        case, context = make_case("dense"), multiprocessing.get_context("fork")
        fits = [fit_of(case, rank=rank) for rank in (3, 20)]
        fits[0].save(tmp_path / "a", max_file_size=2000)
        gate = context.Barrier(2)
        writer = context.Process(target=_save_files_often, args=(tmp_path / "a", case, fits, gate))
        writer.start()
        gate.wait()
        seen = set()
        while writer.is_alive():
            seen.add(deltabars.load(tmp_path / "a", case.model).rank)
        assert writer.exitcode == 0
        assert seen == {3, 20}
