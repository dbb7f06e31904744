"""Files made to harm: refused in one sentence, without code run, within bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import deltabars
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.folders import Preparation
from deltabars.cli.sources.models import NamedModel, read_weights
from deltabars.errors import (
    BadValueError,
    CorruptFileError,
    DataError,
    DataWarning,
    DeltaBarsError,
    ModelError,
    StorageError,
)
from deltabars.recipes.images import read_cifar10, read_idx
from deltabars.storage.reading import ALWAYS, MOST_TIMES, open_plain, parse_json
from tests.hostile import Tried, every_truncation, in_child, mutated, subjects, try_all
from tests.networks import dense
from tests.workshop import contents

FILES = 25  # altered at random, of each kind
MIB = 1 << 20
NAMES = (
    "fit", "forged-fit", "idx", "cifar", "npz", "safetensors", "pt", "config", "run", "kept",
    "picture-png", "picture-jpeg", "picture-gif", "picture-bmp", "picture-tiff", "picture-webp",
)  # fmt: skip


@pytest.fixture(scope="module")
def readers():
    found = {subject.name: subject for subject in subjects()}
    assert tuple(found) == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
def test_altered_files(name, readers):
    subject, draw = readers[name], random.Random(f"1 {name}")
    whole = try_all(subject, list(subject.seeds))
    assert (whole.read, whole.wrong) == (len(subject.seeds), [])
    found = try_all(
        subject,
        [
            *every_truncation(subject, 20),
            *(mutated(draw.choice(subject.seeds), draw) for _ in range(FILES)),
        ],
    )
    assert found.wrong == []
    assert found.refused > FILES // 4
    assert found.peak < 64 * MIB  # of which libraries that are loaded take most


def harm(folder):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(folder / "harm"),))

    return Harm()


def refused(kind, read) -> str:
    with pytest.raises(kind) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def taken(read) -> Tried:
    """What a file takes of memory until it is refused, which it must be."""

    def work():
        try:
            read()
        except DeltaBarsError as error:
            return 0, 1, [] if "\n" not in str(error) else [str(error)]
        return 1, 0, ["it was read"]

    found = in_child(work)
    assert found.wrong == []
    return found


class TestCode:
    def test_no_pickle_is_run(self, tmp_path):
        evil = harm(tmp_path)
        np.savez(tmp_path / "a.npz", inputs=np.array([evil], dtype=object))
        (tmp_path / "c.npz").write_bytes(pickle.dumps(evil))
        torch.save({"0.weight": evil}, tmp_path / "d.pt")
        torch.save({"0.weight": evil}, tmp_path / "e.pt", _use_new_zipfile_serialization=False)
        (tmp_path / "f.pth").write_bytes(pickle.dumps(evil))
        (tmp_path / "g.safetensors").write_bytes(pickle.dumps(evil))
        for name in ("a.npz", "c.npz"):
            refused(DataError, NamedData(str(tmp_path / name)).load)
        for name in ("d.pt", "e.pt", "f.pth", "g.safetensors"):
            refused(ModelError, lambda name=name: read_weights(tmp_path / name))
        refused(CorruptFileError, lambda: deltabars.load(tmp_path / "f.pth", dense()))
        assert not (tmp_path / "harm").exists()
        pickle.loads((tmp_path / "f.pth").read_bytes())
        assert (tmp_path / "harm").exists()  # it would have shown

    def test_pictures_that_are_programs_are_not_run(self, tmp_path, monkeypatch):
        # Pillow reads PostScript, whatever its name, by starting a program.
        program = tmp_path / "bin" / "gs"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nmkdir -p {tmp_path / 'harm'}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        (tmp_path / "data").mkdir()
        text = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
        (tmp_path / "data" / "a.png").write_text(text)
        assert "broken or is none" in refused(DataError, NamedData(str(tmp_path / "data")).load)
        assert not (tmp_path / "harm").exists()


def idx(*sizes):
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + b"abcd"


def npz(descr, shape):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    with zipfile.ZipFile(content := io.BytesIO(), "w") as archive:
        head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text))
        archive.writestr("inputs.npy", head + text.encode() + b"1234")
    return content.getvalue()


def outline(text, length=None):
    return struct.pack("<Q", length or len(text)) + text


READERS = {
    "idx": read_idx,
    "gz": read_idx,
    "npz": lambda path: NamedData(str(path)).load(),
    "fit": lambda path: deltabars.load(path, dense()),
}
LIES = [
    ("idx", idx(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1)),
    ("idx", idx(2**32 - 1)),
    ("gz", gzip.compress(idx(2**31, 2**31, 4), mtime=0)),
    ("npz", npz("'<f8'", "(4611686018427387904,)")),
    ("npz", npz("'<f8'", "(-4,)")),
    ("npz", npz("'|S0'", "(4611686018427387904,)")),
    ("npz", npz("'|V4611686018427387904'", "(1,)")),
    ("npz", npz("[('a', '<f4')]", "(1,)")),
    ("npz", npz("'|O'", "(1,)")),
    ("npz", npz("(" * 3000 + "'<f8'" + ")" * 3000, "(1,)")),
    ("npz", npz("'<f8'", "(" * 90 + "1" + ",)" * 90)),
    ("fit", outline(b"{}", 60 * MIB)),
    ("fit", outline(b"{}", 2**63)),
    ("fit", outline(b'{"a":' * 100_000)),
    ("fit", outline(b'{"__metadata__":{"deltabars":"' + b"[" * 100_000 + b'"}}')),
    ("fit", outline(b'{"a":{"data_offsets":[0,1e999]}}')),
    ("fit", outline(b'{"a":{"data_offsets":[0,NaN]},"__metadata__":{}}')),
    ("fit", outline(b'{"a":1,"a":2}')),
]


class TestMemory:
    """Each file is small, and says that it holds far more."""

    def test_gzip(self, tmp_path):
        with gzip.open(tmp_path / "a.gz", "wb") as file:
            file.write(bytes([0, 0, 8, 3]) + struct.pack(">3I", 400, 1000, 1000))
            for _ in range(400):
                file.write(bytes(1_000_000))
        assert taken(lambda: read_idx(tmp_path / "a.gz")).peak < ALWAYS
        said = refused(DataError, lambda: read_idx(tmp_path / "a.gz"))
        assert f"more than {MOST_TIMES} times" in said
        assert "gunzip" in said

    @pytest.mark.parametrize(("kind", "content"), LIES)
    def test_headers(self, kind, content, tmp_path):
        (tmp_path / f"a.{kind}").write_bytes(content)
        assert taken(lambda: READERS[kind](tmp_path / f"a.{kind}")).peak < 24 * MIB

    def test_zip(self, tmp_path):
        np.savez_compressed(tmp_path / "a.npz", inputs=np.zeros(300 * MIB, np.uint8))
        assert taken(NamedData(str(tmp_path / "a.npz")).load).peak < 8 * MIB
        with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_LZMA) as archive:
            archive.writestr("inputs.npy", b"x" * 1000)
        assert "is no array" in refused(DataError, NamedData(str(tmp_path / "b.npz")).load)

    @pytest.mark.parametrize(
        ("name", "mode", "options"),
        [("a.tiff", "1", {"compression": "group4"}), ("a.png", "RGB", {})],
    )
    def test_pictures_as_large_as_any_file_may_have(self, name, mode, options, tmp_path):
        """More than a scanned page; Pillow's memory on the way is bounded too."""
        path, larger = tmp_path / name, tmp_path / f"larger-{name}"
        Image.new(mode, (3344, 3344)).save(path, **options)
        Image.new(mode, (3346, 3344)).save(larger, **options)
        read = Preparation().read
        found = in_child(lambda: (int(read(path).flags.writeable), 0, []))
        assert (found.read, found.wrong) == (1, [])
        assert found.peak < 200 * MIB  # what a network takes of it, and copies on the way
        assert "unpack to" in refused(DataError, lambda: read(larger))
        assert taken(lambda: read(larger)).peak < 64 * MIB


