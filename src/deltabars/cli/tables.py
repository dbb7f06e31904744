"""Predictions as tables: one row an input, in CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import numpy as np
from torch import Tensor

from deltabars.errors import BadValueError, MissingDependencyError
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
    """The columns of a table: `input`, `target`, `label`, `probability`, `score`, …, `mean_CLASS`.

    Beside the numbers of targets and labels are their names, `target_name` and `label_name`.

    Args:
        prediction: B inputs.
        names: of the inputs, (B,).
        targets: (B,) or (B, C), where they are known.
        classes: names of the classes, which stand in place of numbers.

    Columns of a class end in its name, or its number; where names would give two columns one name
    (`login` and `error_login`, or two classes of one name), all end in NUMBER_NAME. Where only some
    classes were asked for, they end in the place among these, and `class_0`, … say which they are.

    Raises:
        BadValueError: there are not as many names as outputs.
    """
    arrays = prediction.numpy()
    found: Columns = {"input": np.array(names, dtype=object)}
    if targets is not None:
        found.update(_by_class("target", targets.cpu().numpy(), classes))
    if "label" in arrays:
        found.update(_by_class("label", arrays["label"], classes))
        if arrays["label"].ndim == 1:
            found["probability"] = _probability(prediction).numpy()
            if targets is not None and targets.ndim == 1:
                found["right"] = targets.cpu().numpy() == arrays["label"]
    chosen = arrays.get("classes")
    endings = _endings(prediction.mean.shape[1], classes if chosen is None else None)
    for name, values in prediction.columns(endings, interval_ends=False).items():
        is_number = chosen is not None and name.startswith("class_")
        found.setdefault(name, _named(values, classes) if is_number else values)
    return found


def check_ending(path: Path, option: str = "--out") -> None:
    """Refuse a file name of another kind, and Parquet where it cannot be written."""
    if path.suffix.lower() not in ENDINGS:
        raise BadValueError(
            f"{option}: expected a file name that ends in one of {', '.join(ENDINGS)}, got "
            f"{path.name!r}."
        )
    if path.suffix.lower() == ".parquet":
        pyarrow()


def write_table(path: str | Path, parts: Iterable[Columns]) -> None:
    """Write a table, a part at a time, whole or not at all; the name's ending says the format.

    Raises:
        BadValueError: the name ends otherwise.
        StorageError: the file cannot be written.
    """
    target = Path(path)
    check_ending(target)
    writers = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}
    writer = writers[target.suffix.lower()]
    write_whole(target, lambda draft: writer(draft, parts))


def plain_rows(columns: Columns) -> list[dict[str, Any]]:
    """A table's rows as JSON has them: what is not finite is None."""
    lists = {name: _plain(values) for name, values in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _probability(prediction: Prediction) -> Tensor:
    """Of the predicted class (B,); NaN where it is not among the classes asked for."""
    assert prediction.label is not None
    labels = prediction.label[:, None]
    if prediction.classes is None:
        return prediction.mean.gather(1, labels)[:, 0]
    same = prediction.classes == labels
    value = (prediction.mean * same).sum(1)
    return value.masked_fill(~same.any(1), math.nan)


def _by_class(name: str, numbers: np.ndarray, classes: Sequence[str] | None) -> Columns:
    """One column of classes, with their names where they have any, or a column an output."""
    if numbers.ndim == 1:
        named = classes is not None and numbers.dtype.kind in "iu"
        return {name: numbers, **({f"{name}_name": _named(numbers, classes)} if named else {})}
    endings = _endings(numbers.shape[1], classes)
    return {f"{name}_{end}": numbers[:, k] for k, end in enumerate(endings)}


def _endings(count: int, classes: Sequence[str] | None) -> list[str]:
    """How the columns of each of `count` outputs end, so that no two columns have one name."""
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
    """Python's own numbers, of float32 with the few digits that tell them apart."""
    if values.dtype.kind != "f":
        return values.tolist()
    numbers = [float(str(value)) for value in values]
    return [number if math.isfinite(number) else None for number in numbers]


def _write_csv(path: Path, parts: Iterable[Columns]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        # Cells with either of "\r\n" are quoted then; lines end in "\n" alone nevertheless.
        writer = csv.writer(_Lines(file), lineterminator="\r\n")
        for number, columns in enumerate(parts):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*map(_texts, columns.values()), strict=True))


@dataclass(frozen=True)
class _Lines:
    file: TextIO

    def write(self, line: str) -> int:
        return self.file.write(line.removesuffix("\r\n") + "\n")


def _texts(values: np.ndarray) -> list[str]:
    """The cells of a column; texts that a spreadsheet would take for formulas begin with `'`."""
    if values.dtype.kind != "O":
        return [str(value) for value in values]
    return [f"'{text}" if text.startswith(_FORMULAS) else text for text in map(str, values)]


def _write_lines(path: Path, parts: Iterable[Columns]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for columns in parts:
            for row in plain_rows(columns):
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write_parquet(path: Path, parts: Iterable[Columns]) -> None:
    arrow = pyarrow()
    from pyarrow import parquet

    writer = None
    try:
        for columns in parts:
            table = arrow.table({name: arrow.array(values) for name, values in columns.items()})
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def pyarrow() -> ModuleType:
    """The library for Parquet.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError(
            "Parquet needs pyarrow: pip install 'deltabars[parquet]'."
        ) from error
    return pyarrow
