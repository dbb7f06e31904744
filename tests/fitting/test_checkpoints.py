"""Fits in a folder: killed, out of memory, without disk, in other hands; never a wrong number."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import time
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import deltabars
from deltabars.cli.entry import main
from deltabars.errors import (
    BadValueError,
    CheckpointInUseError,
    CheckpointMismatchError,
    CheckpointWarning,
    NotEnoughMemoryError,
    StorageError,
)
from deltabars.fitting.checkpoints import CheckpointFolder, opened
from deltabars.fitting.identity import check_same
from deltabars.runtime.distributed import Group
from tests.stopping import (
    WAYS,
    differing,
    end,
    fit,
    kill_after,
    killed_until_it_ends,
    start,
    subject,
)

SOME = WAYS["lanczos"]


@cache
def plain(way="lanczos"):
    """A fit that nothing happened to."""
    return fit(**WAYS[way])


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Path:
    """The folder of a Lanczos run that was killed in the middle; not to be changed."""
    folder = tmp_path_factory.mktemp("left") / "kept"
    assert plain()
    kill_after(folder, 60, **SOME)
    return folder


@pytest.fixture
def half(left, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(left, tmp_path / "half"))


def states(folder):
    return sorted(folder.glob("state-*"))


def rows(folder):
    return sorted(folder.glob("rows-*"))


class TestKilled:
    @pytest.mark.parametrize("way", list(WAYS))
    def test_at_random_moments(self, way, tmp_path):
        assert plain(way)  # what it imports is imported before the processes start
        chance = random.Random(way)
        steps = {"incremental": 8, "block_krylov": 12, "auto": 6}.get(way, 60)
        count = killed_until_it_ends(tmp_path / "kept", chance, steps, 3, **WAYS[way])
        assert count.with_state
        found = fit(tmp_path / "kept", **WAYS[way])  # the end result, from the folder
        assert not differing(found, plain(way))

    def test_the_result_alone_is_left(self, half):
        assert len(states(half)) >= 2
        assert not differing(fit(half, **SOME), plain())
        assert len(states(half)) <= 2  # of the same rows
        assert len(rows(half)) == 1
        size = sum(path.stat().st_size for path in half.iterdir())
        assert size < 1.2 * plain().spectra["hessian"].vectors.nbytes + 20_000

    def test_a_finished_fit_is_returned_at_once(self, half):
        first = fit(half, **SOME)
        again = fit(half, **SOME)
        assert not differing(again, first)
        assert again.diagnostics["hessian"] == first.diagnostics["hessian"]  # the seconds too

    def test_warnings_of_a_finished_fit_are_given_again(self, tmp_path):
        for _ in range(2):
            with pytest.warns(deltabars.errors.ConvergenceWarning, match="have not converged"):
                fit(tmp_path, estimator="hessian", rank=10, max_products=30)

    def test_nothing_that_is_on_disk_is_written_again(self, tmp_path):
        """Every row of the basis goes to disk once, though every step is saved."""
        written = []
        options = {**WAYS["block_krylov"], "rank": 60}
        with pytest.MonkeyPatch.context() as patch:
            from deltabars.storage import format as storage
            from deltabars.storage import snapshots

            def counting(path, header, tensors):
                if Path(path).name.startswith("rows-"):
                    written.append(sum(len(part) for part in tensors.values()))
                storage_write(path, header, tensors)

            storage_write = storage.write
            patch.setattr(snapshots.storage, "write", counting)
            found = fit(tmp_path, **options)
        basis = found.diagnostics["opg"]["products"]
        assert len(written) > 5
        assert sum(written) <= basis + 2 * 60  # the pairs are written too, at most twice


class Cut(nn.Module):
    """A network with the same outputs, whether derivatives go through its first layer or not."""

    def __init__(self, inner, is_cut):
        super().__init__()
        self.inner, self.is_cut = inner, is_cut

    def forward(self, x):
        hidden = self.inner[0](x)
        if self.is_cut:
            hidden = hidden - (hidden - hidden.detach()) / 2  # half of the derivatives
        return self.inner[2](self.inner[1](hidden))


class TestOtherDerivatives:
    @pytest.mark.parametrize("estimator", ["opg", "hessian", "ggn"])
    def test_of_a_fit_that_had_ended(self, tmp_path, estimator):
        model = Cut(subject()[0], is_cut=True)
        first = fit(tmp_path, model=model, estimator=estimator, rank=5)
        assert not differing(fit(tmp_path, model=model, estimator=estimator, rank=5), first)
        model.is_cut = False
        with pytest.raises(CheckpointMismatchError, match="checkpoint: expected one of this fit"):
            fit(tmp_path, model=model, estimator=estimator, rank=5)

    def test_second_derivatives_alone(self, tmp_path):
        """Of a function whose backward pass has no derivative."""
        model, _ = subject()
        other = nn.Sequential(model[0], Sine(), model[2])
        plainly = nn.Sequential(model[0], Sine(), model[2])
        plainly[1].is_whole = True
        options = {"estimator": "hessian", "rank": 5}
        fit(tmp_path, model=other, **options)
        with pytest.raises(CheckpointMismatchError, match=r"derivatives of the model are others"):
            fit(tmp_path, model=plainly, **options)


class Sine(nn.Module):
    """A sine, perhaps without its second derivatives."""

    is_whole = False

    def forward(self, x):
        if self.is_whole:
            return x.sin()
        still = x.detach()
        return still.sin() + still.cos() * (x - still)


class TestAltered:
    def test_the_last_state_of_a_fit_that_had_ended(self, tmp_path):
        first = fit(tmp_path, **SOME)
        states(tmp_path)[-1].write_bytes(b"altered")
        with pytest.warns(CheckpointWarning, match="Going on from the state before"):
            again = fit(tmp_path, **SOME)
        assert again.diagnostics["hessian"] == first.diagnostics["hessian"]  # the seconds too

    @pytest.mark.parametrize("which", ["state", "rows"])
    @pytest.mark.parametrize("how", ["truncated", "altered", "removed", "empty", "longer"])
    def test_the_state_before_is_taken(self, half, which, how):
        newest = states(half)[-1] if which == "state" else rows(half)[-1]
        content = bytearray(newest.read_bytes())
        content[-5] ^= 4
        newest.write_bytes(
            {
                "truncated": content[: len(content) // 2],
                "altered": bytes(content),
                "removed": b"",
                "empty": b"",
                "longer": content + b"more",
            }[how]
        )
        if how == "removed":
            newest.unlink()
        with watched() as caught:
            assert not differing(fit(half, **SOME), plain())
        said = [str(warning.message) for warning in caught]
        if which == "state" and how == "removed":
            assert not said  # the one before is the newest then
        else:
            assert len(said) == 1
            assert "expected whole files" in said[0]
            assert "Going on from the state before" in said[0]

    def test_a_whole_file_that_is_no_state(self, half):
        shutil.copy(rows(half)[0], states(half)[-1])
        with pytest.warns(CheckpointWarning, match="the name of a state and is none.*state before"):
            assert not differing(fit(half, **SOME), plain())

    def test_without_any_whole_state_it_starts_anew(self, half):
        for state in states(half):
            state.write_bytes(state.read_bytes()[:100])
        with pytest.warns(CheckpointWarning, match="Going on from the beginning"):
            assert not differing(fit(half, **SOME), plain())

    def test_any_byte(self, left, tmp_path):
        """Whatever is altered, the result is the same, and something was said."""
        chance = random.Random(0)
        for number in range(3):
            folder = Path(shutil.copytree(left, tmp_path / str(number)))
            path = chance.choice([*states(folder)[-1:], *rows(folder)])
            content = bytearray(path.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            with watched() as caught:
                assert not differing(fit(folder, **SOME), plain()), path
            assert len(caught) == 1, path

    def test_rows_of_another_run_are_told_apart(self, half, tmp_path):
        other = tmp_path / "other"
        kill_after(other, 60, **{**SOME, "seed": 1})
        assert rows(other)[-1].name == rows(half)[-1].name  # of the same name, and whole
        shutil.copy(rows(other)[-1], rows(half)[-1])
        with pytest.warns(CheckpointWarning, match="rows of another state"):
            assert not differing(fit(half, **SOME), plain())

    def test_rows_of_the_same_run_are_told_apart(self, half):
        """Each is whole, and of as many rows; the one before is still not the last."""
        shutil.copy(rows(half)[-3], rows(half)[-2])
        with pytest.warns(CheckpointWarning, match="rows of another state"):
            assert not differing(fit(half, **SOME), plain())

    def test_a_path_in_a_header_leads_nowhere(self, half, tmp_path):
        from deltabars.storage import format as storage

        secret = tmp_path / "rows-00000001.safetensors"
        storage.write(secret, {"mark": "x", "count": 1}, {"a": torch.zeros(1, 700)})
        before = secret.read_bytes()
        for state in states(half):
            header, tensors = storage.read(state)
            header = {key: part for key, part in header.items() if key != "format"}
            header["rows"] = {"running.hessian.basis": ["x", ["../" + secret.name, 1, "x"]]}
            storage.write(state, header, tensors)
        with pytest.warns(CheckpointWarning, match="not the name of a file of rows"):
            assert not differing(fit(half, **SOME), plain())
        assert secret.read_bytes() == before

    def test_other_files_of_the_folder_stay(self, half):
        mine = {"notes.txt": b"mine", "state-1.safetensors": b"mine", "rows.safetensors": b"mine"}
        for name, content in mine.items():
            (half / name).write_bytes(content)
        fit(half, **SOME)
        assert {name: (half / name).read_bytes() for name in mine} == mine


OTHERS = {
    "estimator": ({"estimator": "ggn"}, "estimator was 'hessian' and is 'ggn'"),
    "rank": ({"rank": 11}, "rank was 10 and is 11"),
    "auto": ({"rank": "auto"}, "rank was 10 and is 'auto'"),
    "seed": ({"seed": 1}, "seed was 0 and is 1"),
    "l2": ({"l2": 0.06}, "l2 was 0.05 and is 0.06"),
    "params": ({"params": ["0.*", "2.weight"]}, "other params"),
    "dtype": ({"dtype": torch.float32}, "dtype was 'torch.float64' and is 'torch.float32'"),
    "solver": ({"solver": "dense"}, "solver was 'krylov' and is 'dense'"),
    "likelihood": (
        {"likelihood": deltabars.likelihoods.Categorical(label_smoothing=0.1)},
        "likelihood was 'categorical' and is .*0.1",
    ),
    "tolerance": ({"residual_tolerance": 1e-6}, "residual_tolerance was None and is 1e-06"),
    "products": ({"max_products": 99}, "max_products was None and is 99"),
    "smallest": ({"smallest": 1}, "smallest was 0 and is 1"),
    "budget": ({"memory_budget": 1 << 30}, "memory_budget was None and is 1073741824"),
}


class TestMismatch:
    @pytest.mark.parametrize("name", list(OTHERS))
    def test_other_options_are_refused(self, half, name):
        before = {path.name: path.read_bytes() for path in [*states(half), *rows(half)]}
        options, message = OTHERS[name]
        with pytest.raises(CheckpointMismatchError, match=f"expected one of this fit.*{message}"):
            fit(half, **{**SOME, **options})
        after = {path.name: path.read_bytes() for path in [*states(half), *rows(half)]}
        assert after == before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, y: (x[:-1], y[:-1]), "examples was 60 and is 59; other data"),
            (lambda x, y: (x, y.roll(1)), "other data"),
            (lambda x, y: (x.clone().index_fill_(0, torch.tensor(3), 0.5), y), "other data"),
        ],
    )
    def test_other_data_are_refused(self, half, change, message):
        with pytest.raises(CheckpointMismatchError, match=message):
            fit(half, data=change(*subject()[1]), **SOME)

    def test_other_weights_are_refused(self, half):
        model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 10)).double()
        model.load_state_dict(subject()[0].state_dict())
        with torch.no_grad():
            model[0].bias[3] += 1e-9
        with pytest.raises(CheckpointMismatchError, match="other weights"):
            fit(half, model=model, **SOME)

    def test_other_code_with_the_same_weights_is_refused(self, half):
        model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 10)).double()
        model.load_state_dict(subject()[0].state_dict())
        with pytest.raises(CheckpointMismatchError, match="mean_loss was"):
            fit(half, model=model, **SOME)

    def test_another_probe_is_refused(self, tmp_path):
        inputs = subject()[1][0]
        fit(tmp_path, probe=inputs[:9], **WAYS["auto"])
        with pytest.raises(CheckpointMismatchError, match="other probe"):
            fit(tmp_path, probe=inputs[1:10], **WAYS["auto"])
        with pytest.raises(CheckpointMismatchError, match=r"tolerance was 0\.02 and is 0\.03"):
            fit(tmp_path, probe=inputs[:9], **{**WAYS["auto"], "tolerance": 0.03})

    def test_what_does_not_change_the_result_may_change(self, half):
        found = fit(half, progress=True, batch_size=7, device="cpu", **SOME)
        exact = plain().spectra["hessian"]
        torch.testing.assert_close(found.spectra["hessian"].values, exact.values, rtol=0, atol=1e-9)

    def test_deterministic_counts_where_it_changes_bits(self, half):
        """On a CPU it does not; a GPU that promises the same bits cannot go on from others."""
        assert not differing(fit(half, deterministic=True, **SOME), plain())
        for there, here in ((None, True), (False, None), (True, True)):
            check_same({"deterministic": there}, {"deterministic": here})
        with pytest.raises(CheckpointMismatchError, match="deterministic was False and is True"):
            check_same({"deterministic": False}, {"deterministic": True})

    def test_the_memory_that_was_free_at_first_counts(self, tmp_path, monkeypatch):
        """Else the basis would be restarted elsewhere, and last bits would differ."""
        folder = tmp_path / "kept"
        free = {"bytes": 1_200_000}
        monkeypatch.setattr("deltabars.runtime.memory.free_bytes", lambda device: free["bytes"])
        once = fit(**SOME)
        kill_after(folder, 60, **SOME)
        free["bytes"] = 1 << 34
        assert differing(fit(**SOME), once)
        assert not differing(fit(folder, **SOME), once)

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (3, BadValueError, "expected the path of a folder, got 3"),
            ("no/such/parent/kept", StorageError, "expected a folder that exists, got .*parent"),
        ],
    )
    def test_what_is_no_folder(self, given, error, message):
        model, data = subject()
        with pytest.raises(error, match=f"checkpoint: {message}"):
            deltabars.fit(model, data, l2=1.0, checkpoint=given)

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(StorageError, match=r"checkpoint: expected a folder, got .*file"):
            fit(tmp_path / "file", **SOME)

    @pytest.mark.parametrize("seconds", [-1, float("nan"), "60"])
    def test_bad_intervals(self, seconds, tmp_path):
        with pytest.raises(BadValueError, match="seconds: expected a number from zero on"):
            CheckpointFolder(tmp_path, seconds)


class TestTwoProcesses:
    def test_the_second_is_told_who_is_first(self, half):
        pid = holder(half)
        with pytest.raises(CheckpointInUseError, match=f"which process {pid} is using"):
            fit(half, **SOME)
        os.kill(pid, signal.SIGKILL)
        assert end(pid) == -signal.SIGKILL
        assert not differing(fit(half, **SOME), plain())

    def test_threads_are_told_apart(self, half):
        with (
            opened(half, Group()),
            pytest.raises(CheckpointInUseError, match=f"process {os.getpid()} is using"),
        ):
            fit(half, **SOME)
        assert not differing(fit(half, **SOME), plain())

    def test_the_workers_of_a_killed_process_do_not_keep_its_lock(self, half):
        pid = holder(half, worker_seconds=12.0)
        os.kill(pid, signal.SIGKILL)
        end(pid)
        began = time.monotonic()
        assert not differing(fit(half, **SOME), plain())
        assert time.monotonic() - began < 8.0

    def test_many_at_once_do_not_spoil_it(self, half):
        """Of several at the same time some are refused; the folder stays whole."""
        begun = [start(lambda: fit(half, **SOME)) for _ in range(4)]
        statuses = [end(pid) for pid in begun]
        assert 0 in statuses
        assert not differing(fit(half, **SOME), plain())


class TestNoRoom:
    @pytest.mark.parametrize("limit", [500, 6_000, 12_000, 40_000])
    def test_a_full_disk_is_said_once_and_the_fit_goes_on(self, tmp_path, limit):
        with full_disk(limit), watched() as caught:
            assert not differing(fit(tmp_path, **WAYS["sandwich"]), plain("sandwich"))
        assert len(caught) == 1
        assert "expected to save the state of the fit, got an error (Cannot write" in str(
            caught[0].message
        )
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("draft")]
        assert not differing(fit(tmp_path, **WAYS["sandwich"]), plain("sandwich"))

    def test_no_room_for_a_new_folder(self, tmp_path, monkeypatch):
        def full(*arguments, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "mkdir", full)
        with pytest.warns(CheckpointWarning, match="No space left.*goes on without a checkpoint"):
            assert not differing(fit(tmp_path / "new", **SOME), plain())

    def test_drafts_of_a_killed_process_are_removed(self, half):
        """And nothing of anyone else's."""
        name = states(half)[-1].name
        mine, other = half / f"draft-{'0a' * 8}-{name}", half / "draft-of-a-paper.txt"
        mine.touch()
        other.touch()
        fit(half, **SOME)
        assert not mine.exists()
        assert other.exists()

    def test_what_was_there_before_stays(self, half):
        before = {path.name: path.read_bytes() for path in [*states(half), *rows(half)]}
        with full_disk(500), pytest.warns(CheckpointWarning, match="still there"):
            assert not differing(fit(half, **SOME), plain())
        after = {path.name: path.read_bytes() for path in [*states(half), *rows(half)]}
        assert after == before
        assert not differing(fit(half, **SOME), plain())

    def test_out_of_memory_loses_nothing_that_was_saved(self, tmp_path):
        """The allocator refuses, in the middle; with memory again the fit goes on from there."""
        Hungry.passes, Hungry.passes_left = 0, None
        options = {"estimator": "opg", "rank": 16, "memory_budget": 880_000}
        options["model"] = Hungry(subject()[0])
        once = fit(**options)
        Hungry.passes_left = Hungry.passes // 2
        passes = Hungry.passes
        with (
            pytest.raises(NotEnoughMemoryError),
            pytest.warns(deltabars.errors.MemoryWarning),
        ):
            fit(tmp_path, **options)
        assert len(states(tmp_path)) == 2
        Hungry.passes, Hungry.passes_left = 0, None
        assert not differing(fit(tmp_path, **options), once)
        assert Hungry.passes < 0.75 * passes


