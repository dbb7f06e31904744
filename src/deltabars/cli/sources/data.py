"""Data in memory: .npz files, MNIST's and CIFAR-10's files, and what a user's factory gives."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from deltabars.cli.sources.folders import Pictures, Preparation, read_folder
from deltabars.cli.sources.models import (
    check_texts,
    find_object,
    is_name,
    user_code,
    with_full_path,
)
from deltabars.cli.sources.source import Picture, Source, fingerprint_of
from deltabars.cli.tables import pyarrow
from deltabars.errors import BadValueError, DataError, ModelError, first_line
from deltabars.problem.batches import Batch, iterate, labelled
from deltabars.problem.inputs import leaves
from deltabars.recipes.images import read_cifar10, read_mnist
from deltabars.recipes.paper import CIFAR10, MNIST
from deltabars.storage.reading import check_unpacked, read_arrays

_INPUTS = ("inputs", "images", "x")
_TARGETS = ("targets", "labels", "y")
_CHANNELS = (1, 3)


def read_npz(path: Path, preparation: Preparation) -> Source:
    """Arrays `inputs` (or `images`, `x`) and, where there are any, `targets` (or `labels`, `y`).

    Bytes are images: (N, H, W), (N, C, H, W) or (N, H, W, C), scaled to 0 … 1. Other real numbers
    are taken as they are, as float32, and whole numbers as int64. `classes` may name the classes.
    """
    arrays = read_arrays(path, "--data")
    raw = _first(arrays, _INPUTS, path)
    if raw is None:
        raise DataError(
            f"--data: expected an array 'inputs', 'images' or 'x' in {path}, got "
            f"{', '.join(sorted(arrays)) or 'none'}."
        )
    given = _first(arrays, _TARGETS, path)
    inputs = _images(raw, path) if raw.dtype == np.uint8 else _numbers(raw, "inputs", path)
    targets = None if given is None else _numbers(given, "targets", path)
    if targets is not None and (targets.ndim == 0 or len(targets) != len(inputs)):
        raise DataError(
            f"--data: expected one target for each of {len(inputs)} inputs in {path}, got targets "
            f"of shape {tuple(targets.shape)}."
        )
    names = arrays.get("classes")
    classes = None if names is None else tuple(map(_text, np.ravel(names).tolist()))
    return from_tensors(inputs, targets, preparation, classes, is_pixels=raw.dtype == np.uint8)


def read_downloaded(folder: Path, kind: str, part: str, preparation: Preparation) -> Source:
    """A part of MNIST's idx files or of CIFAR-10's binary batches."""
    recipe, read = {"mnist": (MNIST, read_mnist), "cifar10": (CIFAR10, read_cifar10)}[kind]
    images, labels = read(folder, part)
    return from_tensors(images, labels, preparation, recipe.class_names, is_pixels=True)


def from_tensors(
    inputs: Tensor,
    targets: Tensor | None,
    preparation: Preparation,
    classes: tuple[str, ...] | None,
    *,
    is_pixels: bool,
) -> Source:
    """Tensors; those that are pixels from 0 to 1 have pictures."""
    if (preparation.mean or preparation.std) and inputs.ndim != 4:
        raise DataError(
            f"--mean, --std: expected images (N, C, H, W), got inputs of shape "
            f"{tuple(inputs.shape)}."
        )
    ready = preparation.normalise(inputs) if inputs.ndim == 4 else inputs

    def relabelled(numbers: Tensor) -> Source:
        assert targets is not None
        return replace(source, data=(ready, numbers[targets]), targets=numbers[targets])

    source = Source(
        data=ready if targets is None else (ready, targets),
        dataset=ready,
        classes=classes,
        targets=targets,
        picture=_picture_of(inputs) if is_pixels else None,
        fingerprint=fingerprint_of(ready, *(() if targets is None else (targets,))),
    )
    if targets is None or targets.ndim != 1 or targets.is_floating_point() or not len(targets):
        return source
    in_range = 0 <= int(targets.min()) <= int(targets.max()) < len(classes or ())
    return replace(source, relabel=relabelled) if in_range else source


def from_factory(spec: str, arguments: Mapping[str, Any]) -> Source:
    """What a factory of the user's gives: a Dataset, a DataLoader, or a pair of tensors."""
    found = find_object(spec, "--data")
    is_data = isinstance(found, DataLoader | torch.utils.data.Dataset | tuple)
    if not is_data and callable(found):
        with user_code(spec, "--data"):
            found = found(**arguments)
    elif arguments:
        raise DataError(f"--data-args: expected none for {spec}, which is no function.")
    if isinstance(found, Tensor):
        return Source(found, found, fingerprint=fingerprint_of(found))
    if isinstance(found, tuple | list) and len(found) == 2:
        inputs, targets = found
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            mark = fingerprint_of(inputs, targets)
            return Source((inputs, targets), inputs, targets=targets, fingerprint=mark)
    if isinstance(found, DataLoader):
        shuffles = isinstance(found.sampler, RandomSampler)
        return Source(found, classes=_names(found.dataset), ordered=not shuffles)
    if isinstance(found, torch.utils.data.Dataset) or (
        hasattr(found, "__getitem__") and hasattr(found, "__len__") and not _is_plain(found)
    ):
        by_number = not isinstance(found, torch.utils.data.IterableDataset)
        return Source(found, found if by_number else None, classes=_names(found))
    raise DataError(
        f"--data: expected a Dataset, a DataLoader or a pair of tensors from {spec}, got a "
        f"{type(found).__name__}."
    )


