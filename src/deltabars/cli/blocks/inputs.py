"""Inputs a block at a time: by number where data have numbers, else by passing over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from deltabars.cli.sources.source import Source, fingerprint_of
from deltabars.errors import DataError, first_line
from deltabars.problem.data import (
    Batch,
    Signature,
    as_tensors,
    batch_of,
    collated,
    is_fixed,
    iterate,
    leaves,
)

_READ_SIZE = 1024  # inputs a batch at the most, where they do not come in batches
_READ_BYTES = 1 << 26
_STREAM_SIZE = 256  # likewise, where their size is not known before
# How a loader of the user's reads, which that of a block does as well.
_KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor",
)  # fmt: skip


class Inputs(Protocol):
    """Inputs that are read in blocks.

    Attributes:
        first: the first input, as a batch.
        digest: of a few of them, which tells these inputs from most others.
        count: how many there are; None as long as that is not known.
    """

    first: Batch
    digest: str
    count: int | None

    def block(self, start: int, end: int) -> Iterator[Batch]:
        """The inputs of these numbers, in batches; fewer where there are no more.

        Of a stream each block has to begin where the last one ended, or later.
        """


def inputs_of(source: Source, signature: Signature) -> Inputs:
    """The inputs of a source.

    Raises:
        DataError: there are none, or they have no order.
    """
    source.check_ordered()
    data = as_tensors(source.data)
    if is_fixed(data):
        return _ByNumber(_Tensors(data, signature))
    if isinstance(data, DataLoader):
        if _reads_in_order(data):
            return _ByNumber(_Items(data.dataset, signature, data))
    elif not isinstance(data, tuple | list | IterableDataset | str | bytes) and (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        return _ByNumber(_Items(data, signature))
    return _Stream(iterate(data, _STREAM_SIZE), signature)


def _reads_in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader has all items of its dataset, in their order."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) is SequentialSampler
        and loader.batch_size is not None  # or the batches are of the user's own making
        and not loader.drop_last
    )


class _Tensors:
    """Tensors in memory, or mapped into it: what is read of them are views."""

    def __init__(self, data: Any, signature: Signature) -> None:
        raw = next(iter(iterate(data, 2**62)), None)  # checks the shapes
        self._whole = None if raw is None else batch_of(raw, signature)

    def __len__(self) -> int:
        return 0 if self._whole is None else len(self._whole)

    def read(self, start: int, end: int, size: int) -> Iterator[Batch]:
        assert self._whole is not None
        return self._whole.rows(slice(start, end)).split(size)


class _Items:
    """The items of a Dataset, through a loader like the one that was given."""

    def __init__(
        self, dataset: Any, signature: Signature, like: DataLoader[Any] | None = None
    ) -> None:
        self._dataset, self._signature = dataset, signature
        self._options = {} if like is None else {name: getattr(like, name) for name in _KEPT}

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, start: int, end: int, size: int) -> Iterator[Batch]:
        options: dict[str, Any] = {"batch_size": size, "collate_fn": collated, **self._options}
        if end - start <= options["batch_size"]:  # workers take longer to start than that
            options |= {"num_workers": 0, "prefetch_factor": None, "timeout": 0}
        some: Any = Subset(self._dataset, range(start, end))
        for raw in DataLoader(some, **options):
            yield batch_of(raw, self._signature)


class _ByNumber:
    """Inputs with numbers: nothing is read but what is asked for."""

    def __init__(self, data: _Tensors | _Items) -> None:
        self._data = data
        self.count: int | None = len(data)
        if not self.count:
            raise _none()
        some = [self._one(number) for number in sorted({0, self.count // 2, self.count - 1})]
        self.first = some[0]
        self.digest = _digest(*some)
        self._size = max(1, min(_READ_SIZE, _READ_BYTES // max(1, _bytes(self.first))))

    def block(self, start: int, end: int) -> Iterator[Batch]:
        assert self.count is not None
        return _read(self._data.read(start, min(end, self.count), self._size), start)

    def _one(self, number: int) -> Batch:
        return next(_read(self._data.read(number, number + 1, 1), number))


class _Stream:
    """Inputs without numbers: those that are not asked for are read and left out."""

    def __init__(self, raws: Iterable[Any], signature: Signature) -> None:
        self.count: int | None = None
        self._place = 0
        self._batches = _read((batch_of(raw, signature) for raw in raws), 0)
        self._held = self._next()
        if self._held is None:
            raise _none()
        self.first = self._held.rows(slice(0, 1))
        self.digest = _digest(self.first)

    def block(self, start: int, end: int) -> Iterator[Batch]:
        assert start >= self._place
        while self._place < end:
            held = self._held if self._held is not None else self._next()
            if held is None:
                self.count = self._place
                return
            skipped = min(max(0, start - self._place), len(held))
            taken = min(len(held), end - self._place)
            self._held = held.rows(slice(taken, None)) if taken < len(held) else None
            self._place += taken
            if skipped < taken:
                yield held.rows(slice(skipped, taken))

    def _next(self) -> Batch | None:
        return next((batch for batch in self._batches if len(batch)), None)


def _read(batches: Iterator[Batch], place: int) -> Iterator[Batch]:
    """The same batches: what cannot be read is told from what cannot be written."""
    while True:
        try:
            batch = next(batches, None)
        except OSError as error:
            raise DataError(
                f"Data: expected inputs that can be read, got an error after {place:,} of them: "
                f"{first_line(error).rstrip('.')}."
            ) from error
        if batch is None:
            return
        place += len(batch)
        yield batch


def _digest(*some: Batch) -> str:
    return fingerprint_of(*(leaf for batch in some for leaf in leaves(batch.inputs)))


def _bytes(batch: Batch) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(batch.inputs))


def _none() -> DataError:
    return DataError("Inputs: expected at least one, got none.")
