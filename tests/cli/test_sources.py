"""Models and data by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_model
from torch import nn

from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.errors import BadValueError, DataError, DataWarning
from deltabars.problem.inputs import Signature
from deltabars.recipes.images import read_mnist
from tests.workshop import TEST, TRAIN

DATA = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
import helper

pair = torch.rand(6, 2), torch.arange(6) % 2


def tensors(count=6):
    return pair[0][:count], pair[1][:count]


def dataset():
    found = TensorDataset(*pair)
    found.classes = ["cat", "dog"]
    return found


def loader():
    return DataLoader(dataset(), batch_size=4)


def shuffled():
    return DataLoader(dataset(), batch_size=4, shuffle=True)


def inputs():
    return pair[0]


def words():
    return "words"
"""


@pytest.fixture
def data_file(tmp_path):
    (tmp_path / "helper.py").write_text("")
    path = tmp_path / "data.py"
    path.write_text(DATA)
    return path


def signature(inputs):
    return Signature.of(inputs)


class TestModels:
    @pytest.mark.parametrize("name", ["make", "Net", "ready"])
    @pytest.mark.parametrize("weights", ["net.safetensors", "net.pt"])
    def test_functions_classes_and_modules(self, name, weights, workshop):
        spec = f"{workshop.folder / 'net.py'}:{name}"
        found = NamedModel(spec, str(workshop.folder / weights)).load()
        assert not found.training
        inputs = workshop.test[0]
        assert torch.equal(found(inputs), workshop.model(inputs))

    def test_modules_of_the_current_folder_and_of_packages(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("my_net_for_test.py").write_text("from torch import nn\nmake = nn.Linear\n")
        sizes = {"in_features": 2, "out_features": 3}
        for spec in ("my_net_for_test:make", "torch.nn:Linear"):
            found = NamedModel(spec, arguments=sizes).load()
            assert isinstance(found, nn.Linear)
            assert found.out_features == 3
        assert str(tmp_path) not in sys.path

    def test_tied_weights_have_one_name_in_the_file(self, tmp_path):
        path = tmp_path / "tied.py"
        path.write_text(
            "from torch import nn\n\ndef make():\n    net = nn.Sequential(nn.Linear(3, 3), "
            "nn.Linear(3, 3))\n    net[1].weight = net[0].weight\n    return net\n"
        )
        model = NamedModel(f"{path}:make").load()
        save_model(model, str(tmp_path / "tied.safetensors"))
        again = NamedModel(f"{path}:make", str(tmp_path / "tied.safetensors")).load()
        assert torch.equal(again[0].weight, model[0].weight)
        assert again[1].weight is again[0].weight

    def test_a_file_is_run_once_and_again_when_it_changes(self, tmp_path, capsys):
        path = tmp_path / "net.py"
        path.write_text("from torch import nn\nprint('run')\nmake = nn.Linear(1, 1)\n")
        first, second = (NamedModel(f"{path}:make").load() for _ in range(2))
        assert first is second
        assert tuple(capsys.readouterr()) == ("", "run\n")  # stdout is for results
        path.write_text("from torch import nn\nmake = nn.Linear(1, 22)\n")
        assert NamedModel(f"{path}:make").load().out_features == 22


class TestFolders:
    def test_classes_names_and_pixels(self, workshop):
        source = NamedData(str(workshop.folder / "train"), gray=True).load()
        assert len(source) == TRAIN
        assert source.classes == tuple(f"digit {k}" for k in range(10))
        assert torch.equal(source.targets, workshop.train[1])
        batches = list(source.batches(signature(workshop.train[0])))
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), workshop.train[0])
        assert torch.equal(torch.cat([batch.targets for batch in batches]), workshop.train[1])
        assert np.array_equal(source.picture(5), workshop.train[0][5, 0].numpy() * 255)
        assert source.names[0].startswith("digit 0/")

    def test_a_flat_folder_has_no_targets(self, workshop):
        source = NamedData(str(workshop.folder / "flat"), gray=True).load()
        assert source.classes is None
        assert source.targets is None
        (batch,) = source.batches(signature(workshop.test[0]))
        assert batch.targets is None
        assert batch.inputs.shape == (TEST, 1, 8, 8)

    def test_size_crop_and_normalisation(self, tmp_path):
        columns = np.repeat(np.arange(12, dtype=np.uint8)[None], 6, 0) * 20  # (6, 12)
        Image.fromarray(np.stack([columns, columns // 2, 0 * columns], -1)).save(tmp_path / "a.png")
        spec = str(tmp_path)
        plain = NamedData(spec).load().dataset[0]
        assert plain.shape == (3, 6, 12)
        assert torch.equal(plain[0], torch.from_numpy(columns) / 255)
        normal = NamedData(spec, mean=(0.5,), std=(0.1, 0.2, 0.4)).load().dataset[0]
        each = torch.tensor([0.1, 0.2, 0.4])[:, None, None]
        assert torch.equal(normal, (plain - 0.5) / each)
        assert NamedData(spec, size=(3, 5)).load().dataset[0].shape == (3, 3, 5)
        middle = NamedData(spec, size=(6, 6), crop=True).load().dataset[0]
        assert torch.equal(middle, plain[:, :, 3:9])

    def test_what_is_left_out_is_counted(self, tmp_path):
        pixels = Image.new("L", (2, 2))
        outside = tmp_path / "outside"
        (outside / "more").mkdir(parents=True)
        pixels.save(outside / "far.png")
        root = tmp_path / "data"
        (root / "b" / "deeper").mkdir(parents=True)
        (root / ".hidden").mkdir()
        (root / "b" / ".DS_Store").write_text("")
        (root / "b" / "notes.txt").write_text("")
        pixels.save(root / "b" / "deeper" / "x.PNG")
        (root / "a").symlink_to(outside)
        (root / "b" / "loop").symlink_to(root)
        (root / "b" / "link.png").symlink_to(outside / "far.png")
        (root / "b" / "broken.png").symlink_to(tmp_path / "nothing.png")
        with pytest.warns(DataWarning, match="3 files in .* were left out, such as"):
            source = NamedData(str(root)).load()
        assert source.names == ("a/far.png", "b/deeper/x.PNG", "b/link.png")
        assert source.classes == ("a", "b")

    def test_an_empty_class_is_kept_with_a_warning(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        Image.new("L", (2, 2)).save(tmp_path / "b" / "x.png")
        with pytest.warns(DataWarning, match=r"1 of 2 classes have no picture: a/"):
            source = NamedData(str(tmp_path)).load()
        assert source.targets.tolist() == [1]

    def test_odd_names_can_be_printed(self, tmp_path):
        for name in (b"line\nbreak.png", b"latin \xe9.png", "größe ✓.png".encode()):
            Image.new("L", (2, 2)).save(os.fsdecode(os.fsencode(tmp_path) + b"/" + name), "PNG")
        names = NamedData(str(tmp_path)).load().names
        assert set(names) == {"line\\nbreak.png", "latin \\xe9.png", "größe ✓.png"}

    def test_the_fingerprint_tells_changes(self, tmp_path):
        for name in ("a.png", "b.png"):
            Image.new("L", (2, 2)).save(tmp_path / name)
        first = NamedData(str(tmp_path)).load().fingerprint
        assert NamedData(str(tmp_path)).load().fingerprint == first
        assert NamedData(str(tmp_path), gray=True).load().fingerprint != first
        os.utime(tmp_path / "b.png", (1, 1))
        assert NamedData(str(tmp_path)).load().fingerprint != first


class TestArrays:
    @pytest.mark.parametrize("shape", [(4, 5, 6), (4, 1, 5, 6), (4, 5, 6, 1)])
    def test_bytes_are_images(self, shape, tmp_path):
        images = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
        np.savez(tmp_path / "a.npz", x=images, y=np.arange(4), classes=["p", "q", "r", "s"])
        source = NamedData(str(tmp_path / "a.npz")).load()
        expected = torch.from_numpy(images.reshape(4, 1, 5, 6)) / 255
        assert torch.equal(source.data[0], expected)
        assert source.classes == ("p", "q", "r", "s")
        assert np.array_equal(source.picture(2), images.reshape(4, 5, 6)[2])

    def test_numbers_stay_as_they_are(self, tmp_path):
        values = np.random.default_rng(0).normal(size=(4, 3))
        np.savez(tmp_path / "a.npz", inputs=values, targets=values[:, :1])
        source = NamedData(str(tmp_path / "a.npz")).load()
        assert torch.equal(source.data[0], torch.from_numpy(values).float())
        assert source.picture is None

    @pytest.mark.parametrize(
        ("arrays", "said"),
        [
            ({"pictures": np.zeros(3)}, "'inputs', 'images' or 'x' .* got pictures"),
            ({"x": np.zeros(3), "inputs": np.zeros(3)}, "one of"),
            ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "one target for each of 3 inputs"),
            ({"x": np.zeros((3, 7, 7, 7), np.uint8)}, "images of bytes"),
            ({"x": np.array(["a"])}, "expected numbers for inputs"),
        ],
    )
    def test_refused(self, arrays, said, tmp_path):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError, match=said):
            NamedData(str(tmp_path / "a.npz")).load()

    def test_mnist_files_by_part(self, scans):
        source = NamedData(str(scans), part="test", mean=(0.1,), std=(0.3,)).load()
        images, labels = read_mnist(scans, "test")
        assert torch.equal(source.data[0], (images - 0.1) / 0.3)
        assert torch.equal(source.targets, labels)
        assert source.classes == tuple("0123456789")
        assert len(NamedData(str(scans)).load()) == 600

    def test_cifar_files(self, tmp_path):
        records = np.random.default_rng(0).integers(0, 10, (3, 3073), dtype=np.uint8)
        records.tofile(tmp_path / "test_batch.bin")
        source = NamedData(str(tmp_path), part="test").load()
        assert source.data[0].shape == (3, 3, 32, 32)
        assert source.classes[3] == "cat"


class TestFactories:
    @pytest.mark.parametrize("name", ["pair", "tensors", "dataset", "loader"])
    def test_all_kinds_give_the_same_batches(self, name, data_file):
        source = NamedData(f"{data_file}:{name}").load()
        pair = NamedData(f"{data_file}:pair").load().data
        batches = list(source.batches(signature(pair[0])))
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), pair[0])
        assert torch.equal(torch.cat([batch.targets for batch in batches]), pair[1])
        assert len(source) == 6
        assert source.classes == (("cat", "dog") if name in ("dataset", "loader") else None)
        inputs = source.inputs(signature(pair[0]))
        assert torch.equal(inputs[2][0] if name == "dataset" else inputs[2], pair[0][2])

    def test_arguments_and_inputs_alone(self, data_file):
        assert len(NamedData(f"{data_file}:tensors", arguments={"count": 2}).load()) == 2
        source = NamedData(f"{data_file}:inputs").load()
        (batch,) = source.batches(signature(source.data))
        assert batch.targets is None

    def test_refused(self, data_file):
        with pytest.raises(DataError, match="same order on every pass"):
            list(NamedData(f"{data_file}:shuffled").load().batches(signature(torch.zeros(1, 2))))
        with pytest.raises(DataError, match=r"from .*words, got a str"):
            NamedData(f"{data_file}:words").load()
        with pytest.raises(DataError, match="which is no function"):
            NamedData(f"{data_file}:pair", arguments={"a": 1}).load()
        with pytest.raises(BadValueError, match="--mean: expected data of the kind folder or npz"):
            NamedData(f"{data_file}:pair", mean=(1.0,)).load()
