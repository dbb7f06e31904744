"""Blocks that are there, looked at once more: that they are whole, and what they show."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deltabars.cli.sources.source import fingerprint_of
from deltabars.cli.tables import pyarrow
from deltabars.errors import CorruptFileError, StorageError, first_line
from deltabars.fitting.fitted import DeltaFit
from deltabars.likelihoods.losses import described, is_own
from deltabars.storage.reading import parse_json, read_start
from deltabars.storage.writing import check_parent, is_draft, locked, remove_left, write_text

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


PLAN, MANIFEST, LOCK = "_plan.json", "_manifest.json", "_lock"
_FORMAT = 1
_MOST = 1 << 28  # bytes of a description
_BLOCK = re.compile(r"inputs-(\d{12})\.parquet")
_DRAFTS = re.compile(rf"_draft-[0-9a-f]{{16}}-({_BLOCK.pattern}|{PLAN}|{MANIFEST})")
_SAID = {"fit": "another fit", "data": "other data", "asked": "other options"}


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    Attributes:
        fit: the fingerprint of the fit.
        data: `inputs` (how many; None of a stream), `digest` of a few of them, the `fingerprint`
            of all where it is known, and `about`, how they are named.
        asked: the arguments of `predict`.
        block_size: inputs a block.
    """

    fit: str
    data: Mapping[str, Any]
    asked: Mapping[str, Any]
    block_size: int

    def described(self) -> dict[str, Any]:
        """The plan in JSON."""
        return {"format": _FORMAT, **json.loads(json.dumps(asdict(self), default=str))}

    def check_same(self, there: Plan, folder: Path) -> None:
        """Refuse a folder that is of another fit, other data or other options.

        Raises:
            StorageError: it is.
        """
        own, other = self.described(), there.described()
        if own["data"]["fingerprint"] is not None:  # then it does not matter where they are
            other["data"]["about"] = own["data"]["about"]
        different = [said for name, said in _SAID.items() if own[name] != other[name]]
        if different:
            raise StorageError(
                "folder: expected a new one, or one of the same fit, data and options, got "
                f"{folder}, which has predictions of {' and '.join(different)}. Give another."
            )
        if self.block_size != there.block_size:
            raise StorageError(
                f"folder: expected one in blocks of {self.block_size:,} inputs, got {folder}, "
                f"which was begun in blocks of {there.block_size:,}. Give that block size, or none."
            )


def fit_fingerprint(fit: DeltaFit) -> str:
    """A digest that tells a fit from others: its weights, its eigenvalues, and what they mean."""
    likelihood = fit.likelihood
    own = described(likelihood) if is_own(likelihood) else type(likelihood).__qualname__
    known = [
        fit.estimator, fit.level, dict(fit.prior.scales), fit.num_examples, fit.num_outputs,
        own, str(fit.network.dtype), fit.weights, fit.network.parameters.names,
        sorted(fit.spectra),
    ]  # fmt: skip
    values = (fit.spectra[name].values for name in sorted(fit.spectra))
    return fingerprint_of(json.dumps(known), *values)


def block_name(start: int) -> str:
    """The file of the block that begins with an input."""
    return f"inputs-{start:012d}.parquet"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A folder for one launch at a time, made where it is not there yet.

    Drafts that a killed launch has left are removed, and nothing else.

    Raises:
        StorageError: it cannot be written to, holds something else, or another launch uses it.
    """
    check_parent(folder, "folder")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"Cannot write {folder}: {error.strerror or error}.") from error
    _check_own(folder)
    with locked(folder, LOCK, "folder", "predictions", StorageError):
        remove_left(folder)
        for path in folder.iterdir():  # of versions up to 0.5
            if _DRAFTS.fullmatch(path.name):
                path.unlink(missing_ok=True)
        yield


def begin(folder: Path, plan: Plan, *, any_size: bool) -> Plan:
    """The plan of a folder: the one that is there, which has to be the same, or this one.

    Args:
        any_size: whether the block size may be that of the one that is there.
    """
    there = read_plan(folder)
    if there is None:
        write_text(folder / PLAN, json.dumps(plan.described(), indent=1))
        return plan
    same_size = Plan(plan.fit, plan.data, plan.asked, there.block_size) if any_size else plan
    same_size.check_same(there, folder)
    return there


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder, if it has one."""
    content = _read(folder / PLAN)
    if content is None:
        return None
    try:
        newer = content["format"] > _FORMAT
        plan = Plan(**_known(content))
        if not isinstance(plan.block_size, int) or plan.block_size < 1:
            raise TypeError("block_size")
    except (KeyError, TypeError) as error:
        raise CorruptFileError(
            f"{folder / PLAN} is altered ({first_line(error)}). Give another folder."
        ) from error
    if newer:
        raise StorageError(f"{folder} is of a newer deltabars. Install that.")
    return plan


def find_blocks(folder: Path, plan: Plan) -> dict[int, int]:
    """How many rows each block has that is there, by the number of its first input.

    Raises:
        CorruptFileError: one is altered, or does not belong there.
    """
    pyarrow()
    from pyarrow import ArrowException, parquet

    found: dict[int, int] = {}
    total = plan.data["inputs"]
    for path in sorted(folder.iterdir()):
        match = _BLOCK.fullmatch(path.name)
        if match is None:
            continue
        start = int(match[1])
        most = plan.block_size if total is None else min(plan.block_size, total - start)
        try:
            rows = parquet.read_metadata(path).num_rows
        except (OSError, ArrowException) as error:
            raise CorruptFileError(
                f"{path} is altered: it cannot be read ({first_line(error).rstrip('.')}). Remove "
                "it, and start again."
            ) from error
        fits = start % plan.block_size == 0 and 0 < rows <= most
        if not fits or (total is not None and rows != most):
            raise CorruptFileError(
                f"{path}: expected a block of {plan.block_size:,} inputs of these predictions, got "
                f"{rows:,} rows from {start:,} on. Remove it, and start again."
            )
        found[start] = rows
    return found


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, if all of it is there."""
    return _read(folder / MANIFEST)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Say that all is there."""
    write_text(folder / MANIFEST, json.dumps(content, indent=1))


def _check_own(folder: Path) -> None:
    if (folder / PLAN).exists():
        return
    others = [
        entry
        for entry in os.listdir(folder)
        if entry != LOCK and not is_draft(entry) and not _DRAFTS.fullmatch(entry)
    ]
    if others:
        raise StorageError(
            f"folder: expected a new or empty one, or one with predictions that were begun, got "
            f"{folder} with {sorted(others)[0]} in it. Give another."
        )


def _known(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: content[name] for name in ("fit", "data", "asked", "block_size")}


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = parse_json(read_start(path, _MOST))
        if not isinstance(content, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise CorruptFileError(
            f"{path} is altered: it cannot be read ({first_line(error)}). Give another folder."
        ) from error
    return content
