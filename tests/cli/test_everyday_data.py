"""Data as people have them: arrays, rows of dicts, a column of numbers, tables of a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import deltabars
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.errors import DataError
from deltabars.likelihoods.gaussian import Gaussian
from tests.scans import only_line

pytestmark = pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
OPTIONS = {"l2": 0.05, "rank": 6, "progress": False}


class Rows:
    """What a `datasets.Dataset` is to others: rows of dicts, several of them at a time too."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture(scope="module")
def case():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator)
    torch.manual_seed(0)
    model = Named()
    y = torch.arange(40) % 3
    return model, x, y, deltabars.fit(model, (x, y), **OPTIONS)


def same(found, expected, inputs, others):
    assert found.num_examples == expected.num_examples
    # Batches of other sizes: on some processors the last bits of products depend on them.
    std = found.predict(inputs).std, expected.predict(others).std
    torch.testing.assert_close(*std, rtol=1e-6, atol=1e-9)


class TestArrays:
    @pytest.mark.parametrize(
        "kind", ["pair", "list", "strided", "read only", "big-endian", "mixed"]
    )
    def test_pairs(self, kind, case):
        model, x, y, expected = case
        a, b = x.numpy(), y.numpy()
        if kind == "strided":
            a, b = a[::-1][::-1], np.stack([b, b], 1)[:, 0]
            a = np.asarray(a[::-1].copy())[::-1]
        elif kind == "read only":
            a = a.copy()
            a.flags.writeable = False
        elif kind == "big-endian":
            a, b = a.astype(">f4"), b.astype(">i8")
        elif kind == "mixed":
            b = y
        data = [a, b] if kind == "list" else (a, b)
        same(deltabars.fit(model, data, **OPTIONS), expected, a, x)

    def test_mappings_loaders_and_batches(self, case):
        model, x, y, expected = case
        whole = {"x": x.numpy(), "labels": y.numpy()}
        batches = [(x[:20].numpy(), y[:20].numpy()), (x[20:].numpy(), y[20:].numpy())]
        for data in (whole, batches):
            found = deltabars.fit(model, data, **OPTIONS)
            given = {"x": x.numpy()} if data is whole else x.numpy()
            same(found, expected, given, x)

    def test_refused(self, case):
        model, x, y, _ = case
        for data, said in (
            ((x.numpy().astype(object), y), r"array of object .*numpy.float32"),
            ((np.array(["a"] * 40), y), "categories numbers first"),
            ((x.numpy(), y.numpy()[:-1]), "one first dimension"),
        ):
            with pytest.raises(DataError, match=said):
                deltabars.fit(model, data, **OPTIONS)


class TestRowsOfDicts:
    @pytest.mark.parametrize("key", ["label", "labels"])
    @pytest.mark.parametrize("form", ["lists", "arrays", "tensors", "loader"])
    def test_as_a_dataset_of_hugging_face(self, key, form, case):
        model, x, y, expected = case
        columns = {
            "lists": (x.tolist(), y.tolist()), "arrays": (x.numpy(), y.numpy()),
            "tensors": (x, y), "loader": (x, y),
        }[form]  # fmt: skip
        rows = Rows(**{"x": columns[0], key: columns[1]})
        data = DataLoader(rows, batch_size=7) if form == "loader" else rows
        found = deltabars.fit(model, data, **OPTIONS)
        same(found, expected, data, x)
        same(found, expected, {"x": x}, x)

    def test_an_input_called_label(self, case):
        """Beside `labels` it is an input, at a prediction as well."""
        _, x, y, _ = case

        class Two(Named):
            def forward(self, x, label):
                return self.layer(x) + label[:, None]

        model = Two()
        fit = deltabars.fit(model, {"x": x, "label": y.float(), "labels": y}, **OPTIONS)
        found = fit.predict({"x": x, "label": y.float()})
        assert torch.equal(found.mean, fit.predict({"x": x, "label": y.float(), "labels": y}).mean)
        assert found.mean.shape == (40, 3)

    @pytest.mark.parametrize(
        ("column", "said"),
        [
            (["text"] * 40, "'extra', got str"),
            ([[1] * (k % 3 + 1) for k in range(40)], "one shape"),
        ],
    )
    def test_columns_that_are_no_numbers(self, column, said, case):
        model, x, y, _ = case
        with pytest.raises(DataError, match=said):
            deltabars.fit(model, Rows(x=x.tolist(), extra=column, label=y.tolist()), **OPTIONS)


