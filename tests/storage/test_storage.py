"""Fits on disk: whole, refused for the right reason, and read without running code."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import deltabars
from deltabars.errors import (
    CorruptFileError,
    FormatVersionError,
    StorageError,
    WeightsMismatchError,
)
from deltabars.likelihoods.categorical import Categorical
from deltabars.runtime.distributed import Group
from deltabars.storage import format as shards
from deltabars.storage import format as storage
from deltabars.storage.writing import write_text, write_whole, write_whole_folder
from tests.conftest import cached_case
from tests.networks import make_case
from tests.stopping import end, start
from tests.workshop import contents


@pytest.fixture
def fit(dense_case):
    return deltabars.fit(
        dense_case.model, dense_case.data, l2=0.05, estimator="sandwich", rank=9, progress=False
    )


@pytest.fixture
def path(fit, tmp_path):
    fit.save(tmp_path / "net.deltabars")
    return tmp_path / "net.deltabars"


@pytest.mark.parametrize("estimator", ["hessian", "opg", "sandwich", "ggn"])
def test_everything_comes_back(dense_case, tmp_path, estimator):
    fit = deltabars.fit(
        dense_case.model, dense_case.data, l2=0.05, estimator=estimator, rank=7, progress=False,
        params=["2.*"],
    )  # fmt: skip
    fit.save(tmp_path / "a")
    back = deltabars.load(tmp_path / "a", dense_case.model)
    for name in ("estimator", "l2", "num_examples", "num_parameters", "rank", "signature"):
        assert getattr(back, name) == getattr(fit, name)
    assert dict(back.diagnostics) == dict(fit.diagnostics)
    assert back.effective_parameters == fit.effective_parameters
    for name, pairs in fit.spectra.items():
        for field in ("values", "vectors", "residuals", "smallest", "smallest_residuals"):
            assert torch.equal(getattr(back.spectra[name], field), getattr(pairs, field))
    for field in ("mean", "std", "std_low", "std_error", "score"):
        expected = getattr(fit.predict(dense_case.unseen), field)
        assert torch.equal(getattr(back.predict(dense_case.unseen), field), expected)
    assert torch.equal(back.sample(2, seed=1), fit.sample(2, seed=1))


def test_a_new_process_predicts_the_same_bits(fit, path, dense_case, tmp_path):
    torch.save(dense_case.model.state_dict(), tmp_path / "weights.pt")
    torch.save(dense_case.unseen, tmp_path / "inputs.pt")
    program = """
