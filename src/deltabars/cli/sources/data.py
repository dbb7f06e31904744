"""Data as they are named on a command line: files, folders, and what a user's factory gives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from deltabars.cli.sources import models
from deltabars.cli.sources.folders import Pictures, Preparation, read_folder
from deltabars.cli.sources.source import Source, fingerprint_of
from deltabars.errors import BadValueError, DataError, ModelError, first_line, library
from deltabars.recipes.images import read_cifar10, read_mnist
from deltabars.recipes.paper import CIFAR10, MNIST
from deltabars.storage.reading import read_arrays

_INPUTS = ("inputs", "images", "x")
_TARGETS = ("targets", "labels", "y")
_CHANNELS = (1, 3)
_TABLES = (".csv", ".parquet")
_SHOWN = 5  # columns that a message names
_DOWNLOADED = {"mnist": "*-idx3-ubyte*", "cifar10": "*_batch*.bin"}
_IMAGES = ("folder", "npz", *_DOWNLOADED)
# How data are prepared, and of which kinds they are then.
_APPLIES = {
    "size": ("folder",), "crop": ("folder",), "gray": ("folder",), "mean": _IMAGES, "std": _IMAGES,
    "target": ("table",),
}  # fmt: skip
_OPTIONS = {**_APPLIES, "part": tuple(_DOWNLOADED), "arguments": ("factory",)}


@dataclass(frozen=True)
class NamedData:
    """Data as they are named on a command line.

    The spec is a folder of pictures, of MNIST's idx files or of CIFAR-10's binary batches, an
    `.npz` file, a table, `package.module:factory` or `path/to/file.py:factory`.
    """

    spec: str
    part: str | None = None  # "train" or "test", of MNIST and CIFAR-10; the former by default
    size: tuple[int, int] | None = None  # this and the next four as for `Preparation`
    crop: bool = False
    gray: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    target: str | None = None  # of a table, the column with the targets
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the factory, by keyword

    def __post_init__(self) -> None:
        models.check_texts("--data", self.arguments, self.spec, self.part, self.target)
        if self.spec is None:
            raise DataError("--data: expected the name of data, got none.")

    def load(self, columns: Sequence[str] | None = None) -> Source:
        """Return the data; a table must have the `columns` of a fit, if they are given."""
        path, kind = Path(self.spec), self._kind
        for name, kinds in _OPTIONS.items():
            if getattr(self, name) and kind not in kinds:
                raise BadValueError(
                    f"--{'data-args' if name == 'arguments' else name}: expected data of the kind "
                    f"{' or '.join(kinds)} with it, got {self.spec} ({kind})."
                )
        preparation = Preparation(self.size, self.crop, self.gray, self.mean, self.std)
        match kind:
            case "factory":
                return _from_factory(self.spec, self.arguments)
            case "npz":
                return _read_npz(path, preparation)
            case "table":
                return _read_table(path, self.target, columns)
            case "folder":
                return read_folder(path, preparation)
        recipe, read = {"mnist": (MNIST, read_mnist), "cifar10": (CIFAR10, read_cifar10)}[kind]
        images, labels = read(path, self.part or "train")
        return _from_tensors(images, labels, preparation, recipe.class_names, is_pixels=True)

    def absolute(self) -> NamedData:
        """Return the same with whole paths, so that it holds in every folder."""
        is_path = os.path.exists(self.spec) or not models.is_name(self.spec)
        spec = str(Path(self.spec).absolute()) if is_path else models.with_full_path(self.spec)
        return replace(self, spec=spec)

    def prepared_as(self, other: NamedData) -> NamedData:
        """Return these data, prepared as others are where nothing else is said."""
        names = [name for name, kinds in _APPLIES.items() if self._kind in kinds]
        given: Any = {name: getattr(self, name) or getattr(other, name) for name in names}
        return replace(self, **given)

    @property
    def _kind(self) -> str:
        path = Path(self.spec)
        exists = os.path.exists(path)
        if os.path.isdir(path):
            found = (kind for kind, pattern in _DOWNLOADED.items() if any(path.glob(pattern)))
            return next(found, "folder")
        if path.suffix == ".npz":
            return "npz"
        if exists and path.suffix.lower() in _TABLES:
            return "table"
        if models.is_name(self.spec):
            return "factory"
        what = "is a file of another kind" if exists else "does not exist"
        raise DataError(
            "--data: expected a folder, an .npz file, a table, module:factory or file.py:factory, "
            f"got {self.spec}, which {what}."
        )


def _read_npz(path: Path, preparation: Preparation) -> Source:
    """Return the arrays `inputs` (or `images`, `x`) and, if any, `targets` (or `labels`, `y`).

    Bytes are images, scaled to 0 … 1. `classes` may name the classes.
    """
    arrays = read_arrays(path, "--data")
    given, known = ([name for name in names if name in arrays] for names in (_INPUTS, _TARGETS))
    if len(given) != 1 or len(known) > 1:
        raise DataError(
            "--data: expected one array 'inputs', 'images' or 'x', and at most one 'targets', "
            f"'labels' or 'y' in {path}, got {', '.join(sorted(arrays)) or 'none'}."
        )
    raw = arrays[given[0]]
    is_pixels = raw.dtype == np.uint8
    inputs = _images(raw, path) if is_pixels else _numbers(raw, path)
    targets = _numbers(arrays[known[0]], path) if known else None
    if targets is not None and targets.shape[:1] != inputs.shape[:1]:
        raise DataError(
            f"--data: expected one target for each of {len(inputs)} inputs in {path}, got "
            f"{tuple(targets.shape)}."
        )
    names = np.ravel(arrays.get("classes", ()))
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "backslashreplace")
    classes = tuple(map(str, names.tolist())) or None
    return _from_tensors(inputs, targets, preparation, classes, is_pixels=is_pixels)


def _images(raw: np.ndarray, path: Path) -> Tensor:
    raw = raw[:, None] if raw.ndim == 3 else raw
    if raw.ndim == 4 and raw.shape[1] not in _CHANNELS:
        raw = raw.transpose(0, 3, 1, 2)
    if raw.ndim != 4 or raw.shape[1] not in _CHANNELS:
        raise DataError(
            "--data: expected images of bytes (N, H, W), (N, C, H, W) or (N, H, W, C), C = 1 or 3, "
            f"in {path}, got {raw.shape}."
        )
    return torch.from_numpy(np.ascontiguousarray(raw)).float() / 255


def _numbers(raw: np.ndarray, path: Path) -> Tensor:
    if raw.dtype.kind not in "fiub":
        raise DataError(f"--data: expected arrays of numbers in {path}, got {raw.dtype}.")
    return torch.from_numpy(raw.astype(np.float32 if raw.dtype.kind == "f" else np.int64))


def _from_tensors(
    inputs: Tensor,
    targets: Tensor | None,
    preparation: Preparation,
    classes: tuple[str, ...] | None,
    *,
    is_pixels: bool,
) -> Source:
    """Return tensors as a Source; those that are pixels from 0 to 1 have pictures."""
    if (preparation.mean or preparation.std) and inputs.ndim != 4:
        shape = tuple(inputs.shape)
        raise DataError(f"--mean, --std: expected images (N, C, H, W), got shape {shape}.")
    ready = preparation.normalise(inputs) if inputs.ndim == 4 else inputs

    def picture(number: int) -> np.ndarray:
        image = (inputs[number] * 255).round().to(torch.uint8)
        return image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()

    found = None if targets is None or targets.is_floating_point() else targets.flatten().tolist()
    are_classes = found is not None and {*found} <= {*range(len(classes or ()))}
    return Source(
        data=ready if targets is None else (ready, targets),
        dataset=ready,
        classes=classes,
        targets=targets,
        picture=picture if is_pixels else None,
        fingerprint=fingerprint_of(ready, *(() if targets is None else (targets,))),
        relabelled=(lambda numbers: (ready, numbers)) if are_classes else None,
    )


def _read_table(path: Path, target: str | None, known: Sequence[str] | None) -> Source:
    """Return the columns of a table as float32, and those of `target` as numbers or classes.

    Where the columns of a fit are `known`, the target may be missing.
    """
    frame = _read_frame(path)
    names = [str(name) for name in frame.columns]
    if target is not None and target not in names and known is None:
        said = f"--target: expected a column of {path}, got {target!r}. It has {_few(names)}."
        raise DataError(said)
    given = frame.pop(target) if target in names else None
    columns = tuple(name for name in names if name != target)
    if known is not None and columns != tuple(known):
        odd = _few(sorted({*columns} ^ {*known}))
        raise DataError(
            f"--data: expected the {len(known)} columns of the fit in their order, {_few(known)}, "
            f"got {path} ({f'the difference: {odd}' if odd else 'another order'})."
        )
    others = [name for name in columns if frame[name].dtype.kind not in "fiub"]
    if others or not columns:
        raise DataError(
            f"--data: expected columns of numbers in {path}, got others: {_few(others) or 'none'}. "
            "Leave them out, or make numbers of them; --target names the column with the targets."
        )
    targets, classes = None, None
    if given is not None and given.dtype.kind in "fiub":
        targets = _numbers(given.to_numpy(), path)
    elif given is not None:
        texts, numbers = np.unique(given.astype(str).str.strip(), return_inverse=True)
        targets, classes = torch.from_numpy(numbers).long(), tuple(texts.tolist())
    inputs = torch.from_numpy(frame.to_numpy(np.float32, copy=True))
    source = _from_tensors(inputs, targets, Preparation(), classes, is_pixels=False)
    return replace(source, columns=columns)


def _read_frame(path: Path) -> Any:
    """Return a table whose columns have names and whose cells have values."""
    pandas, is_csv = library("pandas", "pandas"), path.suffix.lower() == ".csv"
    if not is_csv:
        library("pyarrow", "parquet")
    try:
        if is_csv:
            with path.open(encoding="utf-8-sig") as file:
                delimiter = max(",;\t", key=file.readline().count)
            options = {"sep": delimiter, "skipinitialspace": True, "low_memory": False}
            with warnings.catch_warnings():
                # Of rows that are longer than the line of names.
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                frame = pandas.read_csv(path, index_col=False, **options)
        else:
            frame = pandas.read_parquet(path)
    except Exception as error:  # whatever the libraries make of bytes that are not theirs
        raise DataError(
            f"--data: expected a table, got {path}, which is broken or is none "
            f"({first_line(error).rstrip('.')})."
        ) from error
    names = [str(name) for name in frame.columns]
    if not len(frame) or any(not name.strip() or name.startswith("Unnamed: ") for name in names):
        what = "a name for each column (of pandas: index=False)" if len(frame) else "rows"
        raise DataError(f"--data: expected {what} in {path}, got columns {_few(names)}.")
    missing = [f"{n:,} in {name!r}" for name, n in frame.isna().sum().items() if n]
    if missing:
        raise DataError(
            f"--data: expected a value in every cell of {path}, got missing ones: {_few(missing)}. "
            "Fill them as for the training, or leave the rows out."
        )
    return frame


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _from_factory(spec: str, arguments: Mapping[str, Any]) -> Source:
    """Return what a factory of the user's gives: a Dataset, a DataLoader, or a pair of tensors."""
    found = models.find_object(spec, "--data")
    if callable(found) and not isinstance(found, DataLoader | Dataset):
        with models.user_code(spec, "--data"):
            found = found(**arguments)
    elif arguments:
        raise DataError(f"--data-args: expected none for {spec}, which is no function.")
    parts = tuple(found) if isinstance(found, tuple | list) and len(found) == 2 else (found,)
    if all(isinstance(part, Tensor) for part in parts):
        data, targets = (parts, parts[1]) if len(parts) == 2 else (found, None)
        return Source(data, parts[0], targets=targets, fingerprint=fingerprint_of(*parts))
    if isinstance(found, DataLoader):
        shuffles = isinstance(found.sampler, RandomSampler)
        return Source(found, classes=_class_names(found.dataset), ordered=not shuffles)
    is_plain = isinstance(found, str | bytes | tuple | list | Mapping | np.ndarray)
    has_rows = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    if not isinstance(found, Dataset) and (is_plain or not has_rows):
        raise DataError(
            f"--data: expected a Dataset, a DataLoader or a pair of tensors from {spec}, got a "
            f"{type(found).__name__}."
        )
    is_stream = isinstance(found, IterableDataset)
    return Source(found, None if is_stream else found, classes=_class_names(found))