class TestRegressionTargets:
    @pytest.mark.parametrize("estimator", ["opg", "hessian", "ggn", "sandwich"])
    @pytest.mark.parametrize("likelihood", ["gaussian", nn.MSELoss(), Gaussian("estimate")])
    def test_one_number_each(self, estimator, likelihood):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(30, 3, generator=generator).double()
        y = x.sum(1) + 0.3 * torch.randn(30, generator=generator).double()
        torch.manual_seed(1)
        model = nn.Linear(3, 1).double()
        options = {"l2": 0.1, "rank": 4, "likelihood": likelihood, "estimator": estimator}
        options["progress"] = False
        expected = deltabars.fit(model, (x, y[:, None]), **options)
        for data in ((x, y), (x.numpy(), y.numpy()), [(x[:9], y[:9]), (x[9:], y[9:])]):
            found = deltabars.fit(model, data, **options)
            assert found.noise == pytest.approx(expected.noise, rel=1e-12)
            assert torch.allclose(found.predict(x).std, expected.predict(x).std, rtol=1e-10)
            assert found.diagnostics["relative_gradient"] == pytest.approx(
                expected.diagnostics["relative_gradient"], rel=1e-12
            )
        for level in (0.01, 1.0):
            one = found.with_l2(level)
            assert torch.allclose(
                one.predict(x).std, expected.with_l2(level).predict(x).std, rtol=1e-9
            )

    def test_of_several_outputs_they_are_refused(self):
        with pytest.raises(DataError, match=r"\(30, 2\) of the outputs, got \(30,\)"):
            deltabars.fit(
                nn.Linear(3, 2),
                (torch.ones(30, 3), torch.ones(30)),
                likelihood="gaussian",
                **OPTIONS,
            )


