"""Picture files as tensors: how they are read, resized and normalised."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from deltabars import errors
from deltabars.cli.sources.source import Source, fingerprint_of
from deltabars.errors import BadValueError, DataError, first_line, library, printable
from deltabars.storage.reading import check_unpacked, length_of, open_plain

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_KINDS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")
_LARGEST = 1 << 14  # of a side to resize to
# Bytes of pixels that any file may have: a scanned page has 26 million, in some 50,000 of a file.
# Pillow takes up to five times as much on the way, of WebP ten times.
_ALWAYS = 32 << 20
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV")
_BATCH_BYTES, _LARGEST_BATCH = 1 << 26, 1024


@dataclass(frozen=True)
class Preparation:
    """What is done to pictures on their way to a network."""

    size: tuple[int, int] | None = None  # (height, width) to resize to
    crop: bool = False  # with `size`: cut the middle out in proportion, instead of squeezing
    gray: bool = False  # one channel instead of three
    mean: tuple[float, ...] | None = None  # of each channel: (pixel − mean)/std, from 0 to 1
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        size = (1, 1) if self.size is None else self.size
        is_size = len(size) == 2 and all(isinstance(n, int) and 1 <= n <= _LARGEST for n in size)
        std, numbers = self.std or (1,), (*(self.mean or ()), *(self.std or ()))
        are_numbers = all(isinstance(number, int | float) for number in numbers)
        for is_right, option, wanted, got in (
            (is_size, "--size", f"whole numbers from 1 on, up to {_LARGEST:,}", size),
            (self.size or not self.crop, "--crop", "--size with it", "none"),
            (are_numbers, "--mean, --std", "numbers", numbers),
            (are_numbers and min(std) > 0, "--std", "numbers above zero", std),
        ):
            if not is_right:
                raise BadValueError(f"{option}: expected {wanted}, got {got}.")

    def read(self, path: Path) -> np.ndarray:
        """Return the first frame of a file as torchvision reads it: (H, W) or (H, W, 3), uint8."""
        Image = library("PIL.Image", "images")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                warnings.filterwarnings("ignore", "Palette images with Transparency")
                # Of these kinds alone: Pillow has others that start a program to be read.
                with open_plain(path) as file, Image.open(file, formats=_KINDS) as picture:
                    size = picture.width * picture.height * (1 if self.gray else 3)
                    most = _ALWAYS // 2 if picture.format == "WEBP" else _ALWAYS
                    check_unpacked(size, length_of(file), most)
                    if picture.mode not in _EIGHT_BITS:
                        raise ValueError(f"its mode is {picture.mode}: convert it")
                    own, fit = picture.convert("L" if self.gray else "RGB"), Image.Image.resize
                    if self.crop:
                        fit = library("PIL.ImageOps", "images").fit
                    if self.size is not None:
                        own = fit(own, self.size[::-1], Image.Resampling.BILINEAR)
                    return np.array(own)  # a copy, so that Pillow lets go of its own
        except Exception as error:  # whatever Pillow makes of bytes that are no picture
            said = f"--data: expected a picture of eight bits a channel, got {path}, which is"
            raise DataError(f"{said} broken or is none ({first_line(error)}).") from error

    def tensor(self, picture: np.ndarray) -> Tensor:
        """Return a picture (H, W) or (H, W, 3) as float32 (1 or 3, H, W), normalised."""
        channels = torch.from_numpy(np.atleast_3d(picture)).permute(2, 0, 1)
        return self.normalise(channels.float().div_(255))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return (pixels − mean)/std of images (…, channels, H, W)."""
        mean, std = self.mean or (0.0,), self.std or (1.0,)
        for name, values in (("--mean", mean), ("--std", std)):
            if len(values) not in (1, pixels.shape[-3]):
                raise BadValueError(
                    f"{name}: expected one number, or one for each of {pixels.shape[-3]} channels, "
                    f"got {len(values)}."
                )
        each = [pixels.new_tensor(values)[:, None, None] for values in (mean, std)]
        return (pixels - each[0]) / each[1]


