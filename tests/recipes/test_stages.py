"""Stages of a long run: computed once, kept, and never kept by halves."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from deltabars.errors import BadValueError, DataError, StorageError
from deltabars.recipes.reproduction.stages import Stages
from deltabars.storage.writing import write_text, write_whole

IDENTITY = {"recipe": "mnist", "seed": 3, "schedule": ((0, 1e-3), (5, 1e-4)), "weights": None}
ARRAYS = {
    "values": np.linspace(0, 1, 7) ** 3,
    "single": np.arange(6, dtype=np.float32).reshape(2, 3),
    "text": np.array('{"a": 1}'),
}


class Compute:
    """Counts how often it is called."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return dict(ARRAYS)


def opened(folder, identity=IDENTITY, fresh=False, said=None):
    say = (lambda line: None) if said is None else said.append
    return Stages.open(folder, identity, say, fresh)


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_arrays(found):
    assert set(found) == {*ARRAYS, "seconds"}
    for name, value in ARRAYS.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert 0 <= float(found["seconds"]) < 60


def test_a_stage_is_computed_once(tmp_path):
    said, compute = [], Compute()
    stages = opened(tmp_path / "out" / "stages", said=said)
    first, second = (stages.arrays("spectra", compute) for _ in range(2))
    assert compute.calls == 1
    assert_arrays(first)
    assert_arrays(second)
    assert said[0] == "spectra: computing"
    assert len(said) == 2
    assert contents(stages.folder) == ["run.json", "spectra.npz"]


def test_another_process_reads_it_back(tmp_path):
    taken = opened(tmp_path).arrays("spectra", Compute())
    said, compute = [], Compute()
    found = opened(tmp_path, said=said).arrays("spectra", compute)
    assert compute.calls == 0
    assert said == ["spectra: kept from before"]
    assert_arrays(found)
    assert float(found["seconds"]) == float(taken["seconds"])  # of the computing, not the reading


def test_stages_are_told_apart_by_name(tmp_path):
    stages, compute = opened(tmp_path), Compute()
    stages.arrays("one", compute)
    stages.arrays("two", compute)
    assert compute.calls == 2


def test_seconds_are_those_of_the_computing(tmp_path, monkeypatch):
    ticks = iter([100.0, 102.5])
    monkeypatch.setattr(
        "deltabars.recipes.reproduction.stages.time.perf_counter", lambda: next(ticks)
    )
    said = []
    found = opened(tmp_path, said=said).arrays("spectra", Compute())
    assert float(found["seconds"]) == 2.5
    assert said[-1] == "spectra: 2.5 s"


