"""Predictions of any number of inputs, written to a folder in blocks, each input exactly once.

The folder has a plan (of which fit, data and options it is), blocks, which are Parquet files
written whole, and a manifest when all are there. Missing blocks are split between the processes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from deltabars.cli.sources.source import Source, fingerprint_of
from deltabars.cli.tables import Columns, columns_of, pyarrow, write_table
from deltabars.covariance.estimators import SPREADS
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, CorruptFileError, DataError, StorageError, first_line
from deltabars.fitting.fitted import DeltaFit
from deltabars.likelihoods.base import described, is_own
from deltabars.prediction.prediction import Prediction
from deltabars.problem import data as examples
from deltabars.problem.data import Batch, Signature, is_dataset, is_fixed, iterate, leaves
from deltabars.problem.sharding import loader_of
from deltabars.runtime.distributed import current_group, same_everywhere
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import group_of
from deltabars.storage.reading import parse_json, read_start
from deltabars.storage.writing import check_parent, is_draft, locked, remove_left, write_text

_PLAN, _MANIFEST, _LOCK = "_plan.json", "_manifest.json", "_lock"
_FORMAT = 1
_MOST = 1 << 28  # bytes of a plan
_BLOCK, _BLOCKS_THERE = "inputs-{:012d}.parquet", re.compile(r"inputs-(\d{12})\.parquet")
_LARGEST, _SMALLEST, _BLOCKS = 10_000, 256, 64  # inputs a block; blocks of data of middling size
_READ_SIZE, _READ_BYTES = 1024, 1 << 26  # a batch at most, where data do not come in batches


@dataclass(frozen=True)
class Written:
    """A folder that has the predictions of all inputs."""

    folder: Path
    inputs: int  # how many
    computed: int  # of them, by this call in all processes; the rest was there
    blocks: tuple[str, ...]  # the files, in the order of the inputs
    summary: Mapping[str, Any]  # means of the scores; accuracy where targets are known


def predict_to(
    fit: DeltaFit,
    data: Any,
    folder: str | Path,
    *,
    block_size: int | None = None,
    batch_size: int | None = None,
    progress: bool | None = None,
    **asked: Any,
) -> Written:
    """Write the predictions of all inputs to a folder of Parquet files, each input exactly once.

    One row an input: its `number`, `input` (its name), and the columns of `deltabars predict`.
    `pandas.read_parquet(folder)` reads all of them; `_manifest.json` is there when they are all
    there. After a kill the same call writes the blocks that are missing. In a process group all
    processes call it alike, and each reads and predicts the inputs of its own blocks.

    Args:
        fit: in each process the same, such as one that was loaded.
        data: tensors, a Dataset, a DataLoader that reads one in order, or a
            `deltabars.cli.sources.Source`, which has names. Memory holds a batch at a time.
        folder: a new one, or one that this was begun in.
        block_size: inputs a file; chosen by the number of inputs by default, 10,000 at most.
        batch_size: inputs worked on at a time, as for `predict`.
        progress: as the fit has it, by default; the first process shows it.
        asked: further arguments of `predict`: rank, estimator, classes, ….

    Raises:
        StorageError: the folder is of another fit, other data or other options, or in use.
        DataError: there are no inputs, they have no numbers, or are others in another process.

    Example:
        >>> import tempfile, deltabars
        >>> from deltabars.blocks import predict_to
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, l2=L2, rank=20, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = predict_to(fit, digits.test_images, f"{folder}/scores")
        ...     again = predict_to(fit, digits.test_images, f"{folder}/scores")
        >>> written.computed, again.computed
        (500, 0)
    """
    pyarrow()
    if group_of(fit.spectra).size > 1:
        raise BadValueError(
            "fit: expected one that is whole in each process, got a split one. Save and load it."
        )
    if block_size is not None and (not is_whole(block_size) or block_size < 1):
        raise BadValueError(f"block_size: expected a whole number from 1 on, got {block_size!r}.")
    group, place, quiet = current_group(), Path(folder), fit.with_progress(False)
    shuffles = isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler)
    source = data if isinstance(data, Source) else Source(data, ordered=not shuffles)
    inputs = _Inputs(source, fit.signature)
    if not isinstance(quiet.predict(inputs.first.inputs, **asked), Prediction):
        raise BadValueError(f"estimator: expected one name, got {asked['estimator']!r}.")

    def tables(start: int, end: int) -> Iterator[Columns]:
        for batch in inputs.read(start, end):
            numbers = np.arange(start, start + len(batch))
            names = [source.name(int(number)) for number in numbers]
            part = quiet.predict(batch.inputs, batch_size=batch_size, **asked).to("cpu")
            yield {"number": numbers, **columns_of(part, names, batch.targets, source.classes)}
            start += len(batch)

    count = inputs.count
    usual = max(_SMALLEST, min(_LARGEST, -(-count // _BLOCKS)))
    wanted = {
        "format": _FORMAT,
        "fit": fit_fingerprint(fit),
        "data": {"inputs": count, "digest": inputs.digest, "fingerprint": source.fingerprint},
        "asked": asked,
        "block_size": block_size or usual,
    }
    plan = json.loads(json.dumps(wanted, default=str))
    if not same_everywhere(group, plan):
        raise DataError("Data: expected the same inputs and options in every process, got others.")
    holding = _held(place, plan, any_size=block_size is None)
    with holding if group.is_first else nullcontext(plan) as plan:
        there = _there(place) if group.is_first else []
        plan, there = group.broadcast_object((plan, there))
        if not (place / _PLAN).is_file():
            raise StorageError(
                f"folder: expected one that all processes see, got {folder} without {_PLAN}. "
                "Give one on a disk that all machines share."
            )
        size = plan["block_size"]
        missing = [start for start in range(0, count, size) if start not in there]
        if missing and group.is_first:
            (place / _MANIFEST).unlink(missing_ok=True)
        left = sum(min(size, count - start) for start in missing)
        shown = group.is_first and (fit.progress if progress is None else progress)
        with Progress("Predicting", left, "input", shown) as bar:
            for done, start in enumerate(missing[group.rank :: group.size], 1):
                write_table(place / _BLOCK.format(start), tables(start, min(start + size, count)))
                bar.show(min(left, done * size * group.size))
        group.gather_objects(None)  # all blocks are there
        found = _close(place, plan) if group.is_first else None
        files, summary = group.broadcast_object(found)
    return Written(place, count, left, files, summary)


def summary_of(score: Any, score_error: Any, right: Any | None) -> dict[str, Any]:
    """Return what predictions show: means of the scores (B,), and of those that are right."""

    def mean(values: Any) -> float | None:
        return float(np.mean(values, dtype=np.float64)) if len(values) else None

    found = {"inputs": len(score), "mean_score": mean(score), "mean_score_error": mean(score_error)}
    if right is not None:
        found["accuracy"] = mean(right)
        found |= {"mean_score_right": mean(score[right]), "mean_score_wrong": mean(score[~right])}
    return found


def fit_fingerprint(fit: DeltaFit) -> str:
    """Return a digest of a fit: its weights, its eigenvalues, and what they mean."""
    likelihood = fit.likelihood
    own = described(likelihood) if is_own(likelihood) else type(likelihood).__qualname__
    names, network = sorted(fit.spectra), fit.network
    known = [
        fit.estimator, fit.level, dict(fit.prior.scales), fit.num_examples, fit.num_outputs,
        own, str(network.dtype), fit.weights, network.parameters.names, names,
    ]  # fmt: skip
    if fit.calibration:
        known += [{spread: found.factor for spread, found in fit.calibration.items()}]
    if fit.averages != SPREADS[0] or fit.temperature != 1:
        known += [fit.averages, fit.temperature]
    return fingerprint_of(json.dumps(known), *(fit.spectra[name].values for name in names))


class _Inputs:
    """Inputs by number: how many, the first as a batch, and a digest of three of them."""

    def __init__(self, source: Source, signature: Signature) -> None:
        source.check_ordered()
        data: Any = examples.as_tensors(source.data)
        self._data, self._signature, self._size = data, signature, 1
        has_numbers, whole = is_fixed(data) or is_dataset(data), data
        if isinstance(data, DataLoader):
            in_order, whole = type(data.sampler) is SequentialSampler, data.dataset
            in_batches = data.batch_size is not None and not data.drop_last
            has_numbers = in_order and in_batches and is_dataset(whole)
        if not has_numbers:
            raise DataError(
                "Data: expected tensors, a Dataset, or a DataLoader that reads one in order, got "
                f"{type(data).__name__}. Predict a stream to a file."
            )
        self.count = examples.count_of(data) if is_fixed(data) else len(whole)
        if not self.count:
            raise DataError("Inputs: expected at least one, got none.")
        some = [next(self.read(k, k + 1)) for k in sorted({0, self.count // 2, self.count - 1})]
        self.first = some[0]
        self.digest = fingerprint_of(*(leaf for each in some for leaf in leaves(each.inputs)))
        used = sum(leaf.nbytes for leaf in leaves(self.first.inputs))
        self._size = max(1, min(_READ_SIZE, _READ_BYTES // max(1, used)))

    def read(self, start: int, end: int) -> Iterator[Batch]:
        """Yield some inputs in batches."""
        if is_fixed(self._data):
            raws = iterate(examples.cut(self._data, slice(start, end)), self._size)
        elif isinstance(self._data, DataLoader):
            raws = loader_of(self._data, range(start, end))
        else:
            raws = iterate(Subset(self._data, range(start, end)), self._size)
        try:
            for raw in raws:
                batch = examples.batch_of(raw, self._signature)
                start += len(batch)
                yield batch
        except OSError as error:  # not to be taken for one of writing
            why = first_line(error).rstrip(".")
            said = f"Data: expected inputs that can be read, got an error after {start:,}: {why}."
            raise DataError(said) from error


@contextmanager
def _held(folder: Path, plan: dict[str, Any], *, any_size: bool) -> Iterator[dict[str, Any]]:
    """Hold a folder for one launch at a time, with its plan, which has to be the same as this."""
    check_parent(folder, "folder")
    path = folder / _PLAN
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"Cannot write {folder}: {error.strerror or error}.") from error
    others = [name for name in os.listdir(folder) if name != _LOCK and not is_draft(name)]
    if others and not path.is_file():
        raise StorageError(
            f"folder: expected a new or empty one, got {folder} with {min(others)} in it. "
            "Give another."
        )
    with locked(folder, _LOCK, "folder", "predictions", StorageError):
        remove_left(folder)
        if not path.is_file():
            write_text(path, json.dumps(plan, indent=1))
        try:
            there = dict(parse_json(read_start(path, _MOST)))
            size, there["data"] = there["block_size"], dict(there["data"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = f"{path} is altered ({first_line(error)}). Give another folder."
            raise CorruptFileError(said) from error
        there["data"].pop("about", None)  # of version 0.5: names of the data
        if any_size and is_whole(size) and size > 0:
            plan = {**plan, "block_size": size}
        different = [name.replace("_", " ") for name in plan if plan[name] != there.get(name)]
        if different:
            raise StorageError(
                "folder: expected one of the same fit, data and options, got "
                f"{folder}, of another {' and '.join(different)}. Give another folder."
            )
        yield plan


def _there(folder: Path) -> list[int]:
    """Return the number of the first input of each block that is there."""
    return sorted(
        int(found[1]) for found in map(_BLOCKS_THERE.fullmatch, os.listdir(folder)) if found
    )


def _close(folder: Path, plan: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Check that every input is in one block; write the manifest, and return files and summary."""
    from pyarrow import ArrowException, parquet

    parts: list[Columns] = []
    size, count = plan["block_size"], plan["data"]["inputs"]
    starts = sorted({*_there(folder), *range(0, count, size)})
    for start in starts:
        path = folder / _BLOCK.format(start)
        own = np.arange(start, min(start + size, count))
        try:
            with parquet.ParquetFile(path) as file:
                wanted = ("number", "score", "score_error", "right")
                table = file.read(columns=[n for n in wanted if n in file.schema_arrow.names])
            parts.append({name: table.column(name).to_numpy() for name in table.column_names})
            if start % size or not np.array_equal(parts[-1].get("number", ()), own):
                raise ValueError(f"expected the inputs from {start:,} on, once each, got others")
        except (OSError, ValueError, ArrowException) as error:
            said = (
                f"{path} is altered: {first_line(error).rstrip('.')}. Remove it, and start again."
            )
            raise CorruptFileError(said) from error
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    summary = summary_of(whole["score"], whole["score_error"], whole.get("right"))
    blocks = [{"file": _BLOCK.format(start), "first": start} for start in starts]
    text = json.dumps({**plan, "summary": summary, "blocks": blocks}, indent=1)
    if not (folder / _MANIFEST).is_file():
        write_text(folder / _MANIFEST, text)
    return tuple(map(_BLOCK.format, starts)), summary
