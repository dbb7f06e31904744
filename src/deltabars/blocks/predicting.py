"""Predictions to a folder, a block of inputs at a time, by one process or by many."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from deltabars.batches import Batch
from deltabars.blocks.inputs import inputs_of
from deltabars.blocks.plan import PLAN, Plan, begin, fit_fingerprint, held, read_plan
from deltabars.blocks.working import Work, Written
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, StorageError
from deltabars.fitted import DeltaFit
from deltabars.prediction import Prediction
from deltabars.ranks import current
from deltabars.sharded import ranks_of
from deltabars.sources import Source
from deltabars.tables import pyarrow

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
        data: as for `DeltaFit.predict`, or a `deltabars.sources.Source`, which has names; in the
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
        RankError: another rank has failed.

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
    if ranks_of(fit.spectra).count > 1:
        raise BadValueError(
            "fit: expected one that each rank has whole, got one whose eigenvectors are shared out "
            "between them. Save it and load it."
        )
    ranks = current()
    with ranks.together():
        source = data if isinstance(data, Source) else _source(data)
        inputs = inputs_of(source, fit.signature)
        shown = fit.progress if progress is None else progress
        quiet = replace(fit, progress=False)
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
            if ranks.is_first:
                stack.enter_context(held(place))
                plan = begin(place, wanted, any_size=block_size is None)
            plan = ranks.agreed(plan)
            if not ranks.is_first:
                _check_seen(place, replace(wanted, block_size=plan.block_size))
            work = Work(quiet, source, inputs, place, plan, ranks, asked, batch_size)
            return work.run(shown and ranks.is_first)


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
