"""Loaders over some of their examples, and the part of the data that each process reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from deltabars.errors import DataError
from deltabars.problem.data import count_of, cut, is_dataset, is_fixed, plain, tensor_bytes
from deltabars.runtime.distributed import Group, same_everywhere

_COMPARED = 16  # examples that show whether two processes were given the same data
_KEPT_OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
    "multiprocessing_context", "persistent_workers", "generator",
)  # fmt: skip


def examples_of(loader: DataLoader[Any]) -> Sequence[int] | None:
    """Return the indices of the examples that a pass of a loader takes, each once.

    None where that is not known: streams, custom samplers, sampling with replacement.
    """
    if not is_dataset(loader.dataset):
        return None
    sampler: Any = loader.sampler
    if loader.batch_size is None:
        if type(loader.batch_sampler) is not BatchSampler:
            return None
        sampler = loader.batch_sampler.sampler
    count = len(loader.dataset)  # type: ignore[arg-type]
    kind = type(sampler)
    if kind is SubsetRandomSampler:
        return list(sampler.indices)
    each_once = kind in (SequentialSampler, DistributedSampler) or (
        kind is RandomSampler and not sampler.replacement and sampler.num_samples == count
    )
    return range(count) if each_once else None


def loader_of(loader: DataLoader[Any], indices: Sequence[int]) -> DataLoader[Any]:
    """Return the same loader over some of its examples, in this order."""
    options = {name: getattr(loader, name) for name in _KEPT_OPTIONS}
    size = loader.batch_size
    if size is None and isinstance(loader.batch_sampler, BatchSampler):
        size = loader.batch_sampler.batch_size
    return DataLoader(Subset(loader.dataset, indices), batch_size=size, **options)


def own_part(data: Any, group: Group) -> tuple[Any, str]:
    """Return the data that this process reads, and `"split"`, `"sampler"` or `"own"`: by whom.

    Tensors, datasets and loaders that are the same in all processes are split: process r of R
    takes the examples r, r + R, r + 2R, …. Data that differ are each process's own, as streams
    always are. Examples that a DistributedSampler repeats to come out even are left out.
    """
    loader = data if isinstance(data, DataLoader) else None
    indices: Sequence[int] | None = None
    source = "split"
    if is_fixed(data):
        indices = range(count_of(data))
    elif loader is None:
        indices = range(len(data)) if is_dataset(data) else None
    elif is_dataset(loader.dataset) and loader.batch_size is not None:
        indices = examples_of(loader)
        indices = sorted(loader.sampler) if indices is None else indices
        if type(loader.sampler) is DistributedSampler:
            source, theirs = "sampler", (loader.sampler.num_replicas, loader.sampler.rank)
            if theirs != (group.size, group.rank):
                raise DataError(
                    f"DistributedSampler: expected that of process {group.rank} of {group.size}, "
                    f"got one of process {theirs[1]} of {theirs[0]}."
                )
    if indices is None or source == "sampler":
        same_everywhere(group, None)  # the others may be comparing: keep the collectives in step
    elif not _is_same(data if loader is None else loader.dataset, indices, group):
        return data, "own"
    if indices is None:
        return data, "own"
    if loader is not None and source == "sampler" and loader.sampler.drop_last:  # type: ignore[attr-defined]
        indices = indices[: loader.sampler.total_size]  # type: ignore[attr-defined]
    elif loader is not None and source == "split" and loader.drop_last and loader.batch_size:
        indices = indices[: len(indices) // loader.batch_size * loader.batch_size]
    if len(indices) < group.size:
        raise DataError(
            f"Data: expected an example for each of {group.size} processes, got {len(indices)}. "
            "Use fewer processes."
        )
    mine = slice(group.rank, None, group.size)
    if loader is not None:
        return loader_of(loader, indices[mine]), source
    return (cut(data, mine) if is_fixed(data) else Subset(data, indices[mine])), source


def _is_same(data: Any, indices: Sequence[int], group: Group) -> bool:
    """Return whether all processes have the same data, by their number and some examples."""
    last = len(indices) - 1
    picks = sorted({k * last // (_COMPARED - 1) for k in range(_COMPARED)}) if last >= 0 else []
    fixed = is_fixed(data)
    some = [cut(data, slice(k, k + 1)) if fixed else data[indices[k]] for k in picks]
    whole = len(indices) if isinstance(indices, range) else indices
    return same_everywhere(group, (whole, tree_map(_comparable, plain(some))))


def _comparable(leaf: Any) -> Any:
    """Return something that can be sent and compared by ==."""
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = torch.from_numpy(np.atleast_1d(leaf).copy())
    if isinstance(leaf, Tensor):
        return str(leaf.dtype), tuple(leaf.shape), tensor_bytes(leaf)
    if isinstance(leaf, str | bytes | int):
        return leaf
    return repr(leaf) if isinstance(leaf, float) else type(leaf).__name__