class TestIdentity:
    def test_it_is_written_as_json(self, tmp_path):
        opened(tmp_path)
        assert json.loads((tmp_path / "run.json").read_text())["seed"] == 3

    def test_the_same_is_taken(self, tmp_path):
        opened(tmp_path)
        opened(tmp_path, json.loads(json.dumps(IDENTITY)))

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"seed": 4}, "with seed 3 and not 4"),
            ({"recipe": "cifar10"}, "with recipe mnist and not cifar10"),
            ({"weights": "abc"}, "with weights None and not abc"),
            ({"rank": 7}, "with rank None and not 7"),
            ({"schedule": ((0, 1e-3),)}, "with schedule"),
        ],
    )
    def test_another_is_refused(self, tmp_path, change, match):
        opened(tmp_path).arrays("spectra", Compute())
        before = contents(tmp_path)
        with pytest.raises(BadValueError, match=match) as caught:
            opened(tmp_path, IDENTITY | change)
        assert str(tmp_path.parent) in str(caught.value)  # the stages are in a folder of it
        assert contents(tmp_path) == before

    def test_one_key_less_is_refused(self, tmp_path):
        opened(tmp_path)
        less = {key: value for key, value in IDENTITY.items() if key != "seed"}
        with pytest.raises(BadValueError, match="with seed 3 and not None"):
            opened(tmp_path, less)

    @pytest.mark.parametrize("text", ["", "{", "[1]", "3", "\x00\xff"])
    def test_an_altered_one_is_named(self, tmp_path, text):
        opened(tmp_path)
        (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(StorageError, match=r"run\.json is altered"):
            opened(tmp_path)


def test_fresh_empties_the_folder(tmp_path):
    opened(tmp_path).arrays("spectra", Compute())
    (tmp_path / "fit.deltabars").write_bytes(b"old")
    compute = Compute()
    stages = opened(tmp_path, IDENTITY | {"seed": 4}, fresh=True)
    assert contents(tmp_path) == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 4
    stages.arrays("spectra", compute)
    assert compute.calls == 1


def test_fresh_needs_no_folder(tmp_path):
    assert contents(opened(tmp_path / "new", fresh=True).folder) == ["run.json"]


@pytest.mark.parametrize("length", [0, 10, 200, -1])
def test_a_truncated_stage_is_named(tmp_path, length):
    opened(tmp_path).arrays("spectra", Compute())
    path = tmp_path / "spectra.npz"
    path.write_bytes(path.read_bytes()[:length])
    compute = Compute()
    with pytest.raises(DataError, match="Stage spectra") as caught:
        opened(tmp_path).arrays("spectra", compute)
    assert str(path) in str(caught.value)
    assert "remove it to compute it again" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert compute.calls == 0
    path.unlink()
    assert_arrays(opened(tmp_path).arrays("spectra", compute))


def test_an_altered_stage_is_named(tmp_path):
    """Wherever it is altered, in compressed data and in headers, unless zipfile does not mind."""
    opened(tmp_path).arrays("spectra", Compute())
    path = tmp_path / "spectra.npz"
    content = path.read_bytes()
    refused = 0
    for place in range(0, len(content) - 3, 3):
        path.write_bytes(content[:place] + b"\xff\x03\xff" + content[place + 3 :])
        try:
            opened(tmp_path).arrays("spectra", Compute())
        except DataError as error:
            assert "Stage spectra" in str(error)  # noqa: PT017
            refused += 1
    assert refused > 0.5 * len(content) / 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_stage_leaves_nothing(tmp_path, error):
    stages = opened(tmp_path)

    def fail():
        raise error("no")

    with pytest.raises(error, match="no"):
        stages.arrays("spectra", fail)
    assert contents(tmp_path) == ["run.json"]
    assert_arrays(stages.arrays("spectra", Compute()))


def test_a_draft_is_no_stage(tmp_path):
    """What a process that was killed while it wrote leaves behind."""
    stages, compute = opened(tmp_path), Compute()
    (tmp_path / "draft-spectra.npz").write_bytes(b"PK\x03\x04 half of")
    (tmp_path / "draft-run.json").write_text("{")
    assert_arrays(stages.arrays("spectra", compute))
    assert compute.calls == 1
    assert "spectra.npz" in contents(tmp_path)
    assert_arrays(opened(tmp_path).arrays("spectra", Compute()))


class TestCannotWrite:
    def test_a_file_in_the_way_of_the_folder(self, tmp_path):
        (tmp_path / "file").write_text("")
        for folder in (tmp_path / "file", tmp_path / "file" / "stages"):
            with pytest.raises(StorageError, match=r"Cannot write to .*file"):
                opened(folder)

    def test_a_folder_in_the_way_of_a_stage(self, tmp_path):
        stages = opened(tmp_path)
        (tmp_path / "spectra.npz").mkdir()
        with pytest.raises(StorageError, match=r"Cannot write .*spectra\.npz: Is a directory"):
            stages.arrays("spectra", Compute())

    def test_a_failed_write_leaves_no_draft(self, tmp_path):
        def half(draft):
            draft.write_bytes(b"half")
            raise OSError(28, os.strerror(28))

        with pytest.raises(StorageError, match=r"Cannot write .*x\.bin: No space left on device"):
            write_whole(tmp_path / "x.bin", half)
        assert contents(tmp_path) == []

    def test_the_folder_is_gone(self, tmp_path):
        stages = opened(tmp_path / "out")
        (tmp_path / "out" / "run.json").unlink()
        (tmp_path / "out").rmdir()
        with pytest.raises(StorageError, match=r"Cannot write .*spectra\.npz: No such file"):
            stages.arrays("spectra", Compute())


def test_text_that_cannot_be_written(tmp_path):
    (tmp_path / "results.json").mkdir()
    with pytest.raises(StorageError, match=r"Cannot write .*results\.json: Is a directory"):
        write_text(tmp_path / "results.json", "{}")
    assert contents(tmp_path) == ["results.json"]


def test_text_is_written_whole(tmp_path):
    path = tmp_path / "results.json"
    for text in ("{}", "[]"):
        write_text(path, text)
        assert path.read_text() == text + "\n"
    assert contents(tmp_path) == ["results.json"]


@pytest.mark.parametrize("fresh", [False, True])
def test_files_of_others_are_left_alone(tmp_path, fresh):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(BadValueError, match="got one with other files"):
        Stages.open(tmp_path, IDENTITY, print, fresh)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
