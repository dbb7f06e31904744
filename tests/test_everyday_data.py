"""Data as people have them: arrays, rows of dicts, a column of numbers, tables of a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import deltabars
from deltabars.errors import DataError
from deltabars.likelihoods import Gaussian

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
    assert torch.equal(found.predict(inputs).std, expected.predict(others).std)


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