NET = """\
import deltabars
import torch


@deltabars.trained
def make(outputs=3):
    torch.manual_seed(0)
    return torch.nn.Linear(4, outputs)
"""


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

    @pytest.mark.parametrize("ending", ["csv", "parquet", "tsv.csv"])
    def test_names_of_classes_as_targets(self, ending, place):
        def write(frame, name):
            if ending == "parquet":
                frame.to_parquet(f"{name}.{ending}", index=False)
            else:
                separator = "\t" if "tsv" in ending else ","
                frame.to_csv(f"{name}.{ending}", index=False, sep=separator)
            return f"{name}.{ending}"

        assert self.fit(write(place, "train"), "--target", "kind") == 0
        run = Run.open("run")
        assert run.classes == ("ant", "bee", "cat")
        x = torch.tensor(place.drop(columns="kind").to_numpy())
        y = torch.tensor([{"ant": 0, "bee": 1, "cat": 2}[kind] for kind in place["kind"]])
        model = run.model.load()
        expected = deltabars.fit(model, (x, y), l2=0.5, progress=False).predict(x)
        found = self.predict(write(place, "test"))
        for k, name in enumerate(run.classes):
            assert np.allclose(found[f"std_{name}"], expected.std[:, k].numpy(), rtol=1e-5)
        assert found["target_name"].tolist() == place["kind"].tolist()
        some = place[place["kind"] != "ant"]  # the classes that are there are found by their names
        assert self.predict(write(some, "some"))["target_name"].tolist() == some["kind"].tolist()
        assert "target" not in self.predict(write(place.drop(columns="kind"), "plain"))

    def test_numbers_as_targets(self, place):
        for values, likelihood, outputs in (
            (np.arange(60) % 3, "categorical", 3), (np.linspace(-1, 1, 60), "gaussian", 1),
            (np.arange(60) % 7 - 3, "gaussian", 1),
        ):  # fmt: skip
            place.assign(kind=values).to_csv("train.csv", index=False)
            options = ("--target", "kind", "--likelihood", likelihood)
            made = ("--model-args", json.dumps({"outputs": outputs}))
            assert self.fit("train.csv", *options, *made) == 0
            target = self.predict("train.csv")["target"]
            assert np.allclose(target, values)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda t: t.assign(x1="red"), "got others: x1. Leave them out"),
            (lambda t: t.assign(x1=t["x1"].mask(t.index < 7)), "missing ones: 7 in 'x1'"),
            (lambda t: t.assign(kind=t["kind"].mask(t.index < 2)), "2 in 'kind'"),
            (lambda t: t.rename(columns={"kind": "sort"}), "--target: expected a column"),
            (lambda t: t.rename(columns={"x1": ""}), "index=False"),
            (lambda t: t.rename(columns={"x1": "x0"}), "each name of a column once"),
            (lambda t: t[:0], "rows below the line of names"),
        ],
    )
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_refused_at_the_fit(self, change, said, ending, place, capsys):
        frame = change(place)
        if not frame.columns.is_unique:  # which pandas does not write to Parquet
            ending = "csv"
        write = frame.to_csv if ending == "csv" else frame.to_parquet
        write(f"train.{ending}", index=False)
        assert self.fit(f"train.{ending}", "--target", "kind") == 1
        assert said in only_line(capsys)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda t: t.drop(columns="x3"), "(the difference: x3)"),
            (lambda t: t.assign(other=1.0), "(the difference: other)"),
            (lambda t: t[["x1", "x0", "x2", "x3"]], "(another order)"),
            (lambda t: t.assign(kind="dog"), "some of the 3 classes of the fit"),
        ],
    )
    def test_refused_at_a_prediction(self, change, said, place, capsys):
        place.to_csv("train.csv", index=False)
        assert self.fit("train.csv", "--target", "kind") == 0
        change(place).to_csv("test.csv", index=False)
        capsys.readouterr()
        assert self.predict("test.csv") is None
        assert said in only_line(capsys)

    def test_files_that_are_none(self, place, capsys):
        for name, content in (("a.csv", b"\xff\xfe"), ("b.csv", b""), ("c.csv", b"a,b\n1\n"),
                              ("d.parquet", b"PAR1 no")):  # fmt: skip
            Path(name).write_bytes(content)
            assert self.fit(name, "--target", "b") == 1
            assert only_line(capsys).startswith("deltabars: --data: expected")
        assert self.fit("none.csv", "--target", "b") == 1
        assert "does not exist" in only_line(capsys)


class TestClassesByName:
    def test_a_folder_with_some_of_the_classes(self, workshop, tmp_path):
        """Digits 7 and 3 alone are 7 and 3, not 1 and 0."""
        run = Run.open(workshop.run)
        for digit in (3, 7):
            name = f"digit {digit}"
            shutil.copytree(workshop.folder / "test" / name, tmp_path / name)
        source = run.load_data(str(tmp_path))
        assert source.classes == run.classes
        assert set(source.targets.tolist()) == {3, 7}
        for k, name in enumerate(source.names):
            assert name.startswith(f"digit {int(source.targets[k])}/")
            assert int(source.dataset[k][1]) == int(source.targets[k])
        labels = torch.cat([labels for _, labels in source.data])
        assert torch.equal(labels, source.targets)
        (tmp_path / "digit 3").rename(tmp_path / "digit 33")
        with pytest.raises(DataError, match=r"some of the 10 classes .*the difference: digit 33"):
            run.load_data(str(tmp_path))

    def test_arrays_in_another_order(self, workshop, tmp_path):
        run = Run.open(workshop.run)
        images, labels = workshop.test
        names = [f"digit {k}" for k in range(9, -1, -1)]
        np.savez(tmp_path / "a.npz", x=images.numpy(), y=9 - labels.numpy(), classes=names)
        source = run.load_data(str(tmp_path / "a.npz"))
        assert torch.equal(source.targets, labels)
        assert torch.equal(source.data[1], labels)
