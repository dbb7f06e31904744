"""Models and data by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import save_model

import deltabars
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.errors import BadValueError, DataError, DataWarning
from deltabars.problem.data import Signature
from deltabars.recipes.images import read_mnist
from tests.scans import only_line
from tests.workshop import TEST, TRAIN

DATA = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

pair = torch.rand(6, 2), torch.arange(6) % 2
tensors = lambda count=6: (pair[0][:count], pair[1][:count])
dataset = TensorDataset(*pair)
dataset.classes = ["cat", "dog"]
loader = lambda: DataLoader(dataset, batch_size=4)
shuffled = lambda: DataLoader(dataset, batch_size=4, shuffle=True)
inputs = lambda: pair[0]
words = lambda: "words"
"""
NET = """\
import deltabars, torch

@deltabars.trained
def make(outputs=3):
    torch.manual_seed(0)
    return torch.nn.Linear(4, outputs)
"""


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "data.py"
    path.write_text(DATA)
    return path


class TestModels:
    def test_functions_classes_modules_and_packages(self, workshop, tmp_path, monkeypatch):
        inputs = workshop.test[0]
        for name, file in (("make", "net.safetensors"), ("Net", "net.pt"), ("ready", "net.pt")):
            spec = f"{workshop.folder / 'net.py'}:{name}"
            found = NamedModel(spec, str(workshop.folder / file)).load()
            assert not found.training
            assert torch.equal(found(inputs), workshop.model(inputs))
        monkeypatch.chdir(tmp_path)
        Path("my_net_for_test.py").write_text("from torch import nn\nmake = nn.Linear\n")
        sizes = {"in_features": 2, "out_features": 3}
        for spec in ("my_net_for_test:make", "torch.nn:Linear"):
            assert NamedModel(spec, arguments=sizes).load().out_features == 3

    def test_tied_weights_have_one_name_in_the_file(self, tmp_path):
        (tmp_path / "tied.py").write_text(
            "from torch import nn\n\ndef make():\n    net = nn.Sequential(nn.Linear(3, 3), "
            "nn.Linear(3, 3))\n    net[1].weight = net[0].weight\n    return net\n"
        )
        spec, path = f"{tmp_path / 'tied.py'}:make", str(tmp_path / "tied.safetensors")
        model = NamedModel(spec).load()
        save_model(model, path)
        assert torch.equal(NamedModel(spec, path).load()[1].weight, model[0].weight)

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
        images, labels = workshop.train
        source = NamedData(str(workshop.folder / "train"), gray=True).load()
        assert len(source) == TRAIN
        assert source.classes == tuple(f"digit {k}" for k in range(10))
        assert torch.equal(source.targets, labels)
        batches = list(source.batches(Signature.of(images)))
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), images)
        assert np.array_equal(source.picture(5), images[5, 0].numpy() * 255)
        assert source.names[0].startswith("digit 0/")
        flat = NamedData(str(workshop.folder / "flat"), gray=True).load()
        assert flat.classes is flat.targets is None
        (batch,) = flat.batches(Signature.of(images))
        assert batch.targets is None
        assert batch.inputs.shape == (TEST, 1, 8, 8)

    def test_size_crop_and_normalisation(self, tmp_path):
        columns = np.repeat(np.arange(12, dtype=np.uint8)[None], 6, 0) * 20  # (6, 12)
        Image.fromarray(np.stack([columns, columns // 2, 0 * columns], -1)).save(tmp_path / "a.png")

        def first(**options):
            return NamedData(str(tmp_path), **options).load().dataset[0]

        plain = first()
        assert torch.equal(plain[0], torch.from_numpy(columns) / 255)
        each = torch.tensor([0.1, 0.2, 0.4])[:, None, None]
        assert torch.equal(first(mean=(0.5,), std=(0.1, 0.2, 0.4)), (plain - 0.5) / each)
        assert first(size=(3, 5)).shape == (3, 3, 5)
        assert torch.equal(first(size=(6, 6), crop=True), plain[:, :, 3:9])

    def test_what_is_left_out_is_counted(self, tmp_path):
        outside, root = tmp_path / "outside", tmp_path / "data"
        for folder in (outside, root / "b" / "deeper", root / ".hidden", root / "empty"):
            folder.mkdir(parents=True)
        for path in (outside / "far.png", root / "b" / "deeper" / "x.PNG"):
            Image.new("L", (2, 2)).save(path)
        for name in (".DS_Store", "notes.txt"):
            (root / "b" / name).write_text("")
        (root / "a").symlink_to(outside)
        (root / "b" / "loop").symlink_to(root)
        (root / "b" / "link.png").symlink_to(outside / "far.png")
        (root / "b" / "broken.png").symlink_to(tmp_path / "nothing.png")
        with pytest.warns(DataWarning) as said:
            source = NamedData(str(root)).load()
        assert "1 of 3 classes have no picture: empty/" in str(said[0].message)
        assert "3 files in" in str(said[1].message)
        assert source.names == ("a/far.png", "b/deeper/x.PNG", "b/link.png")
        assert source.classes == ("a", "b", "empty")
        assert source.targets.tolist() == [0, 1, 1]

    def test_odd_names_and_the_fingerprint(self, tmp_path):
        for name in (b"line\nbreak.png", b"latin \xe9.png", "größe ✓.png".encode()):
            Image.new("L", (2, 2)).save(os.fsdecode(os.fsencode(tmp_path) + b"/" + name), "PNG")
        first, again, gray = (
            NamedData(str(tmp_path), gray=gray).load() for gray in (False, False, True)
        )
        assert set(first.names) == {"line\\nbreak.png", "latin \\xe9.png", "größe ✓.png"}
        assert again.fingerprint == first.fingerprint != gray.fingerprint
        os.utime(tmp_path / "größe ✓.png", (1, 1))
        assert NamedData(str(tmp_path)).load().fingerprint != first.fingerprint


class TestArrays:
    def test_bytes_are_images_and_numbers_stay_as_they_are(self, tmp_path):
        draw, path = np.random.default_rng(0), tmp_path / "a.npz"
        for shape in ((4, 5, 6), (4, 1, 5, 6), (4, 5, 6, 1)):
            images = draw.integers(0, 255, shape, dtype=np.uint8)
            np.savez(path, x=images, y=np.arange(4), classes=["p", "q", "r", "s"])
            source = NamedData(str(path)).load()
            assert torch.equal(source.data[0], torch.tensor(images).reshape(4, 1, 5, 6) / 255)
            assert source.classes == ("p", "q", "r", "s")
            assert np.array_equal(source.picture(2), images.reshape(4, 5, 6)[2])
        values = draw.normal(size=(4, 3))
        np.savez(path, inputs=values, targets=values[:, :1])
        assert torch.equal(NamedData(str(path)).load().data[0], torch.tensor(values).float())

    def test_refused(self, tmp_path):
        for arrays, said in (
            ({"pictures": np.zeros(3)}, "'inputs', 'images' or 'x'.* got pictures"),
            ({"x": np.zeros(3), "inputs": np.zeros(3)}, "expected one array"),
            ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "one target for each of 3 inputs"),
            ({"x": np.zeros((3, 7, 7, 7), np.uint8)}, "images of bytes"),
            ({"x": np.array(["a"])}, "expected arrays of numbers"),
        ):
            np.savez(tmp_path / "a.npz", **arrays)
            with pytest.raises(DataError, match=said):
                NamedData(str(tmp_path / "a.npz")).load()

    def test_mnist_and_cifar_by_part(self, scans, tmp_path):
        source = NamedData(str(scans), part="test", mean=(0.1,), std=(0.3,)).load()
        images, labels = read_mnist(scans, "test")
        assert torch.equal(source.data[0], (images - 0.1) / 0.3)
        assert torch.equal(source.targets, labels)
        assert source.classes == tuple("0123456789")
        assert len(NamedData(str(scans)).load()) == 600
        records = np.random.default_rng(0).integers(0, 10, (3, 3073), dtype=np.uint8)
        records.tofile(tmp_path / "test_batch.bin")
        source = NamedData(str(tmp_path), part="test").load()
        assert source.data[0].shape == (3, 3, 32, 32)
        assert source.classes[3] == "cat"


class TestFactories:
    @pytest.mark.parametrize("name", ["tensors", "dataset", "loader"])
    def test_all_kinds_give_the_same_batches(self, name, data_file):
        source = NamedData(f"{data_file}:{name}").load()
        inputs, targets = NamedData(f"{data_file}:pair").load().data
        batches = list(source.batches(Signature.of(inputs)))
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), inputs)
        assert torch.equal(torch.cat([batch.targets for batch in batches]), targets)
        assert torch.equal(source.read_targets(Signature.of(inputs)), targets)
        assert len(source) == 6
        assert source.classes == (None if name == "tensors" else ("cat", "dog"))
        found = source.inputs(Signature.of(inputs))
        assert torch.equal(found[2][0] if name == "dataset" else found[2], inputs[2])

    def test_arguments_inputs_alone_and_refusals(self, data_file):
        assert len(NamedData(f"{data_file}:tensors", arguments={"count": 2}).load()) == 2
        assert NamedData(f"{data_file}:inputs").load().targets is None
        for name, options, said in (
            ("words", {}, r"from .*words, got a str"),
            ("pair", {"arguments": {"a": 1}}, "which is no function"),
            ("pair", {"mean": (1.0,)}, "--mean: expected data of the kind folder or npz"),
        ):
            with pytest.raises(BadValueError, match=said):
                NamedData(f"{data_file}:{name}", **options).load()
        with pytest.raises(DataError, match="order on every pass"):
            list(NamedData(f"{data_file}:shuffled").load().batches(Signature.of(torch.ones(1, 2))))


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
class TestTables:
    @pytest.fixture
    def place(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "net.py").write_text(NET)
        draw = np.random.default_rng(0)
        table = {f"x{k}": draw.normal(size=60).astype(np.float32) for k in range(4)}
        frame = pandas.DataFrame(table)
        frame.insert(2, "kind", np.array(["cat", "ant", "bee"])[np.arange(60) % 3])
        return frame

    def fit(self, data, *options):
        given = ("--model", "net.py:make", "--data", data, "--l2", "0.5", "--device", "cpu")
        return main(["fit", *given, "--out", "run", "--quiet", "--overwrite", *map(str, options)])

    def predict(self, data):
        options = ("--quiet", "--out", "a.csv", "--overwrite")
        code = main(["predict", "run", "--data", data, *options])
        return pandas.read_csv("a.csv") if code == 0 else None

    @pytest.mark.parametrize("ending", ["parquet", "tsv.csv"])
    def test_names_of_classes_as_targets(self, ending, place):
        def write(frame, name):
            write, more = frame.to_parquet, {}
            if ending == "tsv.csv":
                write, more = frame.to_csv, {"sep": "\t"}
            write(f"{name}.{ending}", index=False, **more)
            return f"{name}.{ending}"

        assert self.fit(write(place, "train"), "--target", "kind") == 0
        run = Run.open("run")
        assert run.classes == ("ant", "bee", "cat")
        x = torch.tensor(place.drop(columns="kind").to_numpy())
        y = torch.tensor([run.classes.index(kind) for kind in place["kind"]])
        fit = deltabars.fit(run.model.load(), (x, y), l2=0.5, progress=False)
        found = self.predict(write(place, "test"))
        assert np.allclose(found["std_bee"], fit.predict(x).std[:, 1].numpy(), rtol=1e-5)
        assert found["target_name"].tolist() == place["kind"].tolist()
        some = place[place["kind"] != "ant"]  # the classes that are there are found by their names
        assert self.predict(write(some, "some"))["target_name"].tolist() == some["kind"].tolist()
        assert "target" not in self.predict(write(place.drop(columns="kind"), "plain"))

    def test_numbers_as_targets(self, place):
        for values, likelihood, outputs in (
            (np.arange(60) % 3, "categorical", 3),
            (np.linspace(-1, 1, 60), "gaussian", 1),
        ):
            place.assign(kind=values).to_csv("train.csv", index=False)
            options = ("--target", "kind", "--likelihood", likelihood)
            made = ("--model-args", json.dumps({"outputs": outputs}))
            assert self.fit("train.csv", *options, *made) == 0
            assert np.allclose(self.predict("train.csv")["target"], values)

    def test_refused(self, place, capsys):
        for change, said in (
            (lambda t: t.assign(x1="red"), "got others: x1. Leave them out"),
            (lambda t: t.assign(x1=t["x1"].mask(t.index < 7)), "missing ones: 7 in 'x1'"),
            (lambda t: t.rename(columns={"kind": "sort"}), "--target: expected a column"),
            (lambda t: t.rename(columns={"x1": ""}), "index=False"),
            (lambda t: t[:0], "expected rows"),
        ):
            change(place).to_csv("train.csv", index=False)
            assert self.fit("train.csv", "--target", "kind") == 1
            assert said in only_line(capsys)
        for name, content in (("a.csv", b"\xff\xfe"), ("b.csv", b""), ("c.csv", b"a,b\n1\n"),
                              ("e.csv", b"a,b\n1,2,3\n"), ("d.parquet", b"PAR1 no")):  # fmt: skip
            Path(name).write_bytes(content)
            assert self.fit(name, "--target", "b") == 1
            assert only_line(capsys).startswith("deltabars: --data: expected")
        place.to_csv("train.csv", index=False)
        assert self.fit("train.csv", "--target", "kind") == 0
        capsys.readouterr()
        for change, said in (
            (lambda t: t.drop(columns="x3"), "(the difference: x3)"),
            (lambda t: t[["x1", "x0", "x2", "x3"]], "(another order)"),
            (lambda t: t.assign(kind="dog"), "some of the 3 classes of the fit"),
        ):
            change(place).to_csv("test.csv", index=False)
            assert self.predict("test.csv") is None
            assert said in only_line(capsys)


