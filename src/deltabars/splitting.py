"""The data of one rank: its own part of what all have, or what it alone was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from deltabars.batches import count_of, cut, is_fixed
from deltabars.errors import DataError
from deltabars.ranks import Ranks, same_everywhere

_LOOKED_AT = 16  # examples that tell whether two ranks were given the same data
_KEPT_OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
    "multiprocessing_context", "persistent_workers", "generator",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What one rank reads.

    Attributes:
        data: of the same kind as what was given.
        source: `"whole"` without other ranks; `"split"` where all were given the same data, which
            are dealt out in turn; `"sampler"` where a DistributedSampler deals them out; `"own"`
            where each rank was given its own.
        pick: where examples are split in turn, what gives the data of some of their indices alone.
    """

    data: Any
    source: str
    pick: Callable[[Sequence[int]], Any] | None = None

    def among(self, indices: Sequence[int], ranks: Ranks) -> Part:
        """The part of this rank where the examples with these indices alone are split."""
        assert self.pick is not None
        return replace(self, data=self.pick(_dealt(indices, ranks)))


def own_part(data: Any, ranks: Ranks) -> Part:
    """The part of some data that is this rank's to read.

    Tensors, datasets and loaders that are the same on all ranks are dealt out in turn; those that
    are not are each rank's own, as streams always are. Of a DistributedSampler the examples that it
    repeats to come out even are left out.
    """
    if ranks.count == 1:
        return Part(data, "whole")
    if isinstance(data, DataLoader):
        return _of_loader(data, ranks)
    if is_fixed(data):
        count = count_of(data)
        if not _is_same(data, count, ranks):
            return Part(data, "own")
        _check_enough(count, ranks)
        own = cut(data, slice(ranks.rank, None, ranks.count))
        return Part(own, "split", lambda some: cut(data, torch.as_tensor(some)))
    if _is_dataset(data):
        if not _is_same(data, len(data), ranks):
            return Part(data, "own")
        return _split(len(data), ranks, partial(Subset, data))
    same_everywhere(ranks, None)  # the others may be comparing: it is their turn as well
    return Part(data, "own")


def _of_loader(loader: DataLoader[Any], ranks: Ranks) -> Part:
    sampler, dataset = loader.sampler, loader.dataset
    if type(sampler) is DistributedSampler:
        if (sampler.num_replicas, sampler.rank) != (ranks.count, ranks.rank):
            raise DataError(
                f"DistributedSampler: expected that of rank {ranks.rank} of {ranks.count}, got one "
                f"of rank {sampler.rank} of {sampler.num_replicas}."
            )
        same_everywhere(ranks, None)
        count = len(sampler.dataset)  # type: ignore[arg-type]
        if sampler.drop_last:
            count = min(count, sampler.total_size)
        return _split(count, ranks, partial(_with, loader), "sampler")
    if not _is_dataset(dataset) or loader.batch_size is None:
        same_everywhere(ranks, None)
        return Part(loader, "own")
    count = len(dataset)  # type: ignore[arg-type]
    indices: Sequence[int] = range(count)
    all_of_them = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == count
    )
    if not all_of_them:
        indices = sorted(sampler)
    if not _is_same(dataset, count, ranks, indices):
        return Part(loader, "own")
    if loader.drop_last:
        indices = indices[: len(indices) // loader.batch_size * loader.batch_size]
    return _split(
        len(indices), ranks, lambda some: _with(loader, [indices[place] for place in some])
    )


def _split(
    count: int, ranks: Ranks, pick: Callable[[Sequence[int]], Any], source: str = "split"
) -> Part:
    return Part(None, source, pick).among(range(count), ranks)


class _Fixed(Sampler[int]):
    """The same examples on every pass."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def _with(loader: DataLoader[Any], indices: Sequence[int]) -> DataLoader[Any]:
    """The same loader of other examples."""
    options = {name: getattr(loader, name) for name in _KEPT_OPTIONS}
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=_Fixed(indices), **options
    )


def _dealt(indices: Sequence[int], ranks: Ranks) -> Sequence[int]:
    _check_enough(len(indices), ranks)
    return indices[ranks.rank :: ranks.count]


def _check_enough(count: int, ranks: Ranks) -> None:
    if count < ranks.count:
        raise DataError(
            f"Data: expected an example for each of {ranks.count} ranks, got {count}. Use fewer "
            "ranks."
        )


def _is_dataset(data: Any) -> bool:
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset | Mapping | tuple | list | str | bytes)
    )


def _is_same(data: Any, count: int, ranks: Ranks, indices: Sequence[int] = ()) -> bool:
    """Whether all ranks have the same data, by their number and some of the examples.

    Args:
        indices: of those that are read, where it is not all of them.
    """
    places = [k * (count - 1) // max(1, _LOOKED_AT - 1) for k in range(_LOOKED_AT)] if count else []
    fixed = is_fixed(data)
    looked = [cut(data, slice(k, k + 1)) if fixed else data[k] for k in sorted(set(places))]
    return same_everywhere(ranks, (count, indices, _plain(looked)))


def _plain(value: Any) -> Any:
    """What can be compared by ==."""
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()
        # To torch one entry is contiguous whatever its stride, but not to be viewed as bytes.
        flat = held.as_strided((held.numel(),), (1,))
        return str(held.dtype), tuple(held.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(torch.from_numpy(np.atleast_1d(value).copy()))
    if isinstance(value, str | bytes | int):
        return value
    return repr(value) if isinstance(value, float) else type(value).__name__