import sys, torch, deltabars
from tests.networks import dense
folder = sys.argv[1]
model = dense().double()
model.load_state_dict(torch.load(folder + "/weights.pt", weights_only=True))
out = deltabars.load(folder + "/net.deltabars", model).predict(torch.load(folder + "/inputs.pt"))
torch.save({"std": out.std, "score_error": out.score_error}, folder + "/out.pt")
"""
    # As many threads as here: the order of sums is part of the bits.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment)
    there = torch.load(tmp_path / "out.pt", weights_only=True)
    here = fit.predict(dense_case.unseen)
    assert torch.equal(there["std"], here.std)
    assert torch.equal(there["score_error"], here.score_error)


def test_other_weights_are_refused_unless_allowed(path, fit, dense_case):
    other = make_case("dense", seed=5).model
    with pytest.raises(WeightsMismatchError, match=r"other weights.*check_weights=False"):
        deltabars.load(path, other)
    allowed = deltabars.load(path, other, check_weights=False)
    assert torch.equal(allowed.spectra["opg"].values, fit.spectra["opg"].values)
    assert not torch.equal(
        allowed.predict(dense_case.unseen).mean, fit.predict(dense_case.unseen).mean
    )


def test_another_model_is_refused_even_if_other_weights_are_allowed(path):
    with pytest.raises(WeightsMismatchError, match=r"a parameter 0\.weight of shape \(5, 4\)"):
        deltabars.load(path, cached_case("convolutional").model, check_weights=False)


def test_changed_buffers_are_other_weights(tmp_path):
    case = make_case("batch_norm")
    fit = deltabars.fit(case.model, case.data, l2=0.05, rank=5, progress=False)
    fit.save(tmp_path / "a")
    case.model[1].running_mean += 0.1
    with pytest.raises(WeightsMismatchError, match="other weights"):
        deltabars.load(tmp_path / "a", case.model)


def test_every_truncation_is_refused(path, dense_case):
    whole = path.read_bytes()
    for length in [0, 4, 8, 50, *range(100, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFileError, match=r"truncated|not a deltabars file"):
            deltabars.load(path, dense_case.model)


def test_every_altered_byte_is_refused(path, dense_case):
    whole = path.read_bytes()
    for place in range(0, len(whole), 211):
        altered = bytearray(whole)
        altered[place] ^= 0x41
        path.write_bytes(altered)
        with pytest.raises(StorageError):
            deltabars.load(path, dense_case.model)


def test_an_altered_number_is_called_altered(path, dense_case):
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[-9] ^= 1
    path.write_bytes(altered)
    with pytest.raises(CorruptFileError, match="altered: its content does not match its digest"):
        deltabars.load(path, dense_case.model)
    path.write_bytes(whole + b"more")
    with pytest.raises(CorruptFileError, match="altered: expected"):
        deltabars.load(path, dense_case.model)


def rewrite_header(path, change):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    outline = json.loads(raw[8 : 8 + length])
    header = json.loads(outline["__metadata__"]["deltabars"])
    change(header)
    outline["__metadata__"]["deltabars"] = json.dumps(header)
    text = json.dumps(outline).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_a_newer_format_is_refused_as_such(path, dense_case):
    rewrite_header(path, lambda header: header.update(format=storage.FORMAT_VERSION + 1))
    with pytest.raises(FormatVersionError, match="format 4; this version of deltabars reads up"):
        deltabars.load(path, dense_case.model)


def test_a_header_changed_by_hand_is_refused(path, dense_case):
    rewrite_header(path, lambda header: header.update(l2=1.0))
    with pytest.raises(CorruptFileError, match="digest"):
        deltabars.load(path, dense_case.model)


def test_the_header_tells_what_the_file_holds(path, fit):
    header = storage.read_header(path)
    assert header["format"] == 2
    assert header["estimator"] == "sandwich"
    assert header["l2"] == 0.05
    assert header["num_examples"] == 29
    assert header["parameters"][0] == {"name": "0.weight", "shape": [5, 4]}
    assert header["weights"] == fit.state.weights


def test_no_code_is_run(tmp_path, dense_case):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    for name, content in {
        "pickle": pickle.dumps(Harm()),
        "text": b"not a fit at all, but long enough to have a header",
        "empty": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorruptFileError, match="is not a deltabars file"):
            deltabars.load(tmp_path / name, dense_case.model)
    assert not (tmp_path / "harm").exists()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path, fit):
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # the disk is full, in effect
    try:
        with pytest.raises(StorageError, match="Cannot write"):
            fit.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_places_that_cannot_be_written_or_read(fit, tmp_path, dense_case):
    with pytest.raises(StorageError, match="Cannot write"):
        fit.save(tmp_path / "no" / "such" / "folder")
    with pytest.raises(StorageError, match=r"Cannot read .*No such file"):
        deltabars.load(tmp_path / "missing", dense_case.model)
    with pytest.raises(StorageError, match="Cannot read"):
        deltabars.load(tmp_path, dense_case.model)


def test_a_likelihood_of_ones_own_is_refused_at_once(dense_case, tmp_path):
    class Own(Categorical):
        name = "own"

    fit = deltabars.fit(
        dense_case.model, dense_case.data, l2=0.05, rank=5, likelihood=Own(), progress=False
    )
    with pytest.raises(StorageError, match=r"likelihoods.*got one of your own"):
        fit.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_saving_twice_gives_the_same_bytes(fit, path, tmp_path):
    fit.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


FORGED = {
    "unsorted": lambda found: found["opg.values"].copy_(found["opg.values"].flip(0)),
    "a value that is NaN": lambda found: found["opg.values"][3:4].fill_(torch.nan),
    "longer vectors": lambda found: found["hessian.vectors"].mul_(1.1),
    "one longer vector": lambda found: found["hessian.vectors"][4].mul_(1.1),
    "a vector that is NaN": lambda found: found["opg.vectors"][2, 7:8].fill_(torch.nan),
    "a vector of zeros": lambda found: found["opg.vectors"][8].zero_(),
    "one vector twice": lambda found: found["opg.vectors"][1].copy_(found["opg.vectors"][0]),
    "a negative residual": lambda found: found["opg.residuals"][0:1].fill_(-1e-9),
    "less vectors": lambda found: found.update({"opg.vectors": found["opg.vectors"][:-1]}),
}


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.parametrize("in_files", [False, True])
def test_numbers_of_no_fit_are_refused_also_under_a_digest_of_their_own(
    fit, dense_case, tmp_path, how, in_files
):
    path = tmp_path / "a"
    fit.save(path, max_file_size=2000 if in_files else "5GB")
    header, tensors = storage.read(path / "fit.safetensors" if in_files else path)
    if in_files:
        tensors |= {f"{name}.vectors": fit.spectra[name].vectors.clone() for name in fit.spectra}
    FORGED[how](tensors)
    if in_files:
        size = fit.num_parameters
        bounds = [(1, 0, size // 2), (2, size // 2, size)]
        vectors = {name: tensors.pop(f"{name}.vectors") for name in fit.spectra}
        folder = tmp_path / "b"
        folder.mkdir()
        parts = [
            shards.write_part(folder, k, 2, {n: v[:, a:b] for n, v in vectors.items()}, a, b)
            for k, a, b in bounds
        ]
        shards.write_index(folder, header, tensors, parts)
    else:
        storage.write(tmp_path / "b", header, tensors)
    with pytest.raises(CorruptFileError, match="its content is not that of a fit"):
        deltabars.load(tmp_path / "b", dense_case.model)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_the_umask_says_who_may_read_files(fit, tmp_path, umask):
    fit.save(tmp_path / "file")
    fit.save(tmp_path / "folder", max_file_size=2000)
    write_text(tmp_path / "text", "a")
    for path in tmp_path.rglob("*"):
        expected = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == expected & ~umask, path


def killed_while_it_writes(path: Path, is_folder: bool) -> None:
    """A process that is killed when its draft is half written."""
    reader, writer = os.pipe()

    def half(draft):
        (draft / "part" if is_folder else draft).write_bytes(b"half")
        os.write(writer, b"x")
        time.sleep(60)

    def write():
        if is_folder:
            write_whole_folder(path, half, Group(), replace=True)
        else:
            write_whole(path, half)

    pid = start(write)
    os.read(reader, 1)
    os.kill(pid, signal.SIGKILL)
    end(pid)
    os.close(reader)
    os.close(writer)


def fill(draft: Path) -> None:
    draft.joinpath("part").write_text("whole")


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path, is_folder):
    path, theirs = tmp_path / "a", tmp_path / ".a.draft"
    theirs.mkdir()
    killed_while_it_writes(path, is_folder)
    assert len(contents(tmp_path)) > 2
    inside = []

    def write_inside(draft):  # of another writer, who is at work
        write_whole(path, lambda other: other.write_text("a"))
        path.unlink()
        inside.append(draft.exists())
        draft.write_text("b")

    if is_folder:
        write_whole_folder(path, fill, Group(), replace=True)
    else:
        write_whole(path, write_inside)
        assert inside == [True]
    assert contents(tmp_path) == {".a.draft", "a"} | ({"a/part"} if is_folder else set())


def test_a_folder_that_was_being_replaced_comes_back(tmp_path, monkeypatch):
    """Its writer was killed when the old one was away and the new one was not there yet."""
    path = tmp_path / "a"
    write_whole_folder(path, fill, Group(), replace=False)

    def replace():
        moves, move = [], os.replace

        def once(source, target):
            moves.append(source)
            if len(moves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            move(source, target)

        monkeypatch.setattr(os, "replace", once)
        write_whole_folder(path, fill, Group(), replace=True)

    assert end(start(replace)) == -signal.SIGKILL
    assert not path.exists()

    def fail(draft):
        raise StorageError("No room.")

    with pytest.raises(StorageError, match="No room"):
        write_whole_folder(path, fail, Group(), replace=True)
    assert (path / "part").read_text() == "whole"
    assert contents(tmp_path) == {"a", "a/part"}