@dataclass(frozen=True, eq=False)
class Pictures(Dataset[Any]):
    """Pictures of one size: items are tensors, or pairs of a tensor and a class number."""

    files: Sequence[Path]
    labels: Tensor | None
    preparation: Preparation
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Any:
        """Return one picture, read from its file."""
        path = self.files[number]
        image = self.preparation.tensor(self.preparation.read(path))
        if tuple(image.shape) != self.shape:
            first, other = (f"{h}×{w}" for _, h, w in (self.shape, image.shape))
            raise DataError(
                f"--data: expected pictures of one size, got {first} first and {other} in {path}. "
                "Resize them with --size."
            )
        return image if self.labels is None else (image, self.labels[number])


def read_folder(folder: Path, preparation: Preparation) -> Source:
    """Read pictures in sub-folders, which are the classes in sorted order, or in the folder itself.

    Sub-folders of a class are parts of it; links to folders in them are not followed. Hidden files
    are left out, and so are, with a warning, files that are no pictures by their names.
    """
    left_out: list[str] = []
    files, folders = _listed(folder, left_out)
    classes = tuple(_shown(Path(each.name)) for each in folders)
    labels: Tensor | None = None
    if files and classes:
        raise DataError(
            f"--data: expected pictures in {folder} or in sub-folders (the classes), got both: "
            f"{files[0].name} beside {classes[0]}/."
        )
    if classes:
        inside = [_all_below(each, left_out) for each in folders]
        files = [path for paths in inside for path in paths]
        labels = torch.tensor([k for k, paths in enumerate(inside) for _ in paths])
        empty = [name for name, paths in zip(classes, inside, strict=True) if not paths]
        if files and empty:
            _warn(f"{len(empty)} of {len(classes)} classes have no picture: {empty[0]}/.")
    if not files:
        said = f"--data: expected pictures ({', '.join(ENDINGS)}) in {folder} or its sub-folders"
        raise DataError(f"{said}, got none.")
    if left_out:
        _warn(f"{len(left_out)} files in {folder} were left out, such as {left_out[0]}.")
    first = preparation.tensor(preparation.read(files[0]))
    size = max(1, min(_LARGEST_BATCH, _BATCH_BYTES // (4 * first.numel())))
    dataset = Pictures(files, labels, preparation, tuple(first.shape))
    # The files are not read for their digest.
    states = [(os.fsencode(path.relative_to(folder)), path.stat()) for path in files]
    marks = [name + f":{at.st_size}:{at.st_mtime_ns}".encode() for name, at in states]
    return Source(
        data=DataLoader(dataset, batch_size=size),
        dataset=dataset,
        classes=classes or None,
        names=tuple(_shown(path.relative_to(folder)) for path in files),
        targets=labels,
        picture=lambda index: preparation.read(files[index]),
        fingerprint=fingerprint_of(repr(preparation), *marks),
        relabelled=lambda targets: DataLoader(replace(dataset, labels=targets), batch_size=size),
    )


def _warn(text: str) -> None:
    errors.warn(f"--data: {text}", errors.DataWarning)


def _listed(folder: Path, left_out: list[str]) -> tuple[list[Path], list[Path]]:
    """Return the pictures and the folders in a folder; what is neither goes to `left_out`."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        raise DataError(f"--data: expected a folder that can be read, got {why}.") from error
    named = (path for path in paths if path.name.lower().endswith(ENDINGS))
    pictures = {path: None for path in named if os.path.isfile(path)}
    others = [path for path in paths if path not in pictures]
    left_out += [_shown(path) for path in others if not os.path.isdir(path)]
    return list(pictures), [path for path in others if os.path.isdir(path)]


def _all_below(folder: Path, left_out: list[str]) -> list[Path]:
    """Return the pictures of a class: in its folder and in the folders below."""
    pictures, folders = _listed(folder, left_out)
    for each in folders:
        if each.is_symlink():
            left_out.append(f"{_shown(each)} (a link to a folder)")
        else:
            pictures += _all_below(each, left_out)
    return sorted(pictures)


def _shown(path: Path) -> str:
    """Return a name that can be shown and written as UTF-8, whatever bytes are in it."""
    return printable(os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace"))
