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
import subprocess
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
from deltabars.cli.entry import main
from deltabars.cli.runs import Kept, Run
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.errors import DataWarning, DeltaBarsError, ModelWarning, StorageError
from deltabars.report.page import save_report
from deltabars.runtime.precision import Shared, Turns, same_bits
from deltabars.storage import format as storage
from tests.conftest import cached_case
from tests.networks import make_case
from tests.scans import command, environment
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


class Doubled(torch.autograd.Function):
    """A function without forward derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, back):
        return 2 * back


class Stepwise(nn.Module):
    """A network whose Hessian products cannot be traced."""

    def __init__(self, model: nn.Module, way: str) -> None:
        super().__init__()
        self.model, self.way = model, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "own":
            return Doubled.apply(self.model(x)) / 2
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
        kinds = ("dense", "convolutional", "linear", "rectified")
        cases = [make_case(kind) for kind in kinds]
        alone = [fit_of(case).predict(case.unseen) for case in cases]
        found = in_threads(lambda n: fit_of(cases[n % 4]).predict(cases[n % 4].unseen))
        for number, prediction in enumerate(found):
            assert same(prediction, alone[number % 4])

    def test_hessian_fits_are_those_of_one_thread(self):
        """Beside the user's own forward derivatives, which have one level in the process."""
        torch.set_num_threads(1)
        cases = [make_case(kind) for kind in ("dense", "rectified", "batch_norm")]
        cases += [replace(cases[0], model=Stepwise(cases[0].model, way)) for way in ("item", "own")]
        ways = [(case, kind) for case in cases for kind in ("hessian", "sandwich")]
        ways += [(case, kind) for case in cases[:2] for kind in ("ggn", "opg")]

        def found(case, kind):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ModelWarning)
                return fit_of(copy.deepcopy(case), estimator=kind)

        alone = [found(*way) for way in ways]
        weights = {name: value.detach() for name, value in cases[0].model.named_parameters()}

        def own_derivative():
            def total(weights):
                called = torch.func.functional_call(cases[0].model, weights, cases[0].unseen)
                return called.square().sum()

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
                    for own in in_threads(fit_some, 3):
                        for k, fit in own:
                            assert not differing(fit, alone[k])
                            case = ways[k][0]
                            assert same(fit.predict(case.unseen), alone[k].predict(case.unseen))
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

    def test_a_fork_after_threads_of_torch(self):
        model = nn.Sequential(nn.Linear(300, 20), nn.Tanh(), nn.Linear(20, 4))
        inputs = torch.randn(400, 300, generator=torch.Generator().manual_seed(0))

        def work():
            torch.set_num_threads(2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of weights that were not trained
                fit = deltabars.fit(
                    model, (inputs, torch.arange(400) % 4), l2=0.1, rank=3, progress=False
                )
            here = fit.predict(inputs).std
            assert len(os.listdir("/proc/self/task")) > 1

            def predict():
                signal.alarm(60)
                torch.set_num_threads(1)  # as DataLoader does: threads do not outlive a fork
                assert torch.allclose(fit.predict(inputs).std, here, rtol=1e-4)

            assert end(start(predict)) == 0

        assert end(start(work)) == 0  # a process of its own: this one has one thread

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

    def test_files_are_closed(self, workshop, tmp_path):
        fit = workshop.fit()
        broken = tmp_path / "broken"
        broken.write_bytes((workshop.run / "fit.deltabars").read_bytes()[:-7])
        data = [workshop.folder / name for name in ("train", "test", "flat", "test.npz")]

        def work():
            fit.save(tmp_path / "a")
            deltabars.load(tmp_path / "a", workshop.model)
            for read in (
                lambda: deltabars.load(broken, workshop.model),
                lambda: storage.read_header(broken),
                NamedData(str(broken)).load,
                NamedModel(f"{workshop.folder / 'net.py'}:make", str(broken)).load,
                lambda: Run.open(tmp_path),
            ):
                with pytest.raises(DeltaBarsError):
                    read()
            for place in data:
                source = NamedData(str(place)).load()
                source.dataset[0]
                source.picture(0)
            run = Run.open(workshop.run)
            run.load_fit(progress=False)
            save_report(tmp_path / "r.html", fit, workshop.test[0])

        work()
        before = sorted(os.listdir("/proc/self/fd"))
        work()
        assert sorted(os.listdir("/proc/self/fd")) == before


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


def _create(path: Path, rank: int, gate, answers) -> None:
    torch.set_num_threads(1)
    case = make_case("dense")
    fit = fit_of(case, rank=rank)
    won = []
    for overwrite in (False, True):
        for number in range(10):
            gate.wait()
            try:
                Run.create(
                    path / str(number), fit, NamedModel("tests.networks:dense"),
                    NamedData("some.npz"), overwrite=overwrite,
                )  # fmt: skip
                won.append((number, overwrite))
            except StorageError:
                continue
    answers.put((rank, won))


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

    def test_a_prediction_stays_with_its_fit(self, workshop, tmp_path):
        """The RUN is replaced while a command predicts with it."""
        named = NamedModel("a:b"), NamedData("c.npz")
        before = Run.create(tmp_path / "run", workshop.fit(rank=5), *named)
        inputs = workshop.test[0][:4]
        prediction = workshop.fit(rank=5).predict(inputs)
        kept = Kept(prediction, ("a", "b", "c", "d"), None, named[1], {"fingerprint": "f"})
        old = before.keep(kept)
        assert before.latest() is not None
        assert before.find(named[1], kept.about) is not None
        content = old.read_bytes()
        after = Run.create(tmp_path / "run", workshop.fit(rank=7), *named, overwrite=True)
        assert after.find(named[1], kept.about) is None
        with pytest.raises(StorageError, match="has replaced it in the meantime"):
            before.keep(kept)
        assert contents(tmp_path / "run") == {"fit.deltabars", "run.json"}
        after.keep(kept)  # and then the old file comes in its place
        (new,) = (tmp_path / "run" / "predictions").glob("*.npz")
        assert new.name != old.name
        new.write_bytes(content)
        with pytest.warns(DataWarning, match="1 of 1 files in .* are left out, .* of another fit"):
            assert after.latest() is None
        assert after.find(named[1], kept.about) is None

    def test_two_processes_make_one_run(self, tmp_path):
        context = multiprocessing.get_context("fork")
        gate, answers = context.Barrier(2), context.Queue()
        writers = [
            context.Process(target=_create, args=(tmp_path, rank, gate, answers))
            for rank in (3, 20)
        ]
        for writer in writers:
            writer.start()
        found = [answers.get(timeout=100) for _ in writers]
        for writer in writers:
            writer.join()
        wins = [won for _, each in found for won in each]
        for number in range(10):
            assert wins.count((number, False)) == 1
            assert wins.count((number, True)) >= 1
            folder = tmp_path / str(number)
            header, _ = storage.read(folder / "fit.deltabars")
            assert len(header["statistics"]) == 1
            assert Run.open(folder).num_outputs == 3
            assert contents(folder) == {"fit.deltabars", "run.json"}
        assert {path.name for path in tmp_path.iterdir()} == {str(n) for n in range(10)}


SLOW = """
import time
from net import make as make_quickly


def make():
    model = make_quickly()
    print("ready", flush=True)
    return model
"""


def terminated(
    workshop, out: Path, seconds: float, overwrite: bool, number: int = signal.SIGTERM
) -> tuple[int, str]:
    """The exit code of a fit that is told to end some time after its model was made."""
    (workshop.folder / "slow.py").write_text(SLOW)
    options = [f"{workshop.folder / 'slow.py'}:make" if "net.py" in word else word
               for word in workshop.options]  # fmt: skip
    options += ["--overwrite"] if overwrite else []
    process = subprocess.Popen(
        command("fit", *options, "--out", out, "--quiet"), stderr=subprocess.PIPE, text=True,
        env=environment(), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        while "ready" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(seconds)
        process.send_signal(number)
        return process.wait(60), process.stderr.read()


@pytest.mark.parametrize(
    ("seconds", "overwrite", "number"),
    [(0.0, False, signal.SIGTERM), (0.15, True, signal.SIGHUP), (0.4, False, signal.SIGTERM)],
)
def test_a_fit_that_is_terminated_leaves_no_half_a_run(
    seconds, overwrite, number, workshop, tmp_path
):
    out = tmp_path / "run"
    if overwrite:
        Run.create(out, workshop.fit(rank=5), NamedModel("a:b"), NamedData("c:d"))
    code, said = terminated(workshop, out, seconds, overwrite, number)
    left = contents(tmp_path)
    whole = {"run", "run/fit.deltabars", "run/run.json"}
    assert left in (set(), whole)
    assert left == whole or not overwrite
    if code == 1:
        assert said.splitlines()[-1] == "deltabars: terminated"
    else:  # it was done before it was told to end, or on the way out
        assert code == 0
        assert left == whole
    if left:
        assert deltabars.load(out / "fit.deltabars", workshop.model).rank in (5, 30)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_library_that_makes_an_error_of_its_own_of_a_signal(name, workshop, tmp_path):
    """As torch does, whose constructors ask for a length and take any error for "it has none"."""
    number = int(signal.Signals[name])
    (tmp_path / "net.py").write_text(
        "import os, signal\n\ndef make():\n    try:\n"
        f"        os.kill(os.getpid(), {number})\n        signal.sigtimedwait([], 10)\n"
        "    except BaseException:\n        raise TypeError('it has no length') from None\n"
    )

    def work():
        usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        signal.signal(number, usual)
        os.dup2(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        options = ["--model", f"{tmp_path / 'net.py'}:make", *workshop.options[2:]]
        sys.argv = ["deltabars", "fit", *options, "--out", str(tmp_path / "run"), "--quiet"]
        assert main() == 1
        os.kill(os.getpid(), number)  # once more, on the way out

    assert end(start(work)) == 0
    said = "interrupted" if name == "SIGINT" else "terminated"
    assert (tmp_path / "said").read_text() == f"deltabars: {said}\n"
    assert not (tmp_path / "run").exists()
