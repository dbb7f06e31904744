"""Picture files as tensors: how they are read, resized and normalised."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import BadValueError, DataError, MissingDependencyError, first_line
from deltabars.reading import check_unpacked, length_of, open_plain

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
