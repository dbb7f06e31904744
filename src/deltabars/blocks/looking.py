"""Blocks that are there, looked at once more: that they are whole, and what they show."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deltabars.blocks.plan import block_name
from deltabars.errors import CorruptFileError, first_line

_READ = ("number", "score", "score_error", "right")


@dataclass(frozen=True)
class Look:
    """What was seen of one block.

    Attributes:
        start: the number of its first input.
        rows: how many inputs it has.
        sha256: of the file.
        sums: of the scores and of what is right, in float64.
    """

    start: int
    rows: int
    sha256: str
    sums: Mapping[str, float] = field(default_factory=dict)

    def described(self) -> dict[str, object]:
        """The block in JSON."""
        return {
            "file": block_name(self.start),
            "first": self.start,
            "rows": self.rows,
            "sha256": self.sha256,
        }


def look_at(folder: Path, start: int, rows: int) -> Look:
    """Read a block.

    Raises:
        CorruptFileError: it cannot be read, or has other inputs than these, once each.
    """
    from pyarrow import ArrowException, parquet

    path = folder / block_name(start)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with parquet.ParquetFile(path) as opened:
            names = [name for name in _READ if name in opened.schema_arrow.names]
            table = opened.read(columns=names)
            columns = {name: table.column(name).to_numpy() for name in names}
    except (OSError, ArrowException) as error:
        raise CorruptFileError(
            f"{path} is altered: it cannot be read ({first_line(error).rstrip('.')}). Remove it, "
            "and start again."
        ) from error
    if not np.array_equal(columns.get("number", ()), np.arange(start, start + rows)):
        raise CorruptFileError(
            f"{path}: expected inputs {start:,} to {start + rows - 1:,}, once each, got others. "
            "Remove it, and start again."
        )
    return Look(start, rows, digest, _sums(columns))


def summary(looks: Iterable[Look]) -> dict[str, float | int | None]:
    """What the predictions of all blocks show, as `deltabars predict` says it."""
    count = 0
    sums: dict[str, float] = defaultdict(float)
    for look in looks:
        count += look.rows
        for name, value in look.sums.items():
            sums[name] += value
    found: dict[str, float | int | None] = {
        "inputs": count,
        "mean_score": sums["score"] / count,
        "mean_score_error": sums["score_error"] / count,
    }
    if "right" in sums:
        right, wrong = sums["right"], count - sums["right"]
        found["accuracy"] = right / count
        found["mean_score_right"] = sums["score_right"] / right if right else None
        found["mean_score_wrong"] = (sums["score"] - sums["score_right"]) / wrong if wrong else None
    return found


def _sums(columns: dict[str, np.ndarray]) -> dict[str, float]:
    found = {name: float(columns[name].sum(dtype=np.float64)) for name in ("score", "score_error")}
    if "right" in columns:
        right = columns["right"].astype(bool)
        found["right"] = int(right.sum())
        found["score_right"] = float(columns["score"][right].sum(dtype=np.float64))
    return found