def test_json():
    assert parse_json('{"a": [1, NaN]}')["a"][0] == 1
    for text in ('{"a": 1, "a": 2}', "[" * 100_000, "9" * 10_000, b"\xff", ""):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)


class TestPlaces:
    """Pipes, devices, links, and names."""

    def test_pipes_and_devices_are_not_waited_for(self, tmp_path):
        for name in ("a", "test_batch.bin", "a.npz", "a.pt", "a.safetensors"):
            os.mkfifo(tmp_path / name)
        for read in (
            lambda: deltabars.load(tmp_path / "a", dense()),
            lambda: deltabars.load("/dev/zero", dense()),
            lambda: read_idx(tmp_path / "a"),
            lambda: read_cifar10(tmp_path, "test"),
            NamedData(str(tmp_path / "a.npz")).load,
            lambda: read_weights(tmp_path / "a.pt"),
            lambda: read_weights(tmp_path / "a.safetensors"),
            lambda: Run.open(tmp_path),
        ):
            assert taken(read).peak < 24 * MIB

    def test_folders_with_pipes_devices_and_circles(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.png")
        os.symlink("/dev/zero", tmp_path / "zero.png")
        os.symlink("/dev/tty", tmp_path / "tty.jpg")
        os.symlink(tmp_path / "circle.png", tmp_path / "circle.png")
        os.symlink("nowhere", tmp_path / "lost.png")
        assert "got none" in refused(DataError, NamedData(str(tmp_path)).load)
        Image.new("L", (3, 3)).save(tmp_path / "good.png")
        with pytest.warns(DataWarning, match="5 files"):
            source = NamedData(str(tmp_path)).load()
        assert source.names == ("good.png",)
        with pytest.raises(OSError, match="pipe or device"):
            open_plain(tmp_path / "pipe.png")

    def test_names_that_no_file_can_have(self, tmp_path, dense_case, capsys):
        fit = deltabars.fit(dense_case.model, dense_case.data, l2=0.05, rank=4, progress=False)
        for name in ("a\0b", "a" * 300):
            refused(StorageError, lambda name=name: fit.save(tmp_path / name))
            refused(StorageError, lambda name=name: deltabars.load(tmp_path / name, dense()))
            refused(BadValueError, lambda name=name: NamedData(f"{name}.npz").load())
            refused(DataError, lambda name=name: read_idx(tmp_path / name))
        fit.save(tmp_path / ("é" * 115))  # as long as a name can be, and its draft with it
        (tmp_path / "c.toml").write_text('data = "a\\u0000b"\nmodel = "tests.networks:dense"\n')
        assert main(["fit", "--config", str(tmp_path / "c.toml"), "--out", "x", "--l2", "1"]) == 1
        assert "without zero bytes" in capsys.readouterr().err


class TestNothingOutside:
    def test_predictions_do_not_leave_a_run(self, workshop, tmp_path, capsys):
        fit = workshop.fit()
        model = NamedModel(f"{workshop.folder / 'net.py'}:make", str(workshop.folder / "net.pt"))
        run = Run.create(tmp_path / "run", fit, model, NamedData(str(workshop.folder / "train")))
        (tmp_path / "outside").mkdir()
        os.symlink(tmp_path / "outside", run.path / "predictions")
        data = str(workshop.folder / "test.npz")
        assert main(["predict", str(run.path), "--data", data, "--quiet"]) == 1
        assert "link to another" in capsys.readouterr().err
        assert contents(tmp_path / "outside") == set()


class TestFilesNameNoCode:
    """What is imported or called is named by the command line and by run.json, by nothing else."""

    @pytest.mark.parametrize("spec", ["os:system", "evil.py:make"])
    def test_kept_predictions_that_name_a_factory(self, spec, workshop, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "evil.py").write_text("open('executed', 'w')\n\n\ndef make():\n    pass\n")
        (tmp_path / "run").mkdir()
        for name in ("fit.deltabars", "run.json"):
            shutil.copy(workshop.run / name, tmp_path / "run")
        end = ["run", "--quiet", "--device", "cpu"]
        assert main(["predict", *end, "--data", str(workshop.folder / "test.npz")]) == 0
        (kept,) = (tmp_path / "run" / "predictions").iterdir()
        with np.load(kept) as arrays:
            found = dict(arrays)
        about = json.loads(str(found["about"]))
        about["data"] |= {"spec": spec, "arguments": {"command": "touch executed"}}
        np.savez(kept, **{**found, "about": np.array(json.dumps(about))})
        for asked in (["rank", *end], ["report", *end, "--out", "a.html"]):
            main(asked)
        assert not (tmp_path / "executed").exists()
