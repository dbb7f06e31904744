"""The inputs of a page, told apart from their targets, and read by their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from deltabars.batches import (
    Batch,
    as_tensors,
    collated,
    is_fixed,
    iterate,
    label_key,
    labelled,
    unlabelled,
)
from deltabars.errors import BadValueError, DataError
from deltabars.inputs import Signature, leaves, map_leaves

_READ_SIZE = 256


@dataclass(frozen=True)
class Source:
    """B inputs that can be read by their places: tensors, or a map-style dataset.

    Attributes:
        data: the tensors (a Batch), or the dataset.
        signature: what one input is made of, to tell targets from inputs.
    """

    data: Any
    signature: Signature

    @classmethod
    def of(cls, inputs: Any, signature: Signature) -> Source:
        """Check what `save_report` was given.

        Raises:
            DataError: the inputs cannot be read by their places.
        """
        if hasattr(inputs, "__len__") and len(inputs) == 0:
            raise DataError("inputs: expected at least one, got none.")
        inputs = as_tensors(inputs)
        if is_fixed(inputs):
            return cls(_told_apart(inputs, signature), signature)
        by_place = hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__")
        odd = isinstance(inputs, DataLoader | IterableDataset | str | bytes | tuple | list)
        if odd or not by_place:
            raise DataError(
                "inputs: expected tensors or a map-style Dataset, whose inputs have places, got "
                f"{type(inputs).__name__}. Of a DataLoader give its dataset."
            )
        return cls(inputs, signature)

    def __len__(self) -> int:
        return len(self.data)

    def read(self, places: Sequence[int]) -> Batch:
        """The inputs at some places, and their targets where they come with some."""
        if isinstance(self.data, Batch):
            return self.data.rows(torch.as_tensor(places))
        rows = Subset(self.data, places)
        (raw,) = DataLoader(rows, batch_size=len(places), collate_fn=collated)
        return _told_apart(raw, self.signature)

    def batches(self) -> Iterator[Batch]:
        """One pass over all inputs."""
        if isinstance(self.data, Batch):
            yield from self.data.split(_READ_SIZE)
            return
        for raw in iterate(self.data, _READ_SIZE):
            yield _told_apart(raw, self.signature)

    def targets(self) -> Tensor | None:
        """The targets that come with the inputs, if any. Cost: a pass over a dataset of pairs."""
        if self.read([0]).targets is None:
            return None
        return joined_targets([batch.targets for batch in self.batches()])


def image_of(batch: Batch) -> Tensor | None:
    """The one tensor of the inputs that looks like images, (B, 1|3, H, W) or (B, H, W), if any."""
    found = [leaf for leaf in leaves(batch.inputs) if _looks_like_images(leaf)]
    return found[0] if len(found) == 1 else None


def _looks_like_images(leaf: Tensor) -> bool:
    numbers = leaf.is_floating_point() or leaf.dtype == torch.uint8
    channels = leaf.ndim == 3 or (leaf.ndim == 4 and leaf.shape[1] in (1, 3))
    return numbers and channels and min(leaf.shape[-2:]) >= 4


def _told_apart(raw: Any, signature: Signature) -> Batch:
    """Inputs with their targets where there is one tensor more than the network takes."""
    if isinstance(raw, Mapping):
        key = label_key(raw)
        has_targets = key is not None and key not in (signature.names or ())
    else:
        several = isinstance(raw, tuple | list)
        nested = several and len(raw) == 2 and not isinstance(raw[0], Tensor)
        has_targets = several and (nested or len(raw) == signature.count + 1)
    inputs = unlabelled(raw, signature).inputs
    targets = labelled(raw).targets if has_targets else None
    return Batch(map_leaves(lambda leaf: leaf, inputs), targets)


def joined_targets(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The targets of several batches as one; None where there are none."""
    known = [part.cpu() for part in parts if part is not None]
    return torch.cat(known) if known else None


def texts_of(
    inputs: Any, given: Sequence[str] | None, places: Sequence[int], count: int
) -> list[str]:
    """The texts of the inputs at some places; an empty list where they are no texts.

    Raises:
        BadValueError: there are not as many texts as inputs.
    """
    if given is not None:
        if len(given) != count:
            raise BadValueError(f"texts: expected {count} texts, got {len(given)}.")
        return [str(given[place]) for place in places]
    if isinstance(inputs, Tensor | tuple | list | Mapping) or not hasattr(inputs, "__getitem__"):
        return []
    first = inputs[places[0]]
    if not isinstance(first, Mapping):
        return []
    key = next((key for key, value in first.items() if isinstance(value, str)), None)
    return [] if key is None else [str(inputs[place][key]) for place in places]
