"""The blocks of a folder that are still to be written, and the manifest when all are there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltabars.batches import Batch
from deltabars.blocks.inputs import Inputs
from deltabars.blocks.looking import Look, look_at, summary
from deltabars.blocks.plan import (
    MANIFEST,
    Plan,
    block_name,
    find_blocks,
    read_manifest,
    write_manifest,
)
from deltabars.errors import CorruptFileError, DataError
from deltabars.fitted import DeltaFit
from deltabars.handing import Numbers
from deltabars.progress import Progress
from deltabars.ranks import Ranks
from deltabars.sources import Source
from deltabars.tables import Columns, columns_of, write_table


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
    ranks: Ranks
    asked: Mapping[str, Any]
    batch_size: int | None

    def run(self, progress: bool) -> Written:
        """Write all blocks that are not there and, when all ranks are done, the manifest."""
        found = find_blocks(self.folder, self.plan) if self.ranks.is_first else None
        there: dict[int, int] = self.ranks.agreed(found)
        own = self._predict(there, progress)
        # Not listed again: on a disk that machines share, a list may be late.
        computed: dict[int, int] = {}
        for part in self.ranks.gather(own):
            computed |= part
        blocks = dict(sorted((there | computed).items()))
        self._check_all_there(blocks)
        share = itertools.islice(blocks.items(), self.ranks.rank, None, self.ranks.count)
        looks = [look_at(self.folder, start, rows) for start, rows in share]
        seen = sorted(itertools.chain(*self.ranks.gather(looks)), key=lambda look: look.start)
        shown = summary(seen)
        if self.ranks.is_first:
            self._close(seen, shown, computed)
        self.ranks.agreed(None)  # the manifest is there
        files = tuple(block_name(look.start) for look in seen)
        return Written(self.folder, sum(blocks.values()), sum(computed.values()), files, shown)

    def _predict(self, there: Mapping[int, int], progress: bool) -> dict[int, int]:
        """Write the blocks that are not there and that no other rank writes: their rows."""
        if self.ranks.is_first and next(self._missing(there), None) is not None:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        total = self._total(there)
        numbers, own = Numbers(self.ranks), {}
        starts, taken = self._missing(there), -1
        left = None if total is None else total - sum(there.values())
        with Progress("Predicting", left, "input", progress) as bar:
            while True:
                number = numbers.next()
                start = next(itertools.islice(starts, number - taken - 1, None), None)
                taken = number
                rows = 0 if start is None else self._write(start, bar, number)
                if start is None or not rows:
                    break
                own[start] = rows
        numbers.finish()
        return own

    def _check_all_there(self, blocks: Mapping[int, int]) -> None:
        counts = {count for count in self.ranks.gather(self.inputs.count) if count is not None}
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
                self.ranks.check()
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
