"""Stages of a long run: computed once, kept, and never kept by halves."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deltabars.errors import BadValueError, DataError, StorageError
from deltabars.recipes.stages import Stages

IDENTITY = {"recipe": "mnist", "seed": 3, "schedule": ((0, 1e-3), (5, 1e-4)), "weights": None}
ARRAYS = {
    "values": np.linspace(0, 1, 7) ** 3,
    "single": np.arange(6, dtype=np.float32).reshape(2, 3),
    "text": np.array('{"a": 1}'),
}


def compute():
    return dict(ARRAYS)


def opened(folder, identity=IDENTITY, fresh=False, said=None):
    return Stages(folder, identity, [].append if said is None else said.append, fresh)


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_arrays(found):
    assert set(found) == {*ARRAYS, "seconds"}
    for name, value in ARRAYS.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert 0 <= float(found["seconds"]) < 60


def test_a_stage_is_computed_once(tmp_path):
    said: list[str] = []
    stages = opened(tmp_path / "out" / "stages", said=said)
    first = stages.arrays("spectra", compute)
    assert_arrays(first)
    assert said[0] == "spectra: computing"
    assert contents(stages.folder) == ["run.json", "spectra.npz"]
    later: list[str] = []
    found = opened(stages.folder, said=later).arrays("spectra", lambda: 1 / 0)
    assert later == ["spectra: kept from before"]
    assert_arrays(found)
    assert float(found["seconds"]) == float(first["seconds"])  # of the computing, not the reading


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 4}, "with seed 3 and not 4"),
        ({"rank": 7}, "with rank None and not 7"),
        ({"schedule": ((0, 1e-3),)}, "with schedule"),
    ],
)
def test_another_run_is_refused(tmp_path, change, match):
    opened(tmp_path).arrays("spectra", compute)
    opened(tmp_path, json.loads(json.dumps(IDENTITY)))
    before = contents(tmp_path)
    with pytest.raises(BadValueError, match=match):
        opened(tmp_path, IDENTITY | change)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", [b"", b"[1]", b"\x00\xff"])
def test_an_altered_record_is_named(tmp_path, text):
    opened(tmp_path)
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"run\.json is altered"):
        opened(tmp_path)


def test_fresh_empties_the_folder_but_not_one_of_others(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(BadValueError, match="got one with other files"):
        opened(tmp_path, fresh=True)
    (tmp_path / "thesis.txt").unlink()
    opened(tmp_path, fresh=True).arrays("spectra", compute)
    opened(tmp_path, IDENTITY | {"seed": 4}, fresh=True)
    assert contents(tmp_path) == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 4


@pytest.mark.parametrize("length", [0, 200])
def test_a_truncated_stage_is_named(tmp_path, length):
    opened(tmp_path).arrays("spectra", compute)
    path = tmp_path / "spectra.npz"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"spectra\.npz"):
        opened(tmp_path).arrays("spectra", lambda: 1 / 0)
    path.unlink()
    assert_arrays(opened(tmp_path).arrays("spectra", compute))


def test_a_failed_stage_leaves_nothing(tmp_path):
    stages = opened(tmp_path)
    with pytest.raises(ZeroDivisionError):
        stages.arrays("spectra", lambda: 1 / 0)
    assert contents(tmp_path) == ["run.json"]
    assert_arrays(stages.arrays("spectra", compute))


def test_what_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "stages"):
        with pytest.raises(StorageError, match=r"Cannot write to .*file"):
            opened(folder)
    stages = opened(tmp_path / "stages")
    (stages.folder / "spectra.npz").mkdir()
    with pytest.raises(StorageError, match=r"Cannot write .*spectra\.npz: Is a directory"):
        stages.arrays("spectra", compute)