def _class_names(dataset: object) -> tuple[str, ...] | None:
    """Return the names of the classes where a dataset has them, as torchvision's do."""
    names = getattr(dataset, "classes", None) or [None]
    are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    return tuple(names) if are_names else None


def check_together(model: nn.Module, source: Source, data: NamedData) -> None:
    """Refuse data without targets, and a first picture or classes that do not fit the model."""
    is_folder = isinstance(source.dataset, Pictures)
    if isinstance(source.data, Tensor) or (is_folder and source.classes is None):
        got = "no sub-folders, which are the classes" if is_folder else "inputs alone"
        raise DataError(f"--data: expected inputs and targets from {data.spec}, got {got}.")
    if source.classes is None:
        return
    rows = source.data.dataset if isinstance(source.data, DataLoader) else source.dataset
    try:
        first = rows[0][0] if isinstance(rows[0], tuple | list) else rows[0]
        weight = next(model.parameters(), first)
        kind = weight.dtype if first.is_floating_point() else first.dtype
        with torch.no_grad():
            outputs = model(first[None].to(weight.device, kind))
    except Exception as error:
        if not is_folder:
            return  # the fit explains it
        raise ModelError(
            f"--model: expected a model that takes pictures {(1, *first.shape)}, got one that "
            f"does not ({first_line(error)}). Give --gray, or --size."
        ) from error
    shape = getattr(getattr(outputs, "logits", outputs), "shape", None)
    if shape is not None and shape[1:] != (len(source.classes),):
        raise DataError(
            "--data: expected a class name for each output of the model, got "
            f"{len(source.classes)} in {data.spec} for outputs of shape {tuple(shape[1:])}. Empty "
            "folders may stand for classes without pictures; --loss bce and mse take numbers."
        )
