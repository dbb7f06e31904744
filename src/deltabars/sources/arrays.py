"""Data in memory: .npz files, MNIST's and CIFAR-10's files, and what a user's factory gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from deltabars.archives import read_arrays
from deltabars.errors import DataError
from deltabars.recipes.images import read_cifar10, read_mnist
from deltabars.recipes.paper import CIFAR10, MNIST
from deltabars.sources.names import find_object, user_code
from deltabars.sources.pictures import Preparation
from deltabars.sources.source import Picture, Source, fingerprint_of

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
