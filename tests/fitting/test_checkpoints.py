"""Fits in a folder: killed, out of memory, without disk, in other hands; never a wrong number."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
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
    ConvergenceWarning,
    StorageError,
)
from deltabars.fitting.checkpoints import CheckpointFolder, opened
from deltabars.runtime.distributed import Group
from tests.stopping import (
    WAYS,
    differing,
    end,
    fit,
    full_disk,
    kill_after,
    killed_until_it_ends,
    saved,
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
    kill_after(folder, 30, **SOME)
    for new in folder.glob("[a-z]*.new.safetensors"):  # killed before it took its place
        new.rename(folder / "hessian.safetensors")
    return folder


@pytest.fixture
def half(left, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(left, tmp_path / "half"))


def files(folder):
    return {path: path.read_bytes() for path in folder.glob("[a-z]*.safetensors")}


class TestKilled:
    @pytest.mark.parametrize("way", list(WAYS))
    def test_at_random_moments(self, way, tmp_path):
        assert plain(way)  # what it imports is imported before the processes start
        steps = {"incremental": 0, "block_krylov": 12, "auto": 6}.get(way, 60)
        _, with_state = killed_until_it_ends(tmp_path, random.Random(way), steps, 3, **WAYS[way])
        assert with_state or way == "incremental"  # which saves finished matrices alone
        found = fit(tmp_path, **WAYS[way])  # the end result, from the folder
        assert not differing(found, plain(way))

    def test_between_the_new_file_and_its_place(self, half):
        """The new state is whole, and is resumed as well as the one that it was to replace."""
        (state,) = files(half)
        shutil.copy(state, half / "hessian.new.safetensors")
        kept = saved(half)
        assert not differing(fit(half, **SOME), plain())
        assert [path.name for path in files(half)] == ["hessian.safetensors"]
        assert saved(half) > kept / 2

    def test_a_finished_fit_is_returned_at_once(self, half, tmp_path):
        first, again = fit(half, **SOME), fit(half, **SOME)
        assert not differing(first, plain())
        assert again.diagnostics["hessian"] == first.diagnostics["hessian"]  # the seconds too
        (state,) = files(half).values()
        assert len(state) < 1.2 * plain().spectra["hessian"].vectors.nbytes + 20_000
        for _ in range(2):  # with its warnings, each time
            with pytest.warns(ConvergenceWarning, match="have not converged"):
                fit(tmp_path / "few", max_products=15, **SOME)

    def test_states_are_saved_at_intervals(self, tmp_path):
        """A fit of less than the interval saves what it found, and nothing before."""
        fit(tmp_path, seconds=60.0, **SOME)
        assert saved(tmp_path) == 1

    def test_the_command_line(self, workshop, tmp_path, capsys):
        options = ["fit", *workshop.options, "--solver", "krylov", "--quiet"]
        options += ["--checkpoint", str(tmp_path / "kept")]
        for out in ("one", "two"):
            assert main([*options, "--out", str(tmp_path / out)]) == 0
        first, again = (
            deltabars.load(tmp_path / out / "fit.deltabars", workshop.model)
            for out in ("one", "two")
        )
        assert first.diagnostics["opg"]["seconds"] == again.diagnostics["opg"]["seconds"]
        capsys.readouterr()
        assert main([*options, "--seed", "4", "--out", str(tmp_path / "three")]) == 1
        assert "seed was 0 and is 4" in capsys.readouterr().err


class Sine(nn.Module):
    """A sine, perhaps without its second derivatives."""

    is_whole = False

    def forward(self, x):
        if self.is_whole:
            return x.sin()
        still = x.detach()
        return still.sin() + still.cos() * (x - still)


OTHERS = {
    "estimator": ({"estimator": "ggn"}, "estimator was 'hessian' and is 'ggn'"),
    "seed": ({"seed": 1}, "seed was 0 and is 1"),
    "l2": ({"l2": 0.06}, "l2 was 0.05 and is 0.06"),
    "params": ({"params": ["0.*", "2.weight"]}, "other params"),
    "dtype": ({"dtype": torch.float32}, "dtype was 'torch.float64' and is 'torch.float32'"),
    "solver": ({"solver": "dense"}, "solver was 'krylov' and is 'dense'"),
    "likelihood": (
        {"likelihood": deltabars.likelihoods.Categorical(label_smoothing=0.1)},
        "likelihood was 'categorical' and is .*0.1",
    ),
    "budget": ({"memory_budget": 1 << 30}, "memory_budget was None and is 1073741824"),
    "fewer": ({"data": lambda x, y: (x[:-1], y[:-1])}, "examples was 60 and is 59; other data"),
    "targets": ({"data": lambda x, y: (x, y.roll(1))}, "other data"),
    "inputs": ({"data": lambda x, y: (x.index_fill(0, y[:1], 0.5), y)}, "other data"),
}


class TestMismatch:
    @pytest.mark.parametrize("name", OTHERS)
    def test_other_options_and_data_are_refused(self, half, name):
        before, (options, message) = files(half), OTHERS[name]
        if "data" in options:
            options = {"data": options["data"](*subject()[1])}
        with pytest.raises(CheckpointMismatchError, match=f"expected one of this fit.*{message}"):
            fit(half, **{**SOME, **options})
        assert files(half) == before

    @pytest.mark.parametrize(("kind", "message"), [(nn.Tanh, "weights"), (nn.ReLU, "mean_loss")])
    def test_other_weights_and_other_code(self, half, kind, message):
        model = nn.Sequential(nn.Linear(12, 30), kind(), nn.Linear(30, 10)).double()
        model.load_state_dict(subject()[0].state_dict())
        with torch.no_grad():
            model[0].bias[3] += 1e-9 * (kind is nn.Tanh)
        with pytest.raises(CheckpointMismatchError, match=message):
            fit(half, model=model, **SOME)

    def test_other_second_derivatives(self, tmp_path):
        """Of a function whose backward pass has no derivative."""
        model, _ = subject()
        other = nn.Sequential(model[0], Sine(), model[2])
        fit(tmp_path, model=other, estimator="hessian", rank=5)
        other[1].is_whole = True
        with pytest.raises(CheckpointMismatchError, match="derivatives of the model have changed"):
            fit(tmp_path, model=other, estimator="hessian", rank=5)

    def test_another_probe(self, tmp_path):
        inputs = subject()[1][0]
        fit(tmp_path, probe=inputs[:9], **WAYS["auto"])
        with pytest.raises(CheckpointMismatchError, match="other probe"):
            fit(tmp_path, probe=inputs[1:10], **WAYS["auto"])

    def test_what_does_not_change_the_result_may_change(self, half):
        found = fit(half, progress=True, batch_size=7, deterministic=True, device="cpu", **SOME)
        exact = plain().spectra["hessian"]
        torch.testing.assert_close(found.spectra["hessian"].values, exact.values, rtol=0, atol=1e-9)

    def test_the_memory_that_was_free_at_first_counts(self, tmp_path, monkeypatch):
        """Else the basis would be restarted elsewhere, and last bits would differ."""
        folder, free = tmp_path / "kept", {"bytes": 1_200_000}
        monkeypatch.setattr("deltabars.runtime.memory.free_bytes", lambda device: free["bytes"])
        once = fit(**SOME)
        kill_after(folder, 30, **SOME)
        free["bytes"] = 1 << 34
        assert differing(fit(**SOME), once)
        assert not differing(fit(folder, **SOME), once)

    def test_folders_of_other_processes_and_versions(self, half, tmp_path):
        (state,) = files(half)
        state.rename(half / "hessian-of-4-rank-2.safetensors")
        with pytest.raises(CheckpointMismatchError, match=r"states of 1 processes, got .* of 4"):
            fit(half, **SOME)
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / "state-00000003.safetensors").touch()
        with pytest.raises(CheckpointMismatchError, match=r"which version 0\.5 wrote"):
            fit(tmp_path / "old", **SOME)

    def test_what_is_no_folder(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for given, error in (
            (3, BadValueError),
            ("no/such/parent/kept", StorageError),
            (tmp_path / "file", StorageError),
        ):
            with pytest.raises(error, match=r"checkpoint: expected .*folder"):
                deltabars.fit(*subject(), l2=1.0, checkpoint=given)
        for seconds in (-1, float("nan"), "60"):
            with pytest.raises(BadValueError, match="seconds: expected a number from zero on"):
                CheckpointFolder(tmp_path, seconds)


class TestAltered:
    @pytest.mark.parametrize(
        "alter",
        [
            lambda content: content[: len(content) // 2],
            lambda content: content[:-5] + bytes([content[-5] ^ 4]) + content[-4:],
            lambda content: b"",
            lambda content: b"x" * 1000,
            lambda content: content.replace(b"seed", b"sead"),
        ],
    )
    def test_it_starts_anew_with_a_warning(self, half, alter):
        (state,) = files(half)
        state.write_bytes(alter(state.read_bytes()))
        with pytest.warns(CheckpointWarning) as caught:
            assert not differing(fit(half, **SOME), plain())
        (one,) = caught
        assert "expected whole files, got one of the hessian" in str(one.message)
        assert not differing(fit(half, **SOME), plain())


class TestTwoProcesses:
    def test_the_second_is_refused_by_the_id_of_the_first(self, half):
        """Also of a thread; and workers of a killed process do not keep its lock."""
        reader, writer = os.pipe()

        def hold():
            with opened(half, Group()):
                if os.fork() == 0:
                    time.sleep(12)
                    os._exit(0)
                os.write(writer, b"held")
                time.sleep(600)

        pid = start(hold)
        assert os.read(reader, 4) == b"held"
        with pytest.raises(CheckpointInUseError, match=f"which process {pid} is using"):
            fit(half, **SOME)
        os.kill(pid, signal.SIGKILL)
        assert end(pid) == -signal.SIGKILL
        began = time.monotonic()
        with (
            opened(half, Group()),
            pytest.raises(CheckpointInUseError, match=f"process {os.getpid()} is using"),
        ):
            fit(half, **SOME)
        assert not differing(fit(half, **SOME), plain())
        assert time.monotonic() - began < 8.0

    def test_many_at_once_do_not_spoil_it(self, half):
        """Of several at the same time some are refused; the folder stays whole."""
        begun = [start(lambda: fit(half, **SOME)) for _ in range(4)]
        assert 0 in [end(pid) for pid in begun]
        assert not differing(fit(half, **SOME), plain())


class TestNoRoom:
    @pytest.mark.parametrize("limit", [500, 12_000, 40_000])
    def test_a_full_disk_costs_one_warning(self, tmp_path, limit):
        with full_disk(limit), pytest.warns(CheckpointWarning) as caught:
            assert not differing(fit(tmp_path, **WAYS["sandwich"]), plain("sandwich"))
        (one,) = caught
        assert "expected to save the state of the fit, got an error (Cannot" in str(one.message)
        assert not differing(fit(tmp_path, **WAYS["sandwich"]), plain("sandwich"))

    def test_what_was_there_before_stays(self, half):
        before = files(half)
        with full_disk(500), pytest.warns(CheckpointWarning, match="still there"):
            assert not differing(fit(half, **SOME), plain())
        assert files(half) == before
        assert not differing(fit(half, **SOME), plain())
