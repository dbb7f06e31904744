"""Tables: CSV and Parquet files with a column for each number of the input, and one of targets."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import DataError, first_line
from deltabars.reading import check_unpacked
from deltabars.sources.arrays import from_tensors
from deltabars.sources.pictures import Preparation
from deltabars.sources.source import Source
from deltabars.tables import pyarrow

ENDINGS = (".csv", ".parquet")
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
_SHOWN = 5  # columns that a message names
_Columns = dict[str, list[Any]]


def read_table(path: Path, target: str | None, known: Sequence[str] | None) -> Source:
    """The columns of a table as float32 in their order, but for `target`, which has the targets.

    Targets are class numbers where all are whole, names of classes where they are texts (in sorted
    order), or real numbers.

    Args:
        path: the file.
        target: the name of its column.
        known: the columns that a fit has; then the target may be missing.

    Raises:
        DataError: a column is missing, has other values than numbers, or has none in places.
    """
    columns = _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
    if target is not None and target not in columns and known is None:
        raise DataError(f"--target: expected a column of {path}, got {target!r}. {_among(columns)}")
    given = None if target is None else columns.pop(target, None)
    names = tuple(columns)
    if known is not None and names != tuple(known):
        odd = sorted({*names} ^ {*known})
        raise DataError(
            f"--data: expected the {len(known)} columns of the fit in their order, {_few(known)}, "
            f"got {_few(names)} in {path}"
            + (f" (the difference: {_few(odd)})." if odd else " (another order).")
        )
    _check_present(path, columns if given is None else {**columns, str(target): given})
    numbers = {name: _numbers(values) for name, values in columns.items()}
    texts = [name for name, values in numbers.items() if values is None]
    if texts or not numbers:
        raise DataError(
            f"--data: expected columns of numbers in {path}, got others: {_few(texts) or 'none'}. "
            "Leave them out, or make numbers of them as for the training (a column of 0 and 1 for "
            "each category); --target names the column with the targets."
        )
    inputs = torch.tensor(np.array(list(numbers.values()), np.float32).T.copy())
    targets, classes = (None, None) if given is None else _targets(given)
    source = from_tensors(inputs, targets, Preparation(), classes, is_pixels=False)
    return replace(source, columns=names)


def _read_csv(path: Path) -> _Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=start.count)
            head, *rows = csv.reader(file, delimiter=delimiter)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"--data: expected a CSV file with a line of names, got {path} ({first_line(error)})."
        ) from error
    rows = [row for row in rows if row]
    odd = next((number for number, row in enumerate(rows) if len(row) != len(head)), None)
    if odd is not None:
        raise DataError(
            f"--data: expected {len(head)} values in each row of {path}, got {len(rows[odd])} in "
            f"row {odd + 1}."
        )
    _check_names(path, head, len(rows))
    return {name: [row[k].strip() for row in rows] for k, name in enumerate(head)}


def _read_parquet(path: Path) -> _Columns:
    arrow = pyarrow()
    from pyarrow import parquet

    try:
        known = parquet.read_metadata(path)
        check_unpacked(8 * known.num_rows * known.num_columns, path.stat().st_size)
        table = parquet.read_table(path)
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(
            f"--data: expected a Parquet file, got {path}, which is broken or is none "
            f"({first_line(error).rstrip('.')})."
        ) from error
    _check_names(path, table.column_names, table.num_rows)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _check_names(path: Path, names: Sequence[str], rows: int) -> None:
    bad = [name for name in names if not name.strip() or name.startswith("__index_level_")]
    if bad or len({*names}) < len(names) or not rows:
        what = (
            "rows below the line of names"
            if not rows
            else "a name for each column (of pandas: index=False)"
            if bad
            else "each name of a column once"
        )
        raise DataError(f"--data: expected {what} in {path}, got {_few(names)}.")


def _check_present(path: Path, columns: Mapping[str, list[Any]]) -> None:
    counts = {name: sum(map(_is_missing, values)) for name, values in columns.items()}
    found = [f"{count:,} in {name!r}" for name, count in counts.items() if count]
    if found:
        raise DataError(
            f"--data: expected a value in every cell of {path}, got missing ones: "
            f"{', '.join(found[:_SHOWN])}. Fill them as for the training, or leave the rows out."
        )


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in _MISSING
    return value is None or value != value


def _numbers(values: list[Any]) -> np.ndarray | None:
    """Real numbers, from text as well; None where there is anything else."""
    if any(isinstance(value, bytes) for value in values):
        return None
    try:
        return np.array([float(value) for value in values])
    except (TypeError, ValueError):
        return None


def _targets(values: list[Any]) -> tuple[Tensor, tuple[str, ...] | None]:
    numbers = _numbers(values)
    if numbers is None:
        classes = tuple(sorted({str(value) for value in values}))
        places = {name: k for k, name in enumerate(classes)}
        return torch.tensor([places[str(value)] for value in values]), classes
    is_whole = all(
        isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value))
        for value in values
    )
    return torch.tensor(numbers).to(torch.int64 if is_whole else torch.float32), None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN))


def _among(columns: Mapping[str, Any]) -> str:
    return f"It has {_few(list(columns))}."