def _text(name: object) -> str:
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name)


def _is_plain(found: object) -> bool:
    return isinstance(found, str | bytes | tuple | list | Mapping | np.ndarray)


def _names(dataset: object) -> tuple[str, ...] | None:
    """The names of the classes where a dataset has them, as torchvision's do."""
    names = getattr(dataset, "classes", None)
    if isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    return None


def _first(
    arrays: Mapping[str, np.ndarray], names: tuple[str, ...], path: Path
) -> np.ndarray | None:
    found = [name for name in names if name in arrays]
    if len(found) > 1:
        raise DataError(f"--data: expected one of {found} in {path}, got {len(found)} of them.")
    return arrays[found[0]] if found else None


def _images(raw: np.ndarray, path: Path) -> Tensor:
    if raw.ndim == 3:
        raw = raw[:, None]
    elif raw.ndim == 4 and raw.shape[1] not in _CHANNELS and raw.shape[3] in _CHANNELS:
        raw = raw.transpose(0, 3, 1, 2)
    if raw.ndim != 4 or raw.shape[1] not in _CHANNELS:
        raise DataError(
            f"--data: expected images of bytes (N, H, W), (N, C, H, W) or (N, H, W, C) with C = 1 "
            f"or 3 in {path}, got shape {raw.shape}."
        )
    return torch.from_numpy(np.ascontiguousarray(raw)).float() / 255


def _numbers(raw: np.ndarray, what: str, path: Path) -> Tensor:
    if raw.dtype.kind == "f":
        return torch.from_numpy(raw.astype(np.float32))
    if raw.dtype.kind in "iub":
        return torch.from_numpy(raw.astype(np.int64))
    raise DataError(f"--data: expected numbers for {what} in {path}, got {raw.dtype}.")


def _picture_of(pixels: Tensor) -> Picture:
    def picture(number: int) -> np.ndarray:
        image = (pixels[number] * 255).round().to(torch.uint8)
        return image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()

    return picture


ENDINGS = (".csv", ".parquet")
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
_SHOWN = 5  # columns that a message names
_Columns = dict[str, list[Any]]


def read_table(path: Path, target: str | None, known: Sequence[str] | None) -> Source:
    """The columns of a table as float32 in their order, but for `target`, which has the targets.

    Targets are class numbers where all are whole, names of classes where they are texts (in sorted
    order), or real numbers.

    Args:
        path: the file.
        target: the name of its column.
        known: the columns that a fit has; then the target may be missing.

    Raises:
        DataError: a column is missing, has other values than numbers, or has none in places.
    """
    columns = _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
    if target is not None and target not in columns and known is None:
        raise DataError(f"--target: expected a column of {path}, got {target!r}. {_among(columns)}")
    given = None if target is None else columns.pop(target, None)
    names = tuple(columns)
    if known is not None and names != tuple(known):
        odd = sorted({*names} ^ {*known})
        raise DataError(
            f"--data: expected the {len(known)} columns of the fit in their order, {_few(known)}, "
            f"got {_few(names)} in {path}"
            + (f" (the difference: {_few(odd)})." if odd else " (another order).")
        )
    _check_present(path, columns if given is None else {**columns, str(target): given})
    numbers = {name: _numbers_columns(values) for name, values in columns.items()}
    texts = [name for name, values in numbers.items() if values is None]
    if texts or not numbers:
        raise DataError(
            f"--data: expected columns of numbers in {path}, got others: {_few(texts) or 'none'}. "
            "Leave them out, or make numbers of them as for the training (a column of 0 and 1 for "
            "each category); --target names the column with the targets."
        )
    inputs = torch.tensor(np.array(list(numbers.values()), np.float32).T.copy())
    targets, classes = (None, None) if given is None else _targets(given)
    source = from_tensors(inputs, targets, Preparation(), classes, is_pixels=False)
    return replace(source, columns=names)


