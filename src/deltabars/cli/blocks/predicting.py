"""The blocks of a folder that are still to be written, and the manifest when all are there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler

from deltabars.cli.blocks.inputs import Inputs, inputs_of
from deltabars.cli.blocks.plan import (
    MANIFEST,
    PLAN,
    Look,
    Plan,
    begin,
    block_name,
    find_blocks,
    fit_fingerprint,
    held,
    look_at,
    read_manifest,
    read_plan,
    summary,
    write_manifest,
)
from deltabars.cli.sources.source import Source
from deltabars.cli.tables import Columns, columns_of, pyarrow, write_table
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, CorruptFileError, DataError, StorageError
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.prediction import Prediction
from deltabars.problem.data import Batch
from deltabars.runtime.distributed import Group, current_group
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import group_of


@dataclass(frozen=True)
class Written:
    """A folder that has the predictions of all inputs.

    Attributes:
        folder: where they are.
        inputs: how many.
        computed: how many of them this call has computed, all ranks together; the rest was there.
        blocks: the files, in the order of the inputs.
        summary: `mean_score`, `mean_score_error` and, where targets are known, `accuracy`,
            `mean_score_right` and `mean_score_wrong`.
    """

    folder: Path
    inputs: int
    computed: int
    blocks: tuple[str, ...]
    summary: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Work:
    """Predictions to a folder that has a plan."""

    fit: DeltaFit
    source: Source
    inputs: Inputs
    folder: Path
    plan: Plan
    group: Group
    asked: Mapping[str, Any]
    batch_size: int | None

    def run(self, progress: bool) -> Written:
        """Write all blocks that are not there and, when all ranks are done, the manifest."""
        found = find_blocks(self.folder, self.plan) if self.group.is_first else None
        there: dict[int, int] = self.group.broadcast_object(found)
        own = self._predict(there, progress)
        # Not listed again: on a disk that machines share, a list may be late.
        computed: dict[int, int] = {}
        for part in self.group.gather_objects(own):
            computed |= part
        blocks = dict(sorted((there | computed).items()))
        self._check_all_there(blocks)
        share = itertools.islice(blocks.items(), self.group.rank, None, self.group.size)
        looks = [look_at(self.folder, start, rows) for start, rows in share]
        seen = sorted(
            itertools.chain(*self.group.gather_objects(looks)), key=lambda look: look.start
        )
        shown = summary(seen)
        if self.group.is_first:
            self._close(seen, shown, computed)
        self.group.broadcast_object(None)  # the manifest is there
        files = tuple(block_name(look.start) for look in seen)
        return Written(self.folder, sum(blocks.values()), sum(computed.values()), files, shown)

    def _predict(self, there: Mapping[int, int], progress: bool) -> dict[int, int]:
        """Write the blocks that are not there and that no other rank writes: their rows."""
        if self.group.is_first and next(self._missing(there), None) is not None:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        total = self._total(there)
        own: dict[int, int] = {}
        starts = itertools.islice(self._missing(there), self.group.rank, None, self.group.size)
        total = self._total(there)
        left = None if total is None else total - sum(there.values())
        with Progress("Predicting", left, "input", progress) as bar:
            for number, start in enumerate(starts):
                rows = self._write(start, bar, number * self.group.size)
                if not rows:
                    break
                own[start] = rows
        return own

    def _check_all_there(self, blocks: Mapping[int, int]) -> None:
        counts = {
            count for count in self.group.gather_objects(self.inputs.count) if count is not None
        }
        if len(counts) > 1:
            raise DataError(
                "Data: expected the same inputs on every rank, got "
                f"{' and '.join(f'{count:,}' for count in sorted(counts))} of them."
            )
        total = counts.pop() if counts else self._total(blocks)
        starts = list(range(0, total or 0, self.plan.block_size))
        if list(blocks) != starts or sum(blocks.values()) != total:
            raise DataError(
                "Data: expected the inputs that the folder was begun with, got others: "
                f"{total} of them, where its blocks have {sum(blocks.values())}. Begin again in "
                "another folder."
            )

    def _total(self, there: Mapping[int, int]) -> int | None:
        """How many inputs there are, where that is known: by the data, or by a short block."""
        if self.inputs.count is not None:
            return self.inputs.count
        last = max(there, default=0)
        short = 0 < there.get(last, 0) < self.plan.block_size
        return last + there[last] if short else None

    def _missing(self, there: Mapping[int, int]) -> Iterator[int]:
        total, size = self._total(there), self.plan.block_size
        starts = itertools.count(0, size) if total is None else range(0, total, size)
        return (start for start in starts if start not in there)

    def _write(self, start: int, bar: Progress, number: int) -> int:
        """Write a block: how many inputs it has; nothing is written where there are none."""
        size = self.plan.block_size
        batches = self.inputs.block(start, start + size)
        first = next(batches, None)
        if first is None:
            return 0
        rows = 0

        def parts() -> Iterator[Columns]:
            nonlocal rows
            for batch in itertools.chain([first], batches):
                yield self._columns(batch, start + rows)
                rows += len(batch)
                bar.show(number * size + rows)

        write_table(self.folder / block_name(start), parts())
        return rows

    def _columns(self, batch: Batch, start: int) -> Columns:
        part = self.fit.predict(batch.inputs, batch_size=self.batch_size, **self.asked).to("cpu")
        numbers = np.arange(start, start + len(batch))
        names = [self.source.name(int(number)) for number in numbers]
        return {
            "number": numbers,
            **columns_of(part, names, batch.targets, self.source.classes),
        }

    def _close(
        self, seen: list[Look], found: Mapping[str, Any], computed: Mapping[int, int]
    ) -> None:
        former = read_manifest(self.folder) or {}
        digests = {block["first"]: block["sha256"] for block in former.get("blocks", ())}
        for look in seen:
            before = digests.get(look.start, look.sha256)
            if look.start not in computed and look.sha256 != before:
                raise CorruptFileError(
                    f"{self.folder / block_name(look.start)} is altered: its digest is not that of "
                    f"{MANIFEST}. Remove it, and start again."
                )
        blocks = [look.described() for look in seen]
        content = {**self.plan.described(), "summary": dict(found), "blocks": blocks}
        if content != former:
            write_manifest(self.folder, content)


_LARGEST, _SMALLEST, _BLOCKS = 10_000, 256, 64  # inputs a block; blocks of data of middling size


def predict_to(
    fit: DeltaFit,
    data: Any,
    folder: str | Path,
    *,
    block_size: int | None = None,
    batch_size: int | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    **asked: Any,
) -> Written:
    """Write the predictions of all inputs to a folder of Parquet files, each input exactly once.

    One row an input: its `number`, `input` (its name), and the columns of `deltabars predict`. The
    files are blocks of inputs, `inputs-000000010000.parquet` beginning with input 10,000; read them
    with `pandas.read_parquet(folder)` or `pyarrow.dataset.dataset(folder)`. `_manifest.json` is
    there when all of them are. What was killed goes on with the blocks that are not there yet.

    In a process group (`torchrun`) all ranks call it with the same arguments: each takes the next
    block that nobody has, so that each input is read by one rank. Of data without numbers (an
    IterableDataset, an iterable of batches) every rank reads all and predicts its own blocks.

    Args:
        fit: on each rank the same, such as one that was loaded.
        data: as for `DeltaFit.predict`, or a `deltabars.cli.sources.Source`, which has names; in the
            same order on every pass. Memory holds a batch at a time.
        folder: a new one, or one that this was begun in.
        block_size: inputs a file; chosen by the number of inputs by default, 10,000 at the most.
        batch_size: inputs worked on at a time, as for `predict`.
        about: how the data are named, in JSON's kinds, kept with the rest.
        progress: as the fit has it, by default; the first rank shows it.
        asked: further arguments of `predict`: rank, estimator, classes, ….

    Raises:
        StorageError: the folder is of another fit, other data or other options, or in use.
        DataError: there are no inputs, or not the same ones on all ranks.
        ProcessError: another rank has failed.

    Example:
        >>> import tempfile, deltabars
        >>> from deltabars.blocks import predict_to
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, l2=L2, rank=20, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = predict_to(fit, digits.test_images, f"{folder}/scores")
        ...     again = predict_to(fit, digits.test_images, f"{folder}/scores")
        >>> written.inputs == len(digits.test_images), written.computed == written.inputs
        (True, True)
        >>> again.computed
        0
    """
    pyarrow()
    if group_of(fit.spectra).size > 1:
        raise BadValueError(
            "fit: expected one that each rank has whole, got one whose eigenvectors are shared out "
            "between them. Save it and load it."
        )
    group = current_group()
    source = data if isinstance(data, Source) else _source(data)
    inputs = inputs_of(source, fit.signature)
    shown = fit.progress if progress is None else progress
    quiet = fit.with_progress(False)
    _check_asked(quiet, inputs.first, asked)
    size = _block_size(block_size, inputs.count)
    known = {
        "inputs": inputs.count,
        "digest": inputs.digest,
        "fingerprint": source.fingerprint,
        "about": None if about is None else dict(about),
    }
    wanted = Plan(fit_fingerprint(fit), known, asked, size)
    place = Path(folder)
    with ExitStack() as stack:
        plan = None
        if group.is_first:
            stack.enter_context(held(place))
            plan = begin(place, wanted, any_size=block_size is None)
        plan = group.broadcast_object(plan)
        if not group.is_first:
            _check_seen(place, replace(wanted, block_size=plan.block_size))
        work = Work(quiet, source, inputs, place, plan, group, asked, batch_size)
        return work.run(shown and group.is_first)


def _source(data: Any) -> Source:
    shuffles = isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler)
    return Source(data, ordered=not shuffles)


def _check_asked(fit: DeltaFit, first: Batch, asked: Mapping[str, Any]) -> None:
    """Refuse what cannot be predicted before anything is written."""
    if not isinstance(fit.predict(first.inputs, batch_size=1, **asked), Prediction):
        raise BadValueError(
            f"estimator: expected one name for a table, got {asked['estimator']!r}."
        )


def _block_size(asked: int | None, count: int | None) -> int:
    if asked is None:
        return max(_SMALLEST, min(_LARGEST, -(-(count or _LARGEST * _BLOCKS) // _BLOCKS)))
    if not is_whole(asked) or asked < 1:
        raise BadValueError(f"block_size: expected a whole number from 1 on, got {asked!r}.")
    return int(asked)


def _check_seen(folder: Path, wanted: Plan) -> None:
    """Refuse a folder that is not the first rank's, and data or options of another rank."""
    there = read_plan(folder)
    if there is None:
        raise StorageError(
            f"folder: expected one that all ranks see, got {folder} without {PLAN}, which the "
            "first rank has written. Give a folder on a disk that all machines share."
        )
    wanted.check_same(there, folder)