class TestClassesByName:
    def test_a_folder_with_some_of_the_classes(self, workshop, tmp_path):
        """Digits 7 and 3 alone are 7 and 3, not 1 and 0."""
        run = Run.open(workshop.run)
        for name in ("digit 3", "digit 7"):
            shutil.copytree(workshop.folder / "test" / name, tmp_path / name)
        source = run.load_data(str(tmp_path))
        assert source.classes == run.classes
        numbers = [int(name.split("/")[0].removeprefix("digit ")) for name in source.names]
        assert source.targets.tolist() == numbers
        assert torch.equal(torch.cat([labels for _, labels in source.data]), source.targets)
        (tmp_path / "digit 3").rename(tmp_path / "digit 33")
        with pytest.raises(DataError, match=r"some of the 10 classes .*the difference: digit 33"):
            run.load_data(str(tmp_path))

    def test_arrays_in_another_order(self, workshop, tmp_path):
        images, labels = workshop.test
        names = [f"digit {k}" for k in range(9, -1, -1)]
        np.savez(tmp_path / "a.npz", x=images.numpy(), y=9 - labels.numpy(), classes=names)
        source = Run.open(workshop.run).load_data(str(tmp_path / "a.npz"))
        assert torch.equal(source.targets, labels)
        assert torch.equal(source.data[1], labels)
