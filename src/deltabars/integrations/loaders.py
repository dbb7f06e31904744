"""A training loader's examples in order: each once, none left out."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from deltabars.batches import labelled
from deltabars.errors import DataError
from deltabars.inputs import leaves

_TRIED = 16  # examples; a coin that is thrown for each comes out alike for all once in 65,536


def sequential(loader: Any) -> DataLoader[Any]:
    """A loader of the same examples without shuffling, replacement or `drop_last`.

    Raises:
        DataError: it is not one DataLoader, or its sampler is of a kind that does not tell which
            examples are in the training.
    """
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"data: expected a trainer with one training DataLoader, got {type(loader).__name__}. "
            "Give the training data with data=."
        )
    dataset: Dataset[Any] | None = loader.dataset
    size, sampler = loader.batch_size, loader.sampler
    # An iterable dataset comes in its own order, and where nothing samples, in its own batches.
    if not isinstance(dataset, IterableDataset) and loader.batch_sampler is not None:
        if size is None and type(loader.batch_sampler) is BatchSampler:
            size, sampler = loader.batch_sampler.batch_size, loader.batch_sampler.sampler
        dataset = None if size is None else _sampled(loader.dataset, sampler)
    if dataset is None:
        kind = type(sampler if size is not None else loader.batch_sampler).__name__
        raise DataError(
            f"data: expected a training DataLoader that takes each example once an epoch, got a "
            f"{kind}. Give the training data with data=."
        )
    return DataLoader(
        dataset,
        batch_size=size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _sampled(dataset: Dataset[Any], sampler: Any) -> Dataset[Any] | None:
    """The examples that a sampler takes, or None where it does not tell."""
    kind = type(sampler)
    if kind is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices))
    whole = kind in (SequentialSampler, DistributedSampler) or (
        kind is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    )
    return dataset if whole else None


def check_repeats(loader: DataLoader[Any]) -> None:
    """Refuse a map-style dataset whose first examples differ from one reading to the next."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_size is None:
        return
    collate: Any = loader.collate_fn
    first, again = (
        labelled(collate([dataset[i] for i in islice(range(len(dataset)), _TRIED)]))
        for _ in range(2)
    )
    same = len(first) == len(again) and all(
        a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(leaves(first.inputs), leaves(again.inputs), strict=True)
    )
    if not same:
        raise DataError(
            "data: expected training examples that are the same on every reading, got different "
            "ones (random augmentation?). Give the training data without it with data=."
        )
