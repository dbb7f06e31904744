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

from deltabars.cli.sources.source import Source, fingerprint_of
from deltabars.errors import (
    BadValueError,
    DataError,
    DataWarning,
    MissingDependencyError,
    first_line,
    printable,
)
from deltabars.storage.reading import check_unpacked, length_of, open_plain

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_KINDS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")
_LARGEST = 1 << 14  # of a side to resize to
# Bytes of pixels that any file may have: a scanned page has 26 million, in some 50,000 of a file.
# Pillow takes up to five times as much on the way, of WebP ten times.
_ALWAYS = 32 << 20
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV")


@dataclass(frozen=True)
class Preparation:
    """What is done to pictures on their way to a network.

    Attributes:
        size: (height, width) to resize to; None for pictures that have one size.
        crop: with `size`: keep the proportions and cut the middle out, instead of squeezing.
        gray: one channel instead of three.
        mean, std: of each channel: (pixel − mean)/std, with pixels from 0 to 1.
    """

    size: tuple[int, int] | None = None
    crop: bool = False
    gray: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.size is not None and not _is_size(self.size):
            raise BadValueError(
                f"--size: expected whole numbers from 1 on, up to {_LARGEST:,}, got {self.size}."
            )
        for name, values in (("--mean", self.mean), ("--std", self.std)):
            if not all(isinstance(value, int | float) for value in values or ()):
                raise BadValueError(f"{name}: expected numbers, got {values}.")
        if self.crop and self.size is None:
            raise BadValueError("--crop: expected --size with it, got none.")
        if self.std is not None and not all(value > 0 for value in self.std):
            raise BadValueError(f"--std: expected numbers above zero, got {list(self.std)}.")

    def read(self, path: Path) -> np.ndarray:
        """The picture of a file as the network sees it: (H, W) or (H, W, 3), uint8.

        The first frame, without regard to transparency and to the camera's orientation, as
        torchvision reads it.

        Raises:
            DataError: the file is no picture of eight bits a channel, is broken, or is too large.
            MissingDependencyError: Pillow is not installed.
        """
        pillow = _pillow()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pillow.DecompressionBombWarning)
                warnings.filterwarnings("ignore", "Palette images with Transparency")
                # Of these kinds alone: Pillow has others that start a program to be read.
                with open_plain(path) as file, pillow.open(file, formats=_KINDS) as picture:
                    size = picture.width * picture.height * (1 if self.gray else 3)
                    most = _ALWAYS // 2 if picture.format == "WEBP" else _ALWAYS
                    check_unpacked(size, length_of(file), most)
                    if picture.mode not in _EIGHT_BITS:
                        raise DataError(
                            f"--data: expected pictures of eight bits a channel, got {path} of "
                            f"mode {picture.mode}. Convert it."
                        )
                    own = self._resized(picture.convert("L" if self.gray else "RGB"))
                    pixels = np.asarray(own)
                    del own
            return pixels.copy()  # one that may be written to; Pillow has let go of its own
        except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            raise DataError(
                f"--data: expected pictures of at most {pillow.MAX_IMAGE_PIXELS:,} pixels, got "
                f"more in {path}. Make it smaller."
            ) from error
        except DataError:
            raise
        except Exception as error:  # whatever Pillow makes of bytes that are no picture
            raise DataError(
                f"--data: expected a picture that can be read, got {path}, which is broken or is "
                f"none ({first_line(error)})."
            ) from error

    def _resized(self, picture: Any) -> Any:
        from PIL import Image, ImageOps

        if self.size is None:
            return picture
        place = (self.size[1], self.size[0])
        if self.crop:
            return ImageOps.fit(picture, place, Image.Resampling.BILINEAR)
        return picture.resize(place, Image.Resampling.BILINEAR)

    def tensor(self, picture: np.ndarray) -> Tensor:
        """A picture (H, W) or (H, W, 3) as a float32 tensor (1 or 3, H, W), normalised."""
        channels = torch.from_numpy(np.atleast_3d(picture)).permute(2, 0, 1)
        return self.normalise(channels.float().div_(255))

    def normalise(self, pixels: Tensor) -> Tensor:
        """(pixels − mean)/std of images (…, channels, H, W)."""
        for name, values in (("--mean", self.mean), ("--std", self.std)):
            if values is None:
                continue
            channels = pixels.shape[-3]
            if len(values) not in (1, channels):
                raise BadValueError(
                    f"{name}: expected one number, or one for each of {channels} channels, got "
                    f"{len(values)}."
                )
            each = torch.tensor(values, dtype=pixels.dtype)[:, None, None]
            pixels = pixels - each if name == "--mean" else pixels / each
        return pixels


def _is_size(size: Any) -> bool:
    return len(size) == 2 and all(isinstance(n, int) and 1 <= n <= _LARGEST for n in size)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(
            "Folders of pictures need Pillow: pip install 'deltabars[images]'."
        ) from error
    return Image