class Hungry(nn.Module):
    """Asks for more memory than there is after so many passes that record gradients.

    Its numbers are of the class, which a fit shares with its private copy of the model.
    """

    passes, passes_left = 0, None

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if torch.is_grad_enabled():
            Hungry.passes += 1
            if Hungry.passes_left is not None:
                Hungry.passes_left -= 1
                if Hungry.passes_left < 0:
                    torch.empty(1 << 50)
        return self.inner(x)


def test_the_command_line_goes_on(workshop, tmp_path, capsys):
    options = ["fit", *workshop.options, "--solver", "krylov", "--quiet", "--json"]
    kept = ["--checkpoint", str(tmp_path / "kept")]
    for out in ("one", "two"):
        assert main([*options, *kept, "--out", str(tmp_path / out)]) == 0
    first, again = (
        deltabars.load(tmp_path / out / "fit.deltabars", workshop.model) for out in ("one", "two")
    )
    assert torch.equal(first.spectra["opg"].vectors, again.spectra["opg"].vectors)
    assert first.diagnostics["opg"]["seconds"] == again.diagnostics["opg"]["seconds"]
    capsys.readouterr()
    assert main([*options, *kept, "--seed", "4", "--out", str(tmp_path / "three")]) != 0
    assert "seed was 0 and is 4" in capsys.readouterr().err
    assert main([*options, *kept, "--print-python", "--out", str(tmp_path / "three")]) == 0
    assert f"checkpoint='{tmp_path / 'kept'}'" in capsys.readouterr().out.replace('"', "'")


def test_states_are_saved_at_intervals(tmp_path):
    """A fit of less than the interval saves what it found, and nothing before."""
    fit(tmp_path, seconds=60.0, **SOME)
    (_, state), (kept,) = states(tmp_path), rows(tmp_path)
    assert state.name == "state-00000003.safetensors"  # the rows, the matrix, the end
    assert kept.name == "rows-00000001.safetensors"


@contextmanager
def watched():
    """The warnings about checkpoints, none of which is an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        yield caught


@contextmanager
def full_disk(most):
    """No file may become longer than `most` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def holder(folder, worker_seconds=0.0):
    """A process that holds a folder; its id, when it does."""
    reader, writer = os.pipe()

    def hold():
        with opened(folder, Group()):
            if worker_seconds and os.fork() == 0:
                time.sleep(worker_seconds)
                os._exit(0)
            os.write(writer, b"held")
            time.sleep(600)

    pid = start(hold)
    assert os.read(reader, 4) == b"held"
    os.close(reader)
    os.close(writer)
    return pid
