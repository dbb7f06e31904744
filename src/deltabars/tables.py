"""Predictions as tables: one row an input, in CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from deltabars.errors import BadValueError, MissingDependencyError
from deltabars.prediction import Prediction
from deltabars.writing import write_whole

ENDINGS = (".csv", ".jsonl", ".parquet")
_ONE_AN_INPUT = ("score", "score_error", "mutual_information", "entropy")
_SEVERAL_AN_INPUT = ("mean", "std", "std_error", "total_std", "moderated")

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

    Columns of a class end in its name, or its number. Where only some classes were asked for, they
    end in the place among these, and `class_0`, … say which they are.
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
    found.update({name: arrays[name] for name in _ONE_AN_INPUT if name in arrays})
    chosen = arrays.get("classes")
    count = prediction.mean.shape[1]
    endings = [str(k) for k in range(count)]
    if chosen is not None:
        for k in range(count):
            found[f"class_{k}"] = _named(chosen[:, k], classes)
    elif classes is not None:
        endings = list(classes)
    for name in _SEVERAL_AN_INPUT:
        if name in arrays:
            found.update({f"{name}_{end}": arrays[name][:, k] for k, end in enumerate(endings)})
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


def write_table(
    path: str | Path, parts: Iterable[Columns], *, draft_prefix: str = "draft-"
) -> None:
    """Write a table, a part at a time, whole or not at all; the name's ending says the format.

    `draft_prefix` is how the name of a file begins that is not whole yet.

    Raises:
        BadValueError: the name ends otherwise.
        StorageError: the file cannot be written.
    """
    target = Path(path)
    check_ending(target)
    writers = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}
    writer = writers[target.suffix.lower()]
    write_whole(target, lambda draft: writer(draft, parts), draft_prefix=draft_prefix)


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
    endings = classes or [str(k) for k in range(numbers.shape[1])]
    return {f"{name}_{end}": numbers[:, k] for k, end in enumerate(endings)}


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
        writer = csv.writer(file, lineterminator="\n")
        for number, columns in enumerate(parts):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*map(_texts, columns.values()), strict=True))


def _texts(values: np.ndarray) -> list[str]:
    return [str(value) for value in values]


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