_BATCH_BYTES = 1 << 26
_LARGEST_BATCH = 1024


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
        """One picture, read from its file."""
        path = self.files[number]
        image = self.preparation.tensor(self.preparation.read(path))
        if tuple(image.shape) != self.shape:
            raise DataError(
                f"--data: expected pictures of one size, got {_size(self.shape)} first and "
                f"{_size(tuple(image.shape))} in {path}. Resize them with --size."
            )
        return image if self.labels is None else (image, self.labels[number])


def read_folder(folder: Path, preparation: Preparation) -> Source:
    """Pictures in sub-folders, which are the classes in sorted order, or in the folder itself.

    Sub-folders of a class count as parts of it. Links to files and classes that are links are
    followed; links to folders below are not. Hidden files are left out, and so are, with a
    warning that counts them, files that are no pictures by their names.

    Raises:
        DataError: there are no pictures, some are beside sub-folders, or the first is broken.
    """
    entries = _visible(folder)
    folders = sorted(entry.name for entry in entries if _is_folder(entry))
    classes = tuple(_printable(Path(name)) for name in folders)
    left_out: list[str] = []
    loose = _pictures([entry for entry in entries if not _is_folder(entry)], left_out)
    files: list[Path] = loose
    labels: Tensor | None = None
    if classes:
        if loose:
            raise DataError(
                f"--data: expected pictures in sub-folders (the classes) of {folder}, or beside "
                f"one another and no sub-folders, got both: {loose[0].name} beside {classes[0]}/."
            )
        inside = [sorted(_inside(folder / name, left_out)) for name in folders]
        files = [path for paths in inside for path in paths]
        counts = [len(paths) for paths in inside]
        labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor(counts))
        empty = [name for name, count in zip(classes, counts, strict=True) if not count]
        if files and empty:
            _warn(f"--data: {len(empty)} of {len(classes)} classes have no picture: {empty[0]}/.")
    if not files:
        raise DataError(
            f"--data: expected pictures ({', '.join(ENDINGS)}) in {folder} or in its sub-folders, "
            "got none."
        )
    if left_out:
        _warn(f"--data: {len(left_out)} files in {folder} were left out, such as {left_out[0]}.")
    shape = tuple(preparation.tensor(preparation.read(files[0])).shape)
    dataset = Pictures(files, labels, preparation, shape)
    numbers = 4 * shape[0] * shape[1] * shape[2]
    size = max(1, min(_LARGEST_BATCH, _BATCH_BYTES // numbers))

    def relabelled(numbers: Tensor) -> Source:
        assert labels is not None
        other = replace(dataset, labels=numbers[labels])
        loader = DataLoader(other, batch_size=size)
        return replace(source, data=loader, dataset=other, targets=other.labels)

    source = Source(
        data=DataLoader(dataset, batch_size=size),
        dataset=dataset,
        classes=classes or None,
        names=tuple(_printable(path.relative_to(folder)) for path in files),
        targets=labels,
        picture=lambda number: preparation.read(files[number]),
        fingerprint=_fingerprint(folder, files, preparation),
        relabel=relabelled,
    )
    return source


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"--data: expected a folder that can be read, got {folder}: {error.strerror}."
        ) from error
    return sorted(found, key=lambda entry: entry.name)


def _inside(folder: Path, left_out: list[str]) -> list[Path]:
    """The pictures in a class's folder and in the folders in it."""
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        entries = _visible(waiting.pop())
        found += _pictures([entry for entry in entries if not _is_folder(entry)], left_out)
        for entry in entries:
            if not _is_folder(entry):
                continue
            if entry.is_symlink():
                left_out.append(f"{_printable(Path(entry.path))} (a link to a folder)")
            else:
                waiting.append(Path(entry.path))
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _pictures(entries: list[os.DirEntry[str]], left_out: list[str]) -> list[Path]:
    found = []
    for entry in entries:
        if _is_file(entry) and entry.name.lower().endswith(ENDINGS):
            found.append(Path(entry.path))
        else:
            left_out.append(_printable(Path(entry.path)))
    return found


def _fingerprint(folder: Path, files: Sequence[Path], preparation: Preparation) -> str:
    """Of names, lengths and times of the files, which are not read for it."""
    try:
        states = [(path, path.stat()) for path in files]
    except OSError as error:
        raise DataError(
            f"--data: expected files that stay in {folder} while they are read, got "
            f"{error.strerror} of {error.filename}."
        ) from error
    return fingerprint_of(
        repr(preparation),
        *(
            os.fsencode(path.relative_to(folder)) + f":{s.st_size}:{s.st_mtime_ns}".encode()
            for path, s in states
        ),
    )


def _printable(path: Path) -> str:
    """A name that can be shown and written as UTF-8, whatever bytes are in it."""
    text = os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")
    return printable(text)


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}×{shape[2]}"


def _warn(message: str) -> None:
    warnings.warn(message, DataWarning, stacklevel=3)
