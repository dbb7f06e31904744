"""The data of one rank: its own part of what all have, or what it alone was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
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

    def among(self, indices: Sequence[int], group: Group) -> Part:
        """The part of this rank where the examples with these indices alone are split."""
        assert self.pick is not None
        return replace(self, data=self.pick(_dealt(indices, group)))


def own_part(data: Any, group: Group) -> Part:
    """The part of some data that is this rank's to read.

    Tensors, datasets and loaders that are the same on all ranks are dealt out in turn; those that
    are not are each rank's own, as streams always are. Of a DistributedSampler the examples that it
    repeats to come out even are left out.
    """
    if group.size == 1:
        return Part(data, "whole")
    if isinstance(data, DataLoader):
        return _of_loader(data, group)
    if is_fixed(data):
        count = count_of(data)
        if not _is_same(data, count, group):
            return Part(data, "own")
        _check_enough(count, group)
        own = cut(data, slice(group.rank, None, group.size))
        return Part(own, "split", lambda some: cut(data, torch.as_tensor(some)))
    if _is_dataset(data):
        if not _is_same(data, len(data), group):
            return Part(data, "own")
        return _split(len(data), group, partial(Subset, data))
    same_everywhere(group, None)  # the others may be comparing: it is their turn as well
    return Part(data, "own")


def _of_loader(loader: DataLoader[Any], group: Group) -> Part:
    sampler, dataset = loader.sampler, loader.dataset
    if type(sampler) is DistributedSampler:
        if (sampler.num_replicas, sampler.rank) != (group.size, group.rank):
            raise DataError(
                f"DistributedSampler: expected that of rank {group.rank} of {group.size}, got one "
                f"of rank {sampler.rank} of {sampler.num_replicas}."
            )
        same_everywhere(group, None)
        count = len(sampler.dataset)  # type: ignore[arg-type]
        if sampler.drop_last:
            count = min(count, sampler.total_size)
        return _split(count, group, partial(_with, loader), "sampler")
    if not _is_dataset(dataset) or loader.batch_size is None:
        same_everywhere(group, None)
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
    if not _is_same(dataset, count, group, indices):
        return Part(loader, "own")
    if loader.drop_last:
        indices = indices[: len(indices) // loader.batch_size * loader.batch_size]
    return _split(
        len(indices), group, lambda some: _with(loader, [indices[place] for place in some])
    )


def _split(
    count: int, group: Group, pick: Callable[[Sequence[int]], Any], source: str = "split"
) -> Part:
    return Part(None, source, pick).among(range(count), group)


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


def _dealt(indices: Sequence[int], group: Group) -> Sequence[int]:
    _check_enough(len(indices), group)
    return indices[group.rank :: group.size]


def _check_enough(count: int, group: Group) -> None:
    if count < group.size:
        raise DataError(
            f"Data: expected an example for each of {group.size} ranks, got {count}. Use fewer "
            "ranks."
        )


def _is_dataset(data: Any) -> bool:
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset | Mapping | tuple | list | str | bytes)
    )


def _is_same(data: Any, count: int, group: Group, indices: Sequence[int] = ()) -> bool:
    """Whether all ranks have the same data, by their number and some of the examples.

    Args:
        indices: of those that are read, where it is not all of them.
    """
    places = [k * (count - 1) // max(1, _LOOKED_AT - 1) for k in range(_LOOKED_AT)] if count else []
    fixed = is_fixed(data)
    looked = [cut(data, slice(k, k + 1)) if fixed else data[k] for k in sorted(set(places))]
    return same_everywhere(group, (count, indices, _plain(looked)))


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


_READ_SIZE = 1024  # examples a batch, where the data do not come in batches
_MIX = -7046029254386353131  # an odd 64-bit constant: 2^64 divided by the golden ratio


class TrainingData:
    """N examples, the same ones on every pass.

    The first pass checks and counts them and keeps them on the device if they fit `budget`
    bytes; otherwise every pass reads them again. Data that come from a loader are read a second
    time at once, to make sure that a pass repeats (in any order). The order of a loader that
    shuffles with torch's own generator is another one on each pass, and the same ones each time.

    Where there are several ranks, each reads its own part (see `splitting`). Examples without a
    target are left out as they are read, on every pass: all else is that of the others alone.

    Attributes:
        num_examples: N, on all ranks.
        num_here: on this one; `counts` has them for every rank.
        fingerprint: of all examples, in any order.
        source: how the ranks came to their parts.
        left_out: how many examples have no target, on all ranks.
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
        data = as_tensors(data)
        check_can_be_read_again(data)
        group = group or Group()
        part = own_part(data, group)
        self._data, self.source, self._rank = part.data, part.source, group.rank
        self._passes = 0
        self._device = device
        self._dtype = dtype
        self._counted = counted
        signature, left_out = self._look(budget, report)
        everywhere = group.gather((self.num_here, self._fingerprint_here, signature, left_out))
        gone = [places for *_, places in everywhere]
        self.left_out = sum(map(len, gone))
        if self.left_out and part.pick is not None:  # split the others alone, so that all get some
            counts = torch.ones(sum(found[0] for found in everywhere) + self.left_out).bool()
            for rank, places in enumerate(gone):
                counts[places * group.size + rank] = False
            self._data = part.among(counts.nonzero().squeeze(1).tolist(), group).data
            signature, left_out = self._look(budget, report)
            everywhere = group.gather((self.num_here, self._fingerprint_here, signature, left_out))
        if signature is None:
            why = f"all {self.left_out} have no target" if self.left_out else "the data are empty"
            raise DataError(f"Data: expected at least one example, got none: {why}.")
        if any(found[2] is None for found in everywhere):
            group.gather(None)  # raises the error of the rank that has none
        if self.source == "own" and len({found[:2] for found in everywhere}) == 1 < group.size:
            raise DataError(
                f"Data: expected a part of them on each of {group.size} ranks, got the same "
                f"{self.num_here} examples on all. Split the stream by rank, or give a Dataset, "
                "which is split here."
            )
        self.counts = [count for count, *_ in everywhere]
        self.num_examples = sum(self.counts)
        self.fingerprint = sum(found[1] for found in everywhere) % 2**64
        self.signature = reduce(Signature.merge, [found[2] for found in everywhere])

    def _look(
        self, budget: int, report: Callable[[int, str], None]
    ) -> tuple[Signature | None, Tensor]:
        """Check, count and keep the examples that are here, in a first pass.

        Returns:
            What an input is made of, None where there are none; and the indices of the examples
            that are left out, among all those that are here.
        """
        kept: list[Batch] | None = []
        fixed = is_fixed(self._data)
        used = read = 0
        self.num_here, self._fingerprint_here, self._kept = 0, 0, None
        signature: Signature | None = None
        left_out = [torch.zeros(0, dtype=torch.int64)]
        for raw in self._raw():
            whole = labelled(raw)
            assert whole.targets is not None
            counts = self._counted(whole.targets)
            if counts is not None:
                left_out.append(read + (~counts).nonzero().squeeze(1).cpu())
            read += len(whole)
            batch = whole.having(counts).to(self._device)
            if not len(batch):
                continue
            _check_finite(batch)
            found = Signature.of(batch.inputs)
            signature = found if signature is None else signature.merge(found)
            self.num_here += len(batch)
            self._fingerprint_here = _add(self._fingerprint_here, batch)
            report(self.num_here, "read")
            batch = batch.to(self._device, self._dtype)
            used += _bytes(batch)
            if kept is not None and not fixed:
                kept.append(batch)
            if used > budget:
                kept = None
        self.in_memory = kept is not None
        if signature is not None and not fixed:
            self._check_repeats(report)
        elif signature is not None and kept is not None:  # the tensors themselves, not a copy
            kept = [labelled(self._data, self._counted).to(self._device, self._dtype)]
        if signature is not None and kept is not None:
            self._kept = _join(kept, signature)
        return signature, torch.cat(left_out)

    @property
    def is_uniform(self) -> bool:
        """Whether every pass gives the same chunks, of one shape (but for the last)."""
        return self._kept is not None and len(self._kept) == 1

    def here(self, numbers: Tensor) -> Tensor:
        """Of examples by their numbers among all those that are here, by their numbers here."""
        if self.source in ("split", "sampler"):  # dealt out in turn
            count = len(self.counts)
            return numbers[numbers % count == self._rank] // count
        start = sum(self.counts[: self._rank])
        return numbers[(numbers >= start) & (numbers < start + self.num_here)] - start

    def chunks(self, size: int) -> Iterator[Batch]:
        """One pass over all examples, on the device, at most `size` at a time."""
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


