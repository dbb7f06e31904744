"""Batches of examples: what a loader yields, told apart into inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from deltabars.errors import DataError, first_line
from deltabars.problem.inputs import Inputs, Signature, leaves, map_leaves

LABELS = ("labels", "label")  # of which the first that is there has the targets

# From the targets of a batch to a mask of those that are some, or None for all of them.
Counted = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Batch:
    """Some examples: their inputs and, where they are known, their targets."""

    inputs: Inputs
    targets: Tensor | None

    def __len__(self) -> int:
        return leaves(self.inputs)[0].shape[0]

    def split(self, size: int) -> Iterator[Batch]:
        """The same examples in batches of at most `size`."""
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def having(self, counts: Tensor | None) -> Batch:
        """The examples that count by a mask (B,), which may be none of them; all without a mask."""
        return self if counts is None else self.rows(counts.cpu())

    def rows(self, index: slice | Tensor) -> Batch:
        """The examples that `index` selects."""
        targets = None if self.targets is None else self.targets[index]
        return Batch(map_leaves(lambda leaf: leaf[index], self.inputs), targets)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """The batch on `device`, its floating inputs in `dtype` where that is given."""

        def move(leaf: Tensor, kind: torch.dtype | None = None) -> Tensor:
            leaf = leaf.clone() if leaf.is_inference() else leaf
            return leaf.detach().to(device, kind if leaf.is_floating_point() else None)

        with torch.inference_mode(False):  # derivatives cannot be taken of what it makes
            targets = None if self.targets is None else move(self.targets)
            return Batch(map_leaves(lambda leaf: move(leaf, dtype), self.inputs), targets)


def labelled(raw: Any, counted: Counted = lambda targets: None) -> Batch:
    """A training batch: `(inputs, targets)`, `(input, input, …, targets)`, or a mapping with
    `labels` or `label`. Of examples, those alone that have a target (see `Likelihood.counted`).
    """
    if isinstance(raw, Mapping):
        key = label_key(raw)
        if key is None:
            raise DataError(
                f"Data: expected mapping batches with an entry 'label' or 'labels', got "
                f"{sorted(raw)}. Rename the one with the targets."
            )
        inputs: Any = {name: value for name, value in raw.items() if name != key}
        targets = raw[key]
    elif isinstance(raw, tuple | list) and len(raw) >= 2:
        inputs, targets = (raw[0] if len(raw) == 2 else tuple(raw[:-1])), raw[-1]
    else:
        raise DataError(
            "Data: expected batches (inputs, targets) or mappings with 'labels' or 'label', got "
            f"{type(raw).__name__}."
        )
    batch = Batch(_as_inputs(inputs), _as_tensor(targets, "targets"))
    count = len(batch)
    if batch.targets is None or batch.targets.ndim == 0 or batch.targets.shape[0] != count:
        shape = None if batch.targets is None else tuple(batch.targets.shape)
        raise DataError(
            f"Data: expected one target for each of {count} inputs, got targets of shape {shape}."
        )
    return batch.having(counted(batch.targets))


def unlabelled(raw: Any, signature: Signature) -> Batch:
    """A batch to predict: inputs alone, or a training batch, whose targets are left out."""
    if isinstance(raw, Mapping):
        key = label_key(raw)  # which may be an input of the network, where it is not `labels`
        if key is not None and key not in (signature.names or ()):
            raw = {name: value for name, value in raw.items() if name != key}
    elif isinstance(raw, tuple | list) and len(raw) == 2 and not isinstance(raw[0], Tensor):
        raw = raw[0]  # ((input, input), targets) or ({name: input}, targets)
    elif isinstance(raw, tuple | list) and len(raw) == signature.count + 1:
        raw = tuple(raw[:-1])
    if isinstance(raw, tuple | list) and len(raw) == 1:
        raw = raw[0]
    return Batch(_as_inputs(raw), None)


def batch_of(raw: Any, signature: Signature) -> Batch:
    """Split a raw batch into inputs and, where it has more than the network takes, targets."""
    targets = None
    if isinstance(raw, Mapping):
        key = label_key(raw)
        targets = None if key is None or key in (signature.names or ()) else raw[key]
    elif isinstance(raw, tuple | list):
        nested = len(raw) == 2 and not isinstance(raw[0], Tensor)
        targets = raw[-1] if nested or len(raw) == signature.count + 1 else None
    found = as_tensors(targets)
    return Batch(unlabelled(raw, signature).inputs, found if isinstance(found, Tensor) else None)


def label_key(raw: Mapping[Any, Any]) -> str | None:
    """The entry of a mapping that has the targets; None where it has none."""
    return next((key for key in LABELS if key in raw), None)


def as_tensors(data: Any) -> Any:
    """Data whose NumPy arrays, in tuples, lists and mappings, have become tensors."""
    if isinstance(data, np.ndarray):
        return _from_array(data, "data")
    if isinstance(data, Mapping) and any(isinstance(each, np.ndarray) for each in data.values()):
        return {name: as_tensors(value) for name, value in data.items()}
    if isinstance(data, tuple | list) and any(hasattr(part, "__array__") for part in data):
        return tuple(as_tensors(part) for part in data)
    return data


def collated(rows: list[Any]) -> Any:
    """Rows of a dataset as a batch; of mappings, numbers and lists of numbers become tensors.

    So they are in a `datasets.Dataset` without a format, whose lists torch's own way would turn.
    """
    if not isinstance(rows[0], Mapping):
        return default_collate(rows)
    return {name: _column([row[name] for row in rows], str(name)) for name in rows[0]}


def _column(values: list[Any], name: str) -> Tensor:
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"Data: expected numbers of one shape in the column {name!r}, got "
            f"{type(values[0]).__name__} ({first_line(error).rstrip('.')}). Leave the column out "
            "(remove_columns), tokenise texts with padding, and turn pictures into tensors."
        ) from error


def iterate(data: Any, batch_size: int) -> Iterable[Any]:
    """The raw batches of one pass over `data`; call it again for another pass.

    Args:
        data: a DataLoader or another re-iterable of batches, a Dataset, tensors, a tuple of
            tensors, or a mapping of tensors.
        batch_size: for data that does not come in batches.
    """
    if isinstance(data, DataLoader):
        return data
    data = as_tensors(data)
    if isinstance(data, Tensor | Mapping) or _is_tensors(data):
        return _slices(data, batch_size)
    if isinstance(data, tuple | list):
        return data
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, torch.utils.data.IterableDataset) or (
        is_dataset and not isinstance(data, str | bytes)
    ):
        return DataLoader(data, batch_size=batch_size, collate_fn=collated)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return data
    raise DataError(
        "Data: expected a DataLoader, a Dataset, or a pair of tensors (inputs, targets), got "
        f"{type(data).__name__}."
    )


def is_fixed(data: Any) -> bool:
    """Whether data are tensors in memory, the same on every pass by construction."""
    return isinstance(data, Tensor | Mapping) or _is_tensors(data)


def check_can_be_read_again(data: Any) -> None:
    """Refuse data that one pass uses up."""
    if isinstance(data, Iterator):
        raise DataError(
            "Data: expected data that can be read more than once, got a one-pass iterator "
            f"({type(data).__name__}). Give a DataLoader, a Dataset or tensors."
        )


def _is_tensors(data: object) -> bool:
    return (
        isinstance(data, tuple | list)
        and bool(data)
        and isinstance(data[-1], Tensor)
        and all(isinstance(part, Tensor | Mapping) or _is_tensors(part) for part in data)
    )


def check_not_batches(inputs: list[Any], signature: Signature) -> None:
    """Refuse a list of batches of inputs, whose last one would pass for targets."""
    last = inputs[-1] if inputs else None
    if isinstance(last, Tensor) and len(inputs) == signature.count + 1:
        kind = (str(last.dtype), tuple(last.shape[1:]))
        if kind in zip(signature.dtypes, signature.shapes, strict=True):
            raise DataError(
                "Inputs: expected inputs, or inputs and targets, got a list with one tensor of "
                "inputs more than the model takes. Join batches with torch.cat, or give a "
                "DataLoader."
            )


def count_of(data: Any) -> int:
    """How many examples fixed data have, which all their tensors must agree on."""
    parts = _flat(data)
    count = parts[0].shape[0] if parts and parts[0].ndim else 0
    for part in parts:
        if part.ndim == 0 or part.shape[0] != count:
            raise DataError(
                "Data: expected tensors with one first dimension, got shapes "
                f"{[tuple(part.shape) for part in parts]}."
            )
    return count


def _slices(data: Any, batch_size: int) -> Iterator[Any]:
    for start in range(0, count_of(data), batch_size):
        yield cut(data, slice(start, start + batch_size))


def _flat(data: Any) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    values = data.values() if isinstance(data, Mapping) else data
    return [tensor for value in values for tensor in _flat(_as_tensor_tree(value))]


def cut(data: Any, index: slice | Tensor) -> Any:
    """Some of the examples of fixed data."""
    if isinstance(data, Tensor):
        return data[index]
    if isinstance(data, Mapping):
        return {name: cut(value, index) for name, value in data.items()}
    return tuple(cut(value, index) for value in data)


def _as_tensor_tree(value: Any) -> Any:
    return value if isinstance(value, Mapping | tuple | list) else _as_tensor(value, "data")


def _as_inputs(raw: Any) -> Inputs:
    if isinstance(raw, Mapping):
        if not raw:
            raise DataError("Inputs: expected at least one tensor, got an empty mapping.")
        # Sorted, because a mapping's order means nothing and columns are joined by place.
        inputs: Inputs = {
            str(name): _as_tensor(raw[name], str(name)) for name in sorted(raw, key=str)
        }
    elif isinstance(raw, tuple | list):
        if not raw:
            raise DataError("Inputs: expected at least one tensor, got none.")
        inputs = tuple(_as_tensor(value, "inputs") for value in raw)
    else:
        inputs = _as_tensor(raw, "inputs")
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in leaves(inputs)}
    if None in counts or len(counts) > 1:
        shapes = [tuple(leaf.shape) for leaf in leaves(inputs)]
        raise DataError(
            f"Inputs: expected tensors whose first dimension counts examples, got shapes {shapes}."
        )
    return inputs


def _as_tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, np.ndarray):
        return _from_array(value, what)
    if not isinstance(value, Tensor):
        raise DataError(
            f"Data: expected tensors or NumPy arrays, got {type(value).__name__} for {what}. Of a "
            "datasets.Dataset in a DataLoader: dataset.set_format('torch')."
        )
    return value


def _from_array(array: np.ndarray, what: str) -> Tensor:
    """An array of numbers as a tensor, which shares its memory where torch can."""
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"Data: expected numbers, got an array of {array.dtype} for {what}. Give categories "
            "numbers first, and arrays of objects a type: array.astype(numpy.float32)."
        )
    plain = array.astype(array.dtype.newbyteorder("="), copy=False)
    strided = all(stride >= 0 for stride in plain.strides)
    return torch.from_numpy(plain if plain.flags.writeable and strided else plain.copy())
