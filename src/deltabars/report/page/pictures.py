"""Pictures inside a page: PNG files in data addresses.

The few lines of PNG are ours, so that a page needs no imaging library and its bytes depend on none.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from deltabars.errors import BadValueError

Pictures = Callable[[int], Any]
_PIXELS = 4_000_000  # in all pictures of a page together
_SMALLEST, _LARGEST = 48, 160  # the longest side of a picture that has to shrink


def longest_side(count: int) -> int:
    """The longest side of a picture, so that `count` of them keep the page small."""
    return int(min(_LARGEST, max(_SMALLEST, (_PIXELS / max(count, 1)) ** 0.5)))


def drawn(images: Tensor, side: int) -> list[str]:
    """Images (n, 1|3, H, W) or (n, H, W) as data addresses.

    Bytes stay as they are. Floating pixels, which are mostly normalised, are scaled to 0 … 255 by
    the range of their own image.
    """
    images = images.detach().cpu()
    stack = images[:, None] if images.ndim == 3 else images
    return [_address(_scaled(image).movedim(0, -1), side) for image in stack]


def given(pictures: Pictures, places: Sequence[int], side: int) -> list[str]:
    """Pictures that a function gives, (H, W) or (H, W, 3) bytes each, as data addresses."""
    return [_address(_checked(pictures(place), place), side) for place in places]


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of bytes (H, W, 1) or (H, W, 3), without loss.

    Rows are stored as differences from the pixel at the left, or from the row above: whichever is
    smaller in sum, as the format's authors advise.
    """
    height, width, channels = pixels.shape
    left = pixels.copy()
    left[:, 1:] -= pixels[:, :-1]  # bytes wrap around, as they should
    above = pixels.copy()
    above[1:] -= pixels[:-1]
    lines = bytearray()
    for kind, rows in _smaller((1, left), (2, above), height):
        lines += bytes([kind]) + rows.tobytes()
    colour = {1: 0, 3: 2}[channels]
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(bytes(lines), 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _smaller(
    one: tuple[int, np.ndarray], other: tuple[int, np.ndarray], height: int
) -> list[tuple[int, np.ndarray]]:
    costs = [
        np.abs(rows.view(np.int8).astype(np.int16)).reshape(height, -1).sum(1)
        for _, rows in (one, other)
    ]
    return [
        (kind, rows[i])
        for i in range(height)
        for kind, rows in [one if costs[0][i] <= costs[1][i] else other]
    ]


def _chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def _address(pixels: Tensor, side: int) -> str:
    file = png(np.ascontiguousarray(_shrunk(pixels, side).numpy()))
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _shrunk(pixels: Tensor, side: int) -> Tensor:
    """Bytes (H, W, c), averaged down until the longest side is `side`."""
    height, width = pixels.shape[:2]
    if max(height, width) <= side:
        return pixels
    scale = side / max(height, width)
    size = max(1, round(scale * height)), max(1, round(scale * width))
    small = adaptive_avg_pool2d(pixels.movedim(-1, 0).float(), size)
    return small.round().to(torch.uint8).movedim(0, -1)


def _scaled(image: Tensor) -> Tensor:
    if image.dtype == torch.uint8:
        return image
    low, high = float(image.min()), float(image.max())
    scale = 255 / (high - low) if high > low else 0.0
    return ((image.float() - low) * scale).round().to(torch.uint8)


def _checked(picture: Any, place: int) -> Tensor:
    array = np.asarray(picture)
    flat = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
    if array.dtype != np.uint8 or not flat or 0 in array.shape:
        raise BadValueError(
            f"pictures: expected an array (H, W) or (H, W, 3) of uint8 for input {place}, got "
            f"{array.dtype} {array.shape}."
        )
    return torch.from_numpy(np.ascontiguousarray(array if array.ndim == 3 else array[..., None]))