def _bytes(batch: Batch) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(batch.inputs))


def _join(batches: list[Batch], signature: Signature) -> list[Batch]:
    """One batch of everything where shapes allow it, so that chunks do not depend on the loader."""
    targets = [batch.targets for batch in batches if batch.targets is not None]
    shapes = {tuple(target.shape[1:]) for target in targets}
    if None in signature.shapes or len(shapes) > 1 or len(batches) == 1:
        return batches
    columns = zip(*(leaves(batch.inputs) for batch in batches), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return [Batch(map_leaves(lambda _: next(joined), batches[0].inputs), torch.cat(targets))]


def fingerprint_of(batches: Iterable[Batch]) -> int:
    """A number that tells the examples of some batches, in any order, from others."""
    total = 0
    for batch in batches:
        total = _add(total, batch)
    return total


def _add(fingerprint: int, batch: Batch) -> int:
    """Add a batch to an order-free fingerprint: the sum of its examples' hashes, modulo 2^64."""
    parts = leaves(batch.inputs) + ([] if batch.targets is None else [batch.targets])
    hashes = torch.zeros(len(batch), dtype=torch.int64, device=parts[0].device)
    for part in parts:
        hashes = _stir(hashes * _MIX + _row_hashes(part).to(hashes.device))
    return (fingerprint + int(hashes.sum())) % 2**64


def _row_hashes(tensor: Tensor) -> Tensor:
    """An integer (B,) for each row, in wrapping 64-bit arithmetic: exact on every device."""
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