def _read_csv(path: Path) -> _Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=start.count)
            head, *rows = csv.reader(file, delimiter=delimiter)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"--data: expected a CSV file with a line of names, got {path} ({first_line(error)})."
        ) from error
    rows = [row for row in rows if row]
    odd = next((number for number, row in enumerate(rows) if len(row) != len(head)), None)
    if odd is not None:
        raise DataError(
            f"--data: expected {len(head)} values in each row of {path}, got {len(rows[odd])} in "
            f"row {odd + 1}."
        )
    _check_names(path, head, len(rows))
    return {name: [row[k].strip() for row in rows] for k, name in enumerate(head)}


def _read_parquet(path: Path) -> _Columns:
    arrow = pyarrow()
    from pyarrow import parquet

    try:
        known = parquet.read_metadata(path)
        check_unpacked(8 * known.num_rows * known.num_columns, path.stat().st_size)
        table = parquet.read_table(path)
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(
            f"--data: expected a Parquet file, got {path}, which is broken or is none "
            f"({first_line(error).rstrip('.')})."
        ) from error
    _check_names(path, table.column_names, table.num_rows)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _check_names(path: Path, names: Sequence[str], rows: int) -> None:
    bad = [name for name in names if not name.strip() or name.startswith("__index_level_")]
    if bad or len({*names}) < len(names) or not rows:
        what = (
            "rows below the line of names"
            if not rows
            else "a name for each column (of pandas: index=False)"
            if bad
            else "each name of a column once"
        )
        raise DataError(f"--data: expected {what} in {path}, got {_few(names)}.")


def _check_present(path: Path, columns: Mapping[str, list[Any]]) -> None:
    counts = {name: sum(map(_is_missing, values)) for name, values in columns.items()}
    found = [f"{count:,} in {name!r}" for name, count in counts.items() if count]
    if found:
        raise DataError(
            f"--data: expected a value in every cell of {path}, got missing ones: "
            f"{', '.join(found[:_SHOWN])}. Fill them as for the training, or leave the rows out."
        )


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in _MISSING
    return value is None or value != value


def _numbers_columns(values: list[Any]) -> np.ndarray | None:
    """Real numbers, from text as well; None where there is anything else."""
    if any(isinstance(value, bytes) for value in values):
        return None
    try:
        return np.array([float(value) for value in values])
    except (TypeError, ValueError):
        return None


def _targets(values: list[Any]) -> tuple[Tensor, tuple[str, ...] | None]:
    numbers = _numbers_columns(values)
    if numbers is None:
        classes = tuple(sorted({str(value) for value in values}))
        places = {name: k for k, name in enumerate(classes)}
        return torch.tensor([places[str(value)] for value in values]), classes
    is_whole = all(
        isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value))
        for value in values
    )
    return torch.tensor(numbers).to(torch.int64 if is_whole else torch.float32), None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN))


def _among(columns: Mapping[str, Any]) -> str:
    return f"It has {_few(list(columns))}."


_DOWNLOADED = {"mnist": "*-idx3-ubyte*", "cifar10": "*_batch*.bin"}
_IMAGES = ("folder", "npz", *_DOWNLOADED)
# How pictures are prepared, and of which kinds of data.
_APPLIES = {
    "size": ("folder",),
    "crop": ("folder",),
    "gray": ("folder",),
    "mean": _IMAGES,
    "std": _IMAGES,
    "target": ("table",),
}


