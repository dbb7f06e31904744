"""Training data: the same examples on every pass, split between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from deltabars.errors import DataError
from deltabars.problem.batches import (
    Batch,
    Counted,
    as_tensors,
    check_can_be_read_again,
    count_of,
    cut,
    is_fixed,
    iterate,
    labelled,
)
from deltabars.problem.inputs import Signature, leaves, map_leaves
from deltabars.runtime.distributed import Group, same_everywhere
from deltabars.runtime.precision import with_own_numbers

_COMPARED = 16  # examples that show whether two processes were given the same data
_READ_SIZE = 1024  # examples a batch, where the data do not come in batches
_MIX = -7046029254386353131  # an odd 64-bit constant: 2^64 divided by the golden ratio
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


def is_dataset(data: Any) -> bool:
    """Return whether data are a map-style dataset: examples by number."""
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset | Mapping | tuple | list | str | bytes)
    )


def own_part(data: Any, group: Group) -> tuple[Any, str]:
    """Return the part of some data that this process reads, and where the split comes from.

    Tensors, datasets and loaders that are the same in all processes are split: process r of R
    takes the examples r, r + R, r + 2R, …. Data that differ are each process's own, as streams
    always are. Examples that a DistributedSampler repeats to come out even are left out.

    Returns:
        The data, and `"whole"` (one process), `"split"`, `"sampler"` (by a DistributedSampler) or
        `"own"`.
    """
    if group.size == 1:
        return data, "whole"
    mine = slice(group.rank, None, group.size)
    if is_fixed(data):
        count = count_of(data)
        if _is_same(data, range(count), group):
            _check_enough(count, group)
            return cut(data, mine), "split"
        return data, "own"
    if isinstance(data, DataLoader):
        return _part_of_loader(data, group, mine)
    if is_dataset(data) and _is_same(data, range(len(data)), group):
        _check_enough(len(data), group)
        return Subset(data, range(len(data))[mine]), "split"
    if not is_dataset(data):
        same_everywhere(group, None)  # the others may be comparing: keep the collectives in step
    return data, "own"


def _part_of_loader(loader: DataLoader[Any], group: Group, mine: slice) -> tuple[Any, str]:
    sampler = loader.sampler
    indices = examples_of(loader)
    if type(sampler) is DistributedSampler and indices is not None:
        if (sampler.num_replicas, sampler.rank) != (group.size, group.rank):
            raise DataError(
                f"DistributedSampler: expected that of process {group.rank} of {group.size}, got "
                f"one of process {sampler.rank} of {sampler.num_replicas}."
            )
        same_everywhere(group, None)
        if sampler.drop_last:
            indices = indices[: sampler.total_size]
        _check_enough(len(indices), group)
        return loader_of(loader, indices[mine]), "sampler"
    if not is_dataset(loader.dataset) or loader.batch_size is None:
        same_everywhere(group, None)
        return loader, "own"
    indices = sorted(sampler) if indices is None else indices
    if not _is_same(loader.dataset, indices, group):
        return loader, "own"
    if loader.drop_last:
        indices = indices[: len(indices) // loader.batch_size * loader.batch_size]
    _check_enough(len(indices), group)
    return loader_of(loader, indices[mine]), "split"


def _check_enough(count: int, group: Group) -> None:
    if count < group.size:
        raise DataError(
            f"Data: expected an example for each of {group.size} processes, got {count}. Use fewer "
            "processes."
        )


def _is_same(data: Any, indices: Sequence[int], group: Group) -> bool:
    """Return whether all processes have the same data, by their number and some examples."""
    last = len(indices) - 1
    picks = sorted({k * last // (_COMPARED - 1) for k in range(_COMPARED)}) if last >= 0 else []
    fixed = is_fixed(data)
    some = [cut(data, slice(k, k + 1)) if fixed else data[indices[k]] for k in picks]
    whole = len(indices) if isinstance(indices, range) else indices
    return same_everywhere(group, (whole, _comparable(some)))


def _comparable(value: Any) -> Any:
    """Return something that can be sent and compared by ==."""
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous().flatten()
        # To torch one entry is contiguous whatever its stride, but not to be viewed as bytes.
        flat = held.as_strided((held.numel(),), (1,))
        return str(held.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return {str(name): _comparable(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_comparable(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _comparable(torch.from_numpy(np.atleast_1d(value).copy()))
    if isinstance(value, str | bytes | int):
        return value
    return repr(value) if isinstance(value, float) else type(value).__name__


class TrainingData:
    """Serve N examples, the same ones on every pass.

    The first pass checks and counts them, and keeps them on the device if they fit `budget` bytes;
    otherwise every pass reads them again. Data that come from a loader are read a second time at
    once, to make sure that a pass repeats, in any order. The order of a loader that shuffles with
    torch's generator differs from pass to pass, and is the same in every run. Examples without a
    target are left out on every pass.

    Attributes:
        num_examples: N, over all processes.
        num_here: in this process; `counts` has them for every process.
        fingerprint: of all examples, in any order.
        source: where the split between processes comes from (see `own_part`).
        left_out: how many examples have no target, over all processes.
    """

    def __init__(
        self,
        data: Any,
        device: torch.device,
        dtype: torch.dtype,
        budget: int,
        report: Callable[[int, str], None] = lambda done, what: None,
        group: Group | None = None,
        counted: Counted = lambda targets: None,
    ) -> None:
        group = group or Group()
        data = as_tensors(data)
        check_can_be_read_again(data)
        self._data, self.source = own_part(data, group)
        self._device, self._dtype, self._counted, self._rank = device, dtype, counted, group.rank
        self._passes = 0
        signature, left_out = self._read_first(budget, report)
        found = group.gather_objects((self.num_here, self._fingerprint_here, signature, left_out))
        self.counts = [count for count, *_ in found]
        self.num_examples = sum(self.counts)
        self.left_out = sum(missing for *_, missing in found)
        if not all(self.counts):
            some = f" in process {self.counts.index(0)}" if self.num_examples else ""
            why = f"all {self.left_out} have no target" if self.left_out else "the data are empty"
            why = "use fewer processes" if some else why
            raise DataError(f"Data: expected at least one example{some}, got none: {why}.")
        if self.source == "own" and len({each[:2] for each in found}) == 1 < group.size:
            raise DataError(
                f"Data: expected a part of them in each of {group.size} processes, got the same "
                f"{self.num_here} examples in all. Split the stream by process, or give a Dataset, "
                "which is split for you."
            )
        self.fingerprint = sum(each[1] for each in found) % 2**64
        self.signature = reduce(Signature.merge, [each[2] for each in found if each[2] is not None])

    def _read_first(
        self, budget: int, report: Callable[[int, str], None]
    ) -> tuple[Signature | None, int]:
        """Check, count and keep the examples of this process.

        Returns:
            What an input consists of, None without examples; and how many have no target.
        """
        kept: list[Batch] | None = []
        fixed = is_fixed(self._data)
        signature: Signature | None = None
        self.num_here = self._fingerprint_here = used = read = 0
        for raw in self._raw():
            whole = labelled(raw)
            read += len(whole)
            assert whole.targets is not None
            batch = whole.having(self._counted(whole.targets)).to(self._device)
            if not len(batch):
                continue
            _check_finite(batch)
            found = Signature.of(batch.inputs)
            signature = found if signature is None else signature.merge(found)
            self.num_here += len(batch)
            self._fingerprint_here = _add(self._fingerprint_here, batch)
            report(self.num_here, "read")
            batch = batch.to(self._device, self._dtype)
            used += sum(leaf.nbytes for leaf in leaves(batch.inputs))
            if kept is not None and not fixed:
                kept.append(batch)
            if used > budget:
                kept = None
        self.in_memory = kept is not None
        if signature is not None and not fixed:
            self._check_repeats(report)
        if signature is not None and fixed and kept is not None:  # the tensors, not a copy of them
            kept = [labelled(self._data, self._counted).to(self._device, self._dtype)]
        self._kept = None if kept is None or signature is None else _join(kept, signature)
        return signature, read - self.num_here

    @property
    def is_uniform(self) -> bool:
        """Whether every pass gives the same chunks, of one shape (but for the last)."""
        return self._kept is not None and len(self._kept) == 1

    def own(self, numbers: Tensor) -> Tensor:
        """Convert numbers among all examples to numbers among those of this process."""
        if self.source in ("split", "sampler") and not self.left_out:
            count = len(self.counts)
            return numbers[numbers % count == self._rank] // count
        start = sum(self.counts[: self._rank])
        return numbers[(numbers >= start) & (numbers < start + self.num_here)] - start

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield all examples once, on the device, at most `size` at a time."""
        count = 0
        for batch in self._kept if self._kept is not None else self._read():
            for chunk in batch.split(size):
                count += len(chunk)
                yield chunk.to(self._device, self._dtype)
        if count != self.num_here:
            raise DataError(f"Data: expected {self.num_here} examples on every pass, got {count}.")

    def _read(self) -> Iterator[Batch]:
        for raw in self._raw():
            batch = labelled(raw, self._counted)
            if len(batch):
                yield batch

    def _raw(self) -> Iterator[Any]:
        self._passes += 1  # another seed for each: what is random in the data must not be hidden
        return iter(with_own_numbers(iterate(self._data, _READ_SIZE), self._passes))

    def _check_repeats(self, report: Callable[[int, str], None]) -> None:
        count, fingerprint = 0, 0
        for batch in self._read():
            count += len(batch)
            fingerprint = _add(fingerprint, batch.to(self._device))
            report(count, f"read again, of {self.num_here}")
        if (count, fingerprint) != (self.num_here, self._fingerprint_here):
            raise DataError(
                "Data: expected the same examples on every pass (their order may change), got "
                "different ones. Turn off random augmentation, sampling with replacement, and "
                "drop_last with shuffling, for the fit."
            )


