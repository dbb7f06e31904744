"""Examples: what a loader yields as inputs and targets, and the same ones on every pass.

Inputs are a tensor, a tuple of tensors (`model(*inputs)`) or a mapping of tensors
(`model(**inputs)`); in each the first dimension counts examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate

from deltabars.errors import DataError, first_line
from deltabars.runtime.distributed import Group
from deltabars.runtime.precision import with_own_numbers

_READ_SIZE = 1024  # examples a batch, where the data do not come in batches
_MIX = -7046029254386353131  # an odd 64-bit constant: 2^64 divided by the golden ratio

GENERATED = 4  # inputs that a signature makes
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fill the unit interval evenly

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
# From the targets of a batch to a mask of those that are some, or None for all of them.
Counted = Callable[[Tensor], Tensor | None]
Ranges = tuple[tuple[tuple[int, ...], float, float], ...]  # by leaf: see `Signature.generate`


def leaves(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of one batch's inputs."""
    return tree_leaves(inputs)


def ranges_of(inputs: Inputs) -> Ranges:
    """Return the shape of one example, and the least and largest number, by leaf of some inputs."""
    found = []
    for leaf in leaves(inputs):
        has_range = leaf.numel() and not leaf.is_complex()
        low, high = (float(leaf.min()), float(leaf.max())) if has_range else (0.0, 1.0)
        found.append((tuple(leaf.shape[1:]), low, high))
    return tuple(found)


