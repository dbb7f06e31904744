"""Data as people have them: arrays, rows of dicts, a column of numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import deltabars
from deltabars.errors import DataError

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


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    x, y, model = torch.randn(40, 4), torch.arange(40) % 3, nn.Linear(4, 3)
    return model, x, y, deltabars.fit(model, (x, y), **OPTIONS)


def test_arrays_and_rows_of_dicts_are_the_same_data(case):
    model, x, y, expected = case
    a, b = x.numpy(), y.numpy()
    strided = np.asarray(a[::-1].copy())[::-1], np.stack([b, b], 1)[:, 0]
    fixed = a.copy()
    fixed.flags.writeable = False
    for data in (
        (a, b), [a, y], strided, (fixed, b), (a.astype(">f4"), b.astype(">i8")),
        {"input": a, "labels": b}, [(a[:20], b[:20]), (a[20:], b[20:])],
        Rows(input=x.tolist(), label=y.tolist()), Rows(input=a, labels=b),
        DataLoader(Rows(input=x, labels=y), batch_size=7),
    ):  # fmt: skip
        found = deltabars.fit(model, data, **OPTIONS)
        assert found.num_examples == expected.num_examples
        given = a if isinstance(data, tuple | list) else data
        # Batches of other sizes: on some processors the last bits of products depend on them.
        std = found.predict(given).std, expected.predict(x).std
        torch.testing.assert_close(*std, rtol=1e-6, atol=1e-9)


def test_data_that_are_no_numbers_are_refused(case):
    model, x, y, _ = case
    ragged = [[1] * (k % 3 + 1) for k in range(40)]
    for data, said in (
        ((x.numpy().astype(object), y), r"array of object .*numpy.float32"),
        ((np.array(["a"] * 40), y), "categories numbers first"),
        (Rows(input=x.tolist(), extra=["text"] * 40, label=y.tolist()), "'extra', got str"),
        (Rows(input=x.tolist(), extra=ragged, label=y.tolist()), "one shape"),
    ):
        with pytest.raises(DataError, match=said):
            deltabars.fit(model, data, **OPTIONS)


def test_targets_of_one_number_each():
    torch.manual_seed(1)
    x, model = torch.randn(30, 3).double(), nn.Linear(3, 1).double()
    y = x.sum(1) + 0.3 * torch.randn(30).double()
    for likelihood in ("gaussian", nn.MSELoss()):
        options = {**OPTIONS, "rank": 4, "likelihood": likelihood}
        expected = deltabars.fit(model, (x, y[:, None]), **options)
        for data in ((x, y), [(x[:9], y[:9]), (x[9:], y[9:])]):
            found = deltabars.fit(model, data, **options)
            assert found.noise == pytest.approx(expected.noise, rel=1e-12)
            assert torch.allclose(found.predict(x).std, expected.predict(x).std, rtol=1e-9)
    with pytest.raises(DataError, match=r"\(30, 2\) of the outputs, got \(30,\)"):
        deltabars.fit(nn.Linear(3, 2).double(), (x, y), likelihood="gaussian", **OPTIONS)