@dataclass(frozen=True)
class NamedData:
    """Data as they are named on a command line.

    Attributes:
        spec: a folder of pictures, an `.npz` file, a table (`.csv`, `.parquet`), a folder of
            MNIST's idx files or of CIFAR-10's binary batches, or `package.module:factory` or
            `path/to/file.py:factory`.
        part: `"train"` or `"test"`, of MNIST and CIFAR-10; the former by default.
        size, crop, gray, mean, std: as for `Preparation`.
        target: of a table, the column with the targets.
        arguments: keyword arguments of the factory.
    """

    spec: str
    part: str | None = None
    size: tuple[int, int] | None = None
    crop: bool = False
    gray: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    target: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_texts("--data", self.arguments, self.spec, self.part, self.target)
        if self.spec is None:
            raise DataError("--data: expected the name of data, got none.")

    def load(self, columns: Sequence[str] | None = None) -> Source:
        """The data; a folder of pictures is read as it is needed.

        Args:
            columns: that a table must have, those of a fit; then it may be without the target.

        Raises:
            BadValueError, DataError: there are no such data, or an option does not apply to them.
        """
        preparation = Preparation(self.size, self.crop, self.gray, self.mean, self.std)
        path = Path(self.spec)
        kind = self._kind
        self._check_options(kind)
        if kind == "factory":
            return from_factory(self.spec, self.arguments)
        if kind == "npz":
            return read_npz(path, preparation)
        if kind == "table":
            return read_table(path, self.target, columns)
        if kind == "folder":
            return read_folder(path, preparation)
        return read_downloaded(path, kind, self.part or "train", preparation)

    def absolute(self) -> NamedData:
        """The same with whole paths, so that it holds in every folder."""
        is_path = os.path.exists(self.spec) or not is_name(self.spec)
        spec = str(Path(self.spec).absolute()) if is_path else with_full_path(self.spec)
        return replace(self, spec=spec, arguments=dict(self.arguments))

    def prepared_as(self, other: NamedData) -> NamedData:
        """These data, prepared as others are where nothing else is said and where it applies."""
        kind = self._kind
        given = {
            name: getattr(self, name) or getattr(other, name)
            for name, kinds in _APPLIES.items()
            if kind in kinds
        }
        return replace(self, **given)

    @property
    def _kind(self) -> str:
        path = Path(self.spec)
        if os.path.isdir(path):
            for kind, pattern in _DOWNLOADED.items():
                if any(path.glob(pattern)):
                    return kind
            return "folder"
        if path.suffix == ".npz":
            return "npz"
        if path.suffix.lower() in ENDINGS and os.path.exists(path):
            return "table"
        if is_name(self.spec):
            return "factory"
        found = "is a file of another kind" if os.path.exists(path) else "does not exist"
        raise DataError(
            "--data: expected a folder, an .npz file, a table, module:factory or file.py:factory, "
            f"got {self.spec}, which {found}."
        )

    def _check_options(self, kind: str) -> None:
        for name, kinds in {
            **_APPLIES, "part": tuple(_DOWNLOADED), "arguments": ("factory",)
        }.items():  # fmt: skip
            if getattr(self, name) and kind not in kinds:
                option = {"arguments": "data-args"}.get(name, name)
                raise BadValueError(
                    f"--{option}: expected data of the kind {' or '.join(kinds)} with it, got "
                    f"{self.spec} ({kind})."
                )


def check_together(model: nn.Module, source: Source, data: NamedData) -> None:
    """Refuse data without targets, and pictures that the model does not take.

    Raises:
        DataError: there are no targets, or other classes than the model has outputs.
        ModelError: the model does not take the pictures.
    """
    is_folder = isinstance(source.dataset, Pictures)
    if is_folder and source.classes is None:
        raise DataError(
            f"--data: expected pictures in sub-folders, which are their classes, in "
            f"{data.spec}, got no sub-folders: without classes there is nothing to fit."
        )
    if isinstance(source.data, Tensor):
        raise DataError(
            f"--data: expected inputs and targets from {data.spec}, got inputs alone: without "
            "targets there is nothing to fit."
        )
    if source.classes is None:
        return
    own = source.data
    if isinstance(own, DataLoader):  # a batch of it may be large, and workers take time to start
        own = DataLoader(own.dataset, batch_size=1, collate_fn=own.collate_fn)
    raw = next(iter(iterate(own, 1)), None)
    outputs = None if raw is None else _outputs(model, labelled(raw).rows(slice(1)), is_folder)
    if isinstance(outputs, Tensor) and outputs.shape[1:] != (len(source.classes),):
        what, advice = (
            ("a sub-folder", "Empty folders may stand for classes without pictures.")
            if is_folder
            else ("a class name", "Give as many, or none.")
        )
        if outputs.shape[1:] == (1,):
            advice = (
                "Is it a yes/no question? Then give --loss bce, and data without class names, as "
                "arrays or by a factory, with targets 0 and 1. A regression? Then give --loss mse, "
                "and numbers for targets."
            )
        raise DataError(
            f"--data: expected {what} for each output of the model, got {len(source.classes)} in "
            f"{data.spec} for outputs of shape {tuple(outputs.shape[1:])}. {advice}"
        )


def _outputs(model: nn.Module, batch: Batch, is_picture: bool) -> object:
    """What the model gives; None where it fails, which the fit explains."""
    first = next(model.parameters(), None)
    if first is not None:
        batch = batch.to(first.device, first.dtype)
    inputs = batch.inputs
    try:
        with torch.no_grad():
            if isinstance(inputs, dict):
                found = model(**inputs)
            else:
                found = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    except Exception as error:
        if not is_picture:
            return None
        raise ModelError(
            f"--model: expected a model that takes pictures {tuple(leaves(inputs)[0].shape)}, got "
            f"one that does not ({first_line(error)}). --gray makes one channel of them, --size "
            "another size."
        ) from error
    if isinstance(found, Mapping):
        return found.get("logits")
    return getattr(found, "logits", found)