def map_leaves(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply `function` to each tensor of one batch's inputs."""
    return tree_map(function, inputs)


@dataclass(frozen=True)
class Signature:
    """The inputs a model was fitted with: leaf names, types, and shapes without the batch."""

    names: tuple[str, ...] | None  # None: positional
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # None where the shape differs between batches

    @classmethod
    def of(cls, inputs: Inputs) -> Signature:
        """Read the signature of one batch of inputs."""
        names = tuple(inputs) if isinstance(inputs, dict) else None
        parts = leaves(inputs)
        dtypes = tuple(str(leaf.dtype) for leaf in parts)
        return cls(names, dtypes, tuple(tuple(leaf.shape[1:]) for leaf in parts))

    def merge(self, other: Signature) -> Signature:
        """Return the signature of two batches together; shapes that differ are left open."""
        if (self.names, self.dtypes) != (other.names, other.dtypes):
            raise DataError(f"Data: expected batches of one kind, got {self} and then {other}.")
        pairs = zip(self.shapes, other.shapes, strict=True)
        return replace(self, shapes=tuple(a if a == b else None for a, b in pairs))

    def check(self, inputs: Inputs, also: str) -> None:
        """Raise DataError unless `inputs` are of the kind the model was fitted with.

        Floating inputs may be of the type `also` as well, that of the computation.
        """
        got = Signature.of(inputs)
        pairs = zip(self.dtypes, got.dtypes, self.shapes, got.shapes, strict=False)
        if (self.names, len(self.dtypes)) == (got.names, len(got.dtypes)) and all(
            (a == b or ("float" in a and b == also)) and shape in (None, found)
            for a, b, shape, found in pairs
        ):
            return
        advice = "Convert or reshape them."
        if "torch.uint8" in got.dtypes and got.shapes == self.shapes:
            advice = "Convert them as for the fit: pixels of 0 to 255 by x.float() / 255, say."
        raise DataError(f"Inputs: expected {self}, as in the training data, got {got}. {advice}")

    def generate(self, ranges: Ranges, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Make inputs with numbers that fill the ranges evenly; floating ones are of `dtype`."""
        parts, start = [], 1
        for name, (shape, low, high) in zip(self.dtypes, ranges, strict=True):
            kind = getattr(torch, name.removeprefix("torch."))
            size = GENERATED * math.prod(shape)
            even = torch.arange(start, start + size, dtype=torch.float64) * _GOLDEN % 1.0
            start += size
            if kind.is_floating_point or kind.is_complex:
                part = (low + (high - low) * even).to(dtype if kind.is_floating_point else kind)
            else:
                part = (low + (high - low + 1) * even).floor().clamp(max=high).to(kind)
            parts.append(part.view(GENERATED, *shape).to(device))
        if self.names is not None:
            return dict(zip(self.names, parts, strict=True))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def __str__(self) -> str:
        """Return one line for messages, such as `torch.float32 (B, 1, 28, 28)`."""
        names = self.names or ("",) * len(self.dtypes)
        parts = []
        for name, dtype, shape in zip(names, self.dtypes, self.shapes, strict=True):
            sizes = ", ".join(map(str, ("B", "…") if shape is None else ("B", *shape)))
            parts.append(f"{name} {dtype} ({sizes})".strip())
        return " and ".join(parts)


@dataclass(frozen=True)
class Batch:
    """Some examples: their inputs and, where they are known, their targets."""

    inputs: Inputs
    targets: Tensor | None

    def __len__(self) -> int:
        return leaves(self.inputs)[0].shape[0]

    def split(self, size: int) -> Iterator[Batch]:
        """Yield the same examples in batches of at most `size`."""
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def rows(self, index: slice | Tensor | None) -> Batch:
        """Select examples, by indices or a mask; all of them without."""
        if index is None:
            return self
        index = index.cpu() if isinstance(index, Tensor) else index
        targets = None if self.targets is None else self.targets[index]
        return Batch(map_leaves(lambda leaf: leaf[index], self.inputs), targets)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """Move the batch to `device`, and its floating inputs to `dtype` where that is given."""

        def move(leaf: Tensor, kind: torch.dtype | None = None) -> Tensor:
            leaf = leaf.clone() if leaf.is_inference() else leaf
            return leaf.detach().to(device, kind if leaf.is_floating_point() else None)

        with torch.inference_mode(False):  # derivatives cannot be taken of what it makes
            targets = None if self.targets is None else move(self.targets)
            return Batch(map_leaves(lambda leaf: move(leaf, dtype), self.inputs), targets)


def labelled(raw: Any, counted: Counted = lambda targets: None) -> Batch:
    """Read a training batch: `(inputs, targets)`, `(input, …, targets)`, or a mapping with labels.

    Only the examples that have a target are taken (see `Likelihood.counted`).
    """
    if isinstance(raw, Mapping) and (key := label_key(raw)) is not None:
        inputs: Any = {name: value for name, value in raw.items() if name != key}
        targets = raw[key]
    elif isinstance(raw, tuple | list) and len(raw) >= 2:
        inputs, targets = (raw[0] if len(raw) == 2 else tuple(raw[:-1])), raw[-1]
    else:
        got = sorted(raw) if isinstance(raw, Mapping) else type(raw).__name__
        raise DataError(
            "Data: expected batches (inputs, targets), or mapping batches with an entry 'label' or "
            f"'labels', got {got}."
        )
    inputs, targets = _as_inputs(inputs), _as_tensor(targets, "targets")
    batch = Batch(inputs, targets)
    if targets.ndim == 0 or len(targets) != len(batch):
        raise DataError(
            f"Data: expected one target for each of {len(batch)} inputs, got targets of shape "
            f"{tuple(targets.shape)}."
        )
    return batch.rows(counted(targets))


def unlabelled(raw: Any, signature: Signature) -> Batch:
    """Read a batch to predict: inputs alone, or a training batch, whose targets are left out."""
    return Batch(_as_inputs(_apart(raw, signature)[0]), None)


def batch_of(raw: Any, signature: Signature) -> Batch:
    """Read a batch to predict, with its targets where it has some and they are numbers."""
    inputs, targets = _apart(raw, signature)
    found = as_tensors(targets)
    return Batch(_as_inputs(inputs), found if isinstance(found, Tensor) else None)


def _apart(raw: Any, signature: Signature) -> tuple[Any, Any]:
    """Return the inputs of a raw batch, and what it has more than the network takes, or None."""
    targets = None
    if isinstance(raw, Mapping):
        key = label_key(raw)  # which may be an input of the network, where it is not `labels`
        if key is not None and key not in (signature.names or ()):
            targets, raw = raw[key], {name: raw[name] for name in raw if name != key}
    elif isinstance(raw, tuple | list) and len(raw) == 2 and not isinstance(raw[0], Tensor):
        raw, targets = raw  # ((input, input), targets) or ({name: input}, targets)
    elif isinstance(raw, tuple | list) and len(raw) == len(signature.dtypes) + 1:
        raw, targets = tuple(raw[:-1]), raw[-1]
    if isinstance(raw, tuple | list) and len(raw) == 1:
        raw = raw[0]
    return raw, targets


def label_key(raw: Mapping[Any, Any]) -> str | None:
    """Return the entry of a mapping that has the targets; None where it has none."""
    return next((key for key in ("labels", "label") if key in raw), None)


def as_tensors(data: Any) -> Any:
    """Return data whose NumPy arrays, in tuples, lists and mappings, have become tensors."""
    if isinstance(data, np.ndarray):
        return _as_tensor(data, "data")
    if isinstance(data, Mapping) and any(isinstance(each, np.ndarray) for each in data.values()):
        return {name: as_tensors(value) for name, value in data.items()}
    if isinstance(data, tuple | list) and any(hasattr(part, "__array__") for part in data):
        return tuple(as_tensors(part) for part in data)
    return data


def collated(rows: list[Any]) -> Any:
    """Join rows of a dataset in a batch; of mappings, numbers and lists of numbers become tensors.

    So they are in a `datasets.Dataset` without a format, whose lists torch's own way would turn.
    """
    if not isinstance(rows[0], Mapping):
        return default_collate(rows)
    joined = {}
    for name in rows[0]:
        try:
            joined[name] = torch.stack([torch.as_tensor(row[name]) for row in rows])
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"Data: expected numbers of one shape in the column {name!r}, got "
                f"{type(rows[0][name]).__name__} ({first_line(error).rstrip('.')}). Leave the "
                "column out (remove_columns), tokenise texts with padding, and turn pictures into "
                "tensors."
            ) from error
    return joined


def iterate(data: Any, batch_size: int) -> Iterable[Any]:
    """Return the raw batches of one pass over data; `batch_size` is for those without batches."""
    if isinstance(data, DataLoader):
        return data
    data = as_tensors(data)
    if is_fixed(data):
        starts = range(0, count_of(data), batch_size)
        return (cut(data, slice(start, start + batch_size)) for start in starts)
    if isinstance(data, tuple | list):
        return data
    if isinstance(data, IterableDataset) or is_dataset(data):
        return DataLoader(data, batch_size=batch_size, collate_fn=collated)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return data
    raise DataError(
        "Data: expected a DataLoader, a Dataset, or a pair of tensors (inputs, targets), got "
        f"{type(data).__name__}."
    )


def is_dataset(data: Any) -> bool:
    """Return whether data are a map-style dataset: examples by number."""
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset | Mapping | tuple | list | str | bytes)
    )


def is_fixed(data: Any) -> bool:
    """Return whether data are tensors in memory, the same on every pass by construction."""
    if isinstance(data, tuple | list):
        return bool(data) and isinstance(data[-1], Tensor) and all(map(is_fixed, data))
    return isinstance(data, Tensor | Mapping)


def count_of(data: Any) -> int:
    """Return how many examples fixed data have, which all their tensors must agree on."""
    return _common_count([_as_tensor(leaf, "data") for leaf in tree_leaves(plain(data))])


def _common_count(parts: list[Tensor]) -> int:
    counts = {part.shape[0] if part.ndim else None for part in parts}
    if len(counts) > 1 or None in counts:
        raise DataError(
            "Data: expected tensors whose first dimension counts examples, got shapes "
            f"{[tuple(part.shape) for part in parts]}."
        )
    return parts[0].shape[0] if parts else 0


def cut(data: Any, index: slice | Tensor) -> Any:
    """Select some of the examples of fixed data."""
    return tree_map(lambda leaf: leaf[index], plain(data))


def plain(data: Any) -> Any:
    """Return nested data with plain dictionaries, which torch's tree functions know."""
    if isinstance(data, Mapping):
        return {name: plain(value) for name, value in data.items()}
    return tuple(map(plain, data)) if isinstance(data, tuple | list) else data


def check_not_batches(inputs: list[Any], signature: Signature) -> None:
    """Refuse a list of batches of inputs, whose last one would pass for targets."""
    last = inputs[-1] if inputs else None
    if isinstance(last, Tensor) and len(inputs) == len(signature.dtypes) + 1:
        kind = (str(last.dtype), tuple(last.shape[1:]))
        if kind in zip(signature.dtypes, signature.shapes, strict=True):
            raise DataError(
                "Inputs: expected inputs, or inputs and targets, got one tensor of inputs more. "
                "Join batches with torch.cat, or give a DataLoader."
            )


def _as_inputs(raw: Any) -> Inputs:
    if isinstance(raw, Mapping | tuple | list) and not raw:
        raise DataError("Inputs: expected at least one tensor, got none.")
    if isinstance(raw, Mapping):
        # Sorted, because a mapping's order means nothing and columns are joined by place.
        names = sorted(raw, key=str)
        inputs: Inputs = {str(name): _as_tensor(raw[name], str(name)) for name in names}
    elif isinstance(raw, tuple | list):
        inputs = tuple(_as_tensor(value, "inputs") for value in raw)
    else:
        inputs = _as_tensor(raw, "inputs")
    _common_count(leaves(inputs))
    return inputs


def _as_tensor(value: Any, what: str) -> Tensor:
    """Return a tensor as it is, and an array as one that shares its memory where torch can."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise DataError(
            f"Data: expected tensors or NumPy arrays, got {type(value).__name__} for {what}. Of a "
            "datasets.Dataset in a DataLoader: dataset.set_format('torch')."
        )
    if value.dtype.kind not in "biufc":
        raise DataError(
            f"Data: expected numbers, got an array of {value.dtype} for {what}. Give categories "
            "numbers first, and arrays of objects a type: array.astype(numpy.float32)."
        )
    own = value.astype(value.dtype.newbyteorder("="), copy=False)
    strided = all(stride >= 0 for stride in own.strides)
    return torch.from_numpy(own if own.flags.writeable and strided else own.copy())


class TrainingData:
    """Serve N examples, the same ones on every pass, without those that have no target.

    The first pass checks and counts them, and keeps them on the device if they fit `budget` bytes;
    otherwise every pass reads them again. Data that come from a loader are read a second time at
    once, to make sure that a pass repeats, in any order. The order of a loader that shuffles with
    torch's generator differs from pass to pass, and is the same in every run.

    Attributes:
        source: by whom they are split (see `sharding.own_part`); `"whole"` for one process.
        num_examples, left_out: with a target (N) and without, over all processes.
        num_here: in this process; `counts` has them for every process.
        fingerprint: of all examples, in any order.
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
        source: str = "whole",
    ) -> None:
        group = group or Group()
        self._data, self.source = data, source
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
        """Check, count and keep the examples here; return their kind and how many were left out."""
        kept: list[Batch] | None = []
        fixed = is_fixed(self._data)
        signature: Signature | None = None
        self.num_here = self._fingerprint_here = used = read = 0
        for raw in self._raw():
            whole = labelled(raw)
            read += len(whole)
            assert whole.targets is not None
            batch = whole.rows(self._counted(whole.targets)).to(self._device)
            if not len(batch):
                continue
            _check_finite(batch)
            found = Signature.of(batch.inputs)
            signature = (signature or found).merge(found)
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
        count = fingerprint = 0
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


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the numbers of a tensor as bytes, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # One number is contiguous with any stride, but torch views no bytes of it unless that is 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


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
