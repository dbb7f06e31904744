"""Predictions as tables: one row an input, in CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor

from deltabars.errors import BadValueError, library
from deltabars.prediction.prediction import ONE_AN_INPUT, ONE_AN_OUTPUT, Prediction
from deltabars.storage.writing import write_whole

ENDINGS = (".csv", ".jsonl", ".parquet")
_NAMED = ("target", "label")  # have a column of names, or a column an output
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")

Columns = dict[str, np.ndarray]


def columns_of(
    prediction: Prediction,
    names: Sequence[str],
    targets: Tensor | None = None,
    classes: Sequence[str] | None = None,
) -> Columns:
    """Return the columns of a table: `input`, `target`, `label`, `score`, …, `mean_CLASS`.

    `target_name` and `label_name` have the names of classes. Columns of a class end in its name, or
    its number; where two would have one name, in NUMBER_NAME. Where only some classes were asked
    for, they end in the index among these, and `class_0`, … say which they are.
    """
    arrays = prediction.numpy()
    found: Columns = {"input": np.array(names, dtype=object)}
    chosen = arrays.get("classes")
    truth = None if targets is None else targets.cpu().numpy()
    for name, numbers in (("target", truth), ("label", arrays.get("label"))):
        if numbers is not None and numbers.ndim > 1:
            for k, end in enumerate(_endings(numbers.shape[1], classes)):
                found[f"{name}_{end}"] = numbers[:, k]
        elif numbers is not None:
            found[name] = numbers
            if classes is not None and numbers.dtype.kind in "iu":
                found[f"{name}_name"] = _named(numbers, classes)
    if "label" in found:
        of_class = np.arange(prediction.mean.shape[1]) if chosen is None else chosen
        same = of_class == found["label"][:, None]  # (B, C); none where it was not asked for
        probability = np.where(same, arrays["mean"], 0).sum(1)
        found["probability"] = np.where(same.any(1), probability, math.nan)
        if "target" in found:
            found["right"] = found["target"] == found["label"]
    endings = _endings(prediction.mean.shape[1], classes if chosen is None else None)
    for name, values in prediction.columns(endings, interval_ends=False).items():
        is_number = chosen is not None and name.startswith("class_")
        found.setdefault(name, _named(values, classes) if is_number else values)
    return found


def check_ending(path: Path, option: str = "--out", endings: Sequence[str] = ENDINGS) -> None:
    """Refuse a file name of another kind, and Parquet where it cannot be written."""
    if path.suffix.lower() not in endings:
        raise BadValueError(
            f"{option}: expected a file name that ends in one of {', '.join(endings)}, got "
            f"{path.name!r}."
        )
    if path.suffix.lower() == ".parquet":
        pyarrow()


def write_table(path: str | Path, parts: Iterable[Columns]) -> None:
    """Write a table, a part at a time, whole or not at all; the name's ending says the format."""
    target = Path(path)
    check_ending(target)
    writers = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}
    writer = writers[target.suffix.lower()]
    write_whole(target, lambda draft: writer(draft, parts))


def plain_rows(columns: Columns) -> list[dict[str, Any]]:
    """Return a table's rows as JSON has them: what is not finite is None."""
    lists = [_plain(values) for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def pyarrow() -> Any:
    """Return the library for Parquet."""
    return library("pyarrow.parquet", "parquet") and library("pyarrow", "parquet")


def _endings(count: int, classes: Sequence[str] | None) -> list[str]:
    """Return how the columns of each output end, so that no two columns have one name."""
    if classes is None:
        return [str(k) for k in range(count)]
    if len(classes) != count:
        raise BadValueError(
            f"classes: expected a name for each of the {count} outputs, got {len(classes)}."
        )
    fixed = [*ONE_AN_INPUT, *(f"{name}_name" for name in _NAMED)]
    whole = [f"{name}_{end}" for name in (*ONE_AN_OUTPUT, *_NAMED) for end in classes]
    if len({*fixed, *whole}) == len(fixed) + len(whole):
        return list(classes)
    return [f"{k}_{name}" for k, name in enumerate(classes)]  # no prefix above ends in a digit


def _named(numbers: np.ndarray, classes: Sequence[str] | None) -> np.ndarray:
    if classes is None:
        return numbers
    known = [classes[k] if 0 <= k < len(classes) else str(k) for k in numbers.tolist()]
    return np.array(known, dtype=object)


def _plain(values: np.ndarray) -> list[Any]:
    """Return Python's own numbers, of float32 with the few digits that tell them apart."""
    if values.dtype.kind != "f":
        return values.tolist()
    numbers = [float(str(value)) for value in values]
    return [number if math.isfinite(number) else None for number in numbers]


def _write_csv(path: Path, parts: Iterable[Columns]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(_Lines(file), lineterminator="\r\n")
        for number, columns in enumerate(parts):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*map(_texts, columns.values()), strict=True))


class _Lines:
    r"""A file whose lines end in "\n" alone, though cells with either of "\r\n" are quoted."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, line: str) -> int:
        return self.file.write(line.removesuffix("\r\n") + "\n")


def _texts(values: np.ndarray) -> list[str]:
    """Return cells of CSV; texts that a spreadsheet would take for formulas begin with `'`."""
    if values.dtype.kind != "O":
        return [str(value) for value in values]
    return [f"'{text}" if text.startswith(_FORMULAS) else text for text in map(str, values)]


def _write_lines(path: Path, parts: Iterable[Columns]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for columns in parts:
            for row in plain_rows(columns):
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write_parquet(path: Path, parts: Iterable[Columns]) -> None:
    arrow, writer = pyarrow(), None
    try:
        for columns in parts:
            table = arrow.table({name: arrow.array(values) for name, values in columns.items()})
            writer = writer or arrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
