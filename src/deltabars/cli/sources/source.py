"""Source: data to fit or to predict, with the names of its inputs and classes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from deltabars.errors import DataError
from deltabars.problem.data import Batch, Signature, batch_of, iterate, leaves, map_leaves

_READ_SIZE = 1024  # inputs, where they do not come in batches


@dataclass(frozen=True, eq=False)
class Source:
    """Data, and what is known of them."""

    data: Any  # what `fit` and `predict` take: tensors, a Dataset or a DataLoader
    dataset: Any = None  # inputs by their indices: a Dataset or tensors; None if read in passes
    classes: tuple[str, ...] | None = None  # their names
    names: tuple[str, ...] | None = None  # of the inputs, such as files; None if they have indices
    targets: Tensor | None = None  # where they are known without reading the inputs
    # The picture (H, W) or (H, W, 3) of an input by its index, uint8.
    picture: Callable[[int], np.ndarray] | None = None
    fingerprint: str | None = None  # None where it is not known without reading the data
    ordered: bool = True  # whether every pass has the same order
    columns: tuple[str, ...] | None = None  # of a table, the names of the numbers of an input
    # `data` with other class numbers; None where they cannot be exchanged.
    relabelled: Callable[[Tensor], Any] | None = None

    def __len__(self) -> int:
        """Return how many inputs there are; 0 where that is not known without reading them."""
        data = self.data[0] if isinstance(self.data, tuple) else self.data
        data = data.dataset if isinstance(data, DataLoader) else data
        return len(data) if hasattr(data, "__len__") else 0

    def batches(self, signature: Signature) -> Iterator[Batch]:
        """Yield inputs and, where there are any, targets; a fit's signature tells them apart."""
        self.check_ordered()
        for raw in iterate(self.data, _READ_SIZE):
            yield batch_of(raw, signature)

    def with_classes(self, classes: tuple[str, ...]) -> Source:
        """Return the same data with the class numbers of a fit, by the names of the classes."""
        given, targets = self.classes, self.targets
        if given is None or given == classes:
            return replace(self, classes=classes)
        odd = [name for name in given if name not in classes]
        twice = len({*given}) < len(given) or len({*classes}) < len(classes)
        if odd or twice or self.relabelled is None or targets is None:
            why = ", ".join(odd[:5]) or "names that are there twice, or their order"
            raise DataError(
                f"--data: expected some of the {len(classes)} classes of the fit, or data without "
                f"classes, got {len(given)} (the difference: {why})."
            )
        targets = torch.tensor([classes.index(name) for name in given])[targets]
        data = self.relabelled(targets)
        dataset = data.dataset if isinstance(data, DataLoader) else self.dataset
        return replace(self, data=data, dataset=dataset, targets=targets, classes=classes)

    def with_real_targets(self) -> Source:
        """Return tensors with real numbers as targets, for a regression; other data as they are."""
        whole, data = self.targets, self.data
        if whole is None or whole.is_floating_point() or self.classes or type(data) is not tuple:
            return self
        return replace(self, data=(data[0], whole.float()), targets=whole.float())

    def check_ordered(self) -> None:
        """Refuse data without an order, in which an input's index means nothing."""
        if not self.ordered:
            raise DataError(
                "--data: expected the same order on every pass, got a DataLoader that shuffles. "
                "Return one with shuffle=False."
            )

    def inputs(self, signature: Signature) -> Any:
        """Return all inputs by their indices: the dataset, or one pass kept in memory."""
        if self.dataset is not None:
            return self.dataset
        parts = [batch.inputs for batch in self.batches(signature)]
        joined = map(torch.cat, zip(*map(leaves, parts), strict=True))
        return map_leaves(lambda _: next(joined), parts[0])

    def read_targets(self, signature: Signature) -> Tensor | None:
        """Return the targets of all inputs, by one pass where they are not known."""
        if self.targets is not None:
            return self.targets
        found = [batch.targets for batch in self.batches(signature)]
        parts = [targets for targets in found if targets is not None]
        return torch.cat(parts) if parts else None

    def name(self, index: int) -> str:
        """Return the name of an input, or its index."""
        return str(index) if self.names is None else self.names[index]


def fingerprint_of(*parts: Any) -> str:
    """Return a digest of tensors, bytes and texts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{tuple(part.shape)}:{part.dtype};".encode())
            digest.update(np.ascontiguousarray(part.detach().cpu().numpy()).data)
        else:
            digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()
