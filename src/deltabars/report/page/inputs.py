"""The inputs of a page, told apart from their targets, and read by their places."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d
from torch.utils.data import DataLoader, IterableDataset, Subset

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, DataError
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.prediction import Prediction
from deltabars.problem.batches import (
    Batch,
    as_tensors,
    collated,
    is_fixed,
    iterate,
    label_key,
    labelled,
    unlabelled,
)
from deltabars.problem.inputs import Signature, leaves, map_leaves
from deltabars.runtime.progress import Progress

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


_CHUNK = 128  # inputs read at a time
_STEPS = 10
_AGREE = 1e-3  # of a score: float32 in chunks of another size differs by less


@dataclass(frozen=True)
class Settling:
    """The scores of n inputs at R ranks, with the ends of their intervals."""

    ranks: list[int]
    score: Tensor  # (n, R)
    low: Tensor  # (n, R)
    high: Tensor  # (n, R)


def choose_ranks(ranks: Sequence[int] | None, most: int) -> list[int]:
    """The K's to show: those given, ascending, or about ten up to `most`, denser at its start."""
    if ranks is None:
        return sorted({round(float(k)) for k in np.geomspace(1, most, _STEPS)})
    for k in ranks:
        if not is_whole(k) or not 1 <= k <= most:
            raise BadValueError(
                f"ranks: expected whole numbers from 1 to the {most} fitted pairs, got {k!r}."
            )
    return sorted({int(k) for k in ranks})


def silent(fit: DeltaFit) -> DeltaFit:
    """The same fit, which shows no bars of its own."""
    quiet = fit.with_progress(False)
    kept: dict[str, Any] = {
        name: fit.__dict__[name] for name in ("pullback", "overlap") if name in fit.__dict__
    }
    quiet.__dict__.update(kept)
    return quiet


def settle(
    fit: DeltaFit,
    source: Source,
    prediction: Prediction,
    asked: Mapping[str, Any],
    places: Sequence[int],
    ranks: Sequence[int],
    pictures: Pictures | None,
    progress: bool,
) -> tuple[Settling, list[str]]:
    """Scores of some inputs at several ranks, and their pictures (an empty list if there are none).

    Inputs are read once, in chunks. `asked` are the arguments that the prediction was made with.
    Cost: a prediction of these inputs for each rank.

    Raises:
        BadValueError: the scores with all pairs are not those of `prediction`.
    """
    quiet = silent(fit)
    how = {**asked, "classes": _asked_classes(prediction), "moderation": None}
    last = how.pop("rank", fit.rank)
    scores: list[Tensor] = []
    images: list[str] = []
    side = longest_side(len(places))
    with Progress("Report", len(places), "input", progress) as bar:
        for start in range(0, len(places), _CHUNK):
            chosen = list(places[start : start + _CHUNK])
            batch = source.read(chosen)
            at_ranks = []
            for k in ranks:
                found = quiet.predict(batch.inputs, rank=k, **how)
                at_ranks.append(torch.stack([found.score, found.score_low, found.score_high]))
            if at_ranks:
                scores.append(torch.stack(at_ranks, -1).cpu())  # (3, chunk, R)
            seen = image_of(batch)
            if pictures is not None:
                images += given(pictures, chosen, side)
            elif seen is not None:
                images += drawn(seen, side)
            bar.show(start + len(chosen))
    whole = torch.cat(scores, 1) if scores else torch.empty(3, len(places), 0)
    if last in ranks:
        _check_agreement(whole[0, :, -1], prediction.score[torch.as_tensor(places)])
    return Settling(list(ranks), *whole), images


def _asked_classes(prediction: Prediction) -> Any:
    """What `classes=` the prediction was made with."""
    chosen = prediction.classes
    if chosen is None:
        return None
    fixed = bool((chosen == chosen[0]).all()) and len(chosen) > 1
    return chosen[0].tolist() if fixed else f"top{chosen.shape[1]}"


def _check_agreement(computed: Tensor, told: Tensor) -> None:
    off = (computed - told).abs() > _AGREE * told.abs() + 1e-9
    if bool(off.any()):
        raise BadValueError(
            f"prediction: expected fit.predict(inputs) of these inputs, got {int(off.sum())} of "
            f"{len(off)} scores that differ from the fit's own. Give the prediction in the order "
            "of the inputs, with asked= if fit.predict had arguments, or none."
        )
