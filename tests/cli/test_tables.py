"""Predictions as tables in three formats."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

import deltabars
from deltabars.cli.tables import columns_of, plain_rows, write_table
from deltabars.errors import BadValueError, StorageError

# The networks are not trained: tables only copy their numbers.
pytestmark = pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
NAMES = [f"picture, “{k}”\nof two lines" for k in range(10)]


@pytest.fixture(scope="module")
def prediction():
    inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    data, options = (inputs, torch.arange(40) % 3), {"l2": 1.0, "rank": 18, "progress": False}
    return deltabars.fit(torch.nn.Linear(5, 3), data, **options).predict(inputs[:10])


def parts(prediction, targets=None, classes=None):
    """A table in two parts."""
    for rows in (slice(0, 6), slice(6, 10)):
        given = None if targets is None else targets[rows]
        yield columns_of(prediction[rows], NAMES[rows], given, classes)


def read(path):
    """Rows of a file, by another library where there is one."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    reader = pandas.read_csv if path.suffix == ".csv" else pandas.read_parquet
    return reader(path).to_dict("records")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_every_format_has_every_number(ending, prediction, tmp_path):
    path = tmp_path / f"table.{ending}"
    targets = torch.arange(10) % 3
    write_table(path, parts(prediction, targets, ("a", "b", "c")))
    rows = read(path)
    assert [row["input"] for row in rows] == NAMES
    assert [row["target_name"] for row in rows] == list("abcabcabca")
    assert [row["right"] for row in rows] == (targets == prediction.label).tolist()
    columns = ("score", "mean_b", "std_error_c")
    expected = prediction.score, prediction.mean[:, 1], prediction.std_error[:, 2]
    for column, values in zip(columns, expected, strict=True):
        found = np.array([row[column] for row in rows], dtype=np.float32)
        assert np.array_equal(found, values.detach().numpy()), column
    assert [path.name for path in tmp_path.iterdir()] == [f"table.{ending}"]


def test_what_is_not_finite_is_null_in_json(prediction, tmp_path):
    odd = replace(prediction, score=torch.full((10,), math.inf))
    write_table(tmp_path / "a.jsonl", parts(odd))
    assert {row["score"] for row in read(tmp_path / "a.jsonl")} == {None}
    write_table(tmp_path / "a.csv", parts(odd))
    with (tmp_path / "a.csv").open(newline="") as file:
        assert {row["score"] for row in csv.DictReader(file)} == {"inf"}


def test_a_failure_on_the_way_leaves_nothing(prediction, tmp_path):
    def broken():
        yield from list(parts(prediction))[:1]
        raise RuntimeError("in the middle")

    for ending in ("csv", "jsonl", "parquet"):
        with pytest.raises(RuntimeError, match="in the middle"):
            write_table(tmp_path / f"a.{ending}", broken())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadValueError, match=r"\.csv, \.jsonl, \.parquet"):
        write_table(tmp_path / "a.txt", [])
    with pytest.raises(StorageError, match="Cannot write"):
        write_table(tmp_path / "no" / "a.csv", parts(prediction))
    with pytest.raises(BadValueError, match="each of the 3 outputs, got 2"):
        columns_of(prediction, NAMES, classes=["c"] * 2)


def test_several_outputs_have_a_column_each():
    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, :2] > 0).float()
    options = {"l2": 1.0, "rank": 10, "progress": False}
    for likelihood in ("bernoulli", "gaussian"):
        model = torch.nn.Linear(4, 2)
        fit = deltabars.fit(model, (inputs, targets), likelihood=likelihood, **options)
        rows = plain_rows(columns_of(fit.predict(inputs), [str(k) for k in range(30)], targets))
        assert rows[3]["target_1"] == float(targets[3, 1])
        assert ("label_0" in rows[0]) == (likelihood == "bernoulli")
        assert ("total_std_1" in rows[0]) == (likelihood == "gaussian")
        assert "probability" not in rows[0]


@pytest.mark.parametrize("classes", [
    ("a", "login", "error_login"), ("b", "b", "b"), ("1_a", "0_1_a", "1_a"), ("name", "score", "x"),
])  # fmt: skip
def test_every_number_is_found_again(classes, prediction, tmp_path):
    """Whatever classes are called: three columns a kind, in the order of the classes."""
    write_table(tmp_path / "a.csv", parts(prediction, None, classes))
    rows = read(tmp_path / "a.csv")
    titles = list(rows[0])
    assert len(titles) == len(columns_of(prediction, NAMES)) + 1  # label_name
    for kind in ("mean", "std", "std_error"):
        at = titles.index(next(title for title in titles if title.startswith(kind + "_")))
        values = np.array([[row[title] for title in titles[at : at + 3]] for row in rows])
        assert np.array_equal(values.astype(np.float32), getattr(prediction, kind).numpy())


def test_texts_that_a_spreadsheet_would_run(prediction, tmp_path):
    names = ["=1+1", "+1", "-1", "@sum(a)", "\t=1", "\r=1", "a=1", "'=1", "", " "]
    classes = ("=cmd|'/c calc'!a0", "@b", "c")
    columns = columns_of(prediction, names, torch.arange(10) % 3, classes)
    for ending in ("csv", "jsonl", "parquet"):
        write_table(tmp_path / f"a.{ending}", [columns])
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["input"] for row in rows] == [f"'{name}" for name in names[:6]] + names[6:]
    assert rows[0]["target_name"] == "'=cmd|'/c calc'!a0"
    assert all(not title.startswith(("=", "+", "-", "@")) for title in rows[0])
    for ending in ("jsonl", "parquet"):
        assert [row["input"] for row in read(tmp_path / f"a.{ending}")] == names