def _check_finite(batch: Batch) -> None:
    for leaf in leaves(batch.inputs):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            count = int((~leaf.isfinite().flatten(1).all(1)).sum()) if leaf.ndim > 1 else 1
            raise DataError(
                f"Inputs: expected finite values, got NaN or infinity in {count} of the "
                f"{len(batch)} examples of a batch."
            )


def _join(batches: list[Batch], signature: Signature) -> list[Batch]:
    """Join all batches where shapes allow it, so that chunks do not depend on the loader."""
    targets = [batch.targets for batch in batches if batch.targets is not None]
    shapes = {tuple(target.shape[1:]) for target in targets}
    if None in signature.shapes or len(shapes) > 1 or len(batches) == 1:
        return batches
    columns = zip(*(leaves(batch.inputs) for batch in batches), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return [Batch(map_leaves(lambda _: next(joined), batches[0].inputs), torch.cat(targets))]


def fingerprint_of(batches: Iterable[Batch]) -> int:
    """Return a number that identifies the examples of some batches, in any order."""
    return reduce(_add, batches, 0)


def _add(fingerprint: int, batch: Batch) -> int:
    """Add a batch to an order-free fingerprint: the sum of its examples' hashes, modulo 2^64."""
    parts = leaves(batch.inputs) + ([] if batch.targets is None else [batch.targets])
    hashes = torch.zeros(len(batch), dtype=torch.int64, device=parts[0].device)
    for part in parts:
        hashes = _stir(hashes * _MIX + _row_hashes(part).to(hashes.device))
    return (fingerprint + int(hashes.sum())) % 2**64


def _row_hashes(tensor: Tensor) -> Tensor:
    """Hash each row to an integer, (B,), in wrapping 64-bit arithmetic: exact on every device."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().reshape(tensor.shape[0], -1)
    if flat.dtype == torch.bool or flat.is_complex():
        flat = flat.to(torch.uint8) if flat.dtype == torch.bool else torch.view_as_real(flat)
        flat = flat.reshape(tensor.shape[0], -1)
    numbers = flat.view(words[flat.element_size()]).to(torch.int64)
    positions = torch.arange(1, numbers.shape[1] + 1, device=flat.device)
    return ((numbers + 1) * _stir(positions * _MIX)).sum(1)


def _stir(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ (numbers >> 31)) * _MIX
    return numbers ^ (numbers >> 29)
