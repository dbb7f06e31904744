"""The inputs of a page: read by their indices, with their pictures, texts, and settling scores."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, DataError
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.prediction import Prediction
from deltabars.problem.data import Batch, as_tensors, batch_of, collated, is_fixed, iterate, leaves
from deltabars.report.page.subject import short
from deltabars.runtime.progress import Progress

_READ_SIZE = 256
_STEPS = 10
_AGREE = 1e-3  # of a score: float32 in chunks of another size differs by less
_PIXELS = 4_000_000  # in all pictures of a page together
_SMALLEST, _LARGEST = 48, 160  # the longest side of a picture that has to shrink


@dataclass(frozen=True)
class Source:
    """B inputs that can be read by their indices: tensors, or a map-style dataset."""

    data: Any  # the tensors (a Batch), or the dataset
    fit: DeltaFit  # whose network takes them, which tells targets from inputs

    @classmethod
    def of(cls, inputs: Any, fit: DeltaFit) -> Source:
        """Check the inputs of `save_report`."""
        if hasattr(inputs, "__len__") and len(inputs) == 0:
            raise DataError("inputs: expected at least one, got none.")
        inputs = as_tensors(inputs)
        if is_fixed(inputs):
            return cls(batch_of(inputs, fit.signature), fit)
        odd = isinstance(inputs, DataLoader | IterableDataset | str | bytes | tuple | list)
        if odd or not (hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__")):
            kind = f"got {type(inputs).__name__}. Of a DataLoader give its dataset."
            raise DataError(f"inputs: expected tensors or a map-style Dataset, {kind}")
        return cls(inputs, fit)

    def __len__(self) -> int:
        return len(self.data)

    def read(self, indices: Sequence[int]) -> Batch:
        """Read some inputs, and their targets where they come with some."""
        if isinstance(self.data, Batch):
            return self.data.rows(torch.as_tensor(indices))
        rows = Subset(self.data, indices)
        (raw,) = DataLoader(rows, batch_size=len(indices), collate_fn=collated)
        return batch_of(raw, self.fit.signature)

    def targets(self) -> Tensor | None:
        """Read the targets, if there are any. Cost: a pass over a dataset of pairs."""
        if isinstance(self.data, Batch):
            return self.data.targets
        if self.read([0]).targets is None:
            return None
        batches = (batch_of(raw, self.fit.signature) for raw in iterate(self.data, _READ_SIZE))
        return torch.cat([each.targets for each in batches if each.targets is not None])


def texts_of(
    inputs: Any, given: Sequence[str] | None, indices: Sequence[int], count: int
) -> list[str]:
    """Return the texts of some inputs; an empty list where they are no texts."""
    if given is not None:
        if len(given) != count:
            raise BadValueError(f"texts: expected {count} texts, got {len(given)}.")
        return [str(given[index]) for index in indices]
    if isinstance(inputs, Tensor | tuple | list | Mapping) or not hasattr(inputs, "__getitem__"):
        return []
    first = inputs[indices[0]]
    entries = first.items() if isinstance(first, Mapping) else ()
    key = next((key for key, value in entries if isinstance(value, str)), None)
    return [] if key is None else [str(inputs[index][key]) for index in indices]


Pictures = Callable[[int], Any]


def _pictures(batch: Batch, indices: list[int], pictures: Pictures | None, side: int) -> list[str]:
    """Return pictures as data addresses, if the inputs have any.

    Bytes stay as they are. Floating pixels, which are mostly normalised, are scaled to 0 … 255 by
    the range of their own image.
    """
    if pictures is not None:
        arrays = [np.asarray(pictures(index)) for index in indices]
        for index, array in zip(indices, arrays, strict=True):
            flat = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
            if array.dtype != np.uint8 or not flat or 0 in array.shape:
                got = f"got {array.dtype} {array.shape} for input {index}."
                raise BadValueError(f"pictures: expected an array (H, W[, 3]) of uint8, {got}")
        return [_address(array, side) for array in arrays]
    found = [leaf for leaf in leaves(batch.inputs) if _looks_like_images(leaf)]
    if len(found) != 1:
        return []
    images = found[0].detach().cpu().movedim(1, -1) if found[0].ndim == 4 else found[0].cpu()
    if images.dtype != torch.uint8:
        pixels = images.float().flatten(1)
        low, high = pixels.amin(1, keepdim=True), pixels.amax(1, keepdim=True)
        scaled = (pixels - low) * (255 / (high - low)).nan_to_num(0.0, posinf=0.0)
        images = scaled.round().to(torch.uint8).view(images.shape)
    return [_address(image, side) for image in images.numpy()]


def _looks_like_images(leaf: Tensor) -> bool:
    numbers = leaf.is_floating_point() or leaf.dtype == torch.uint8
    channels = leaf.ndim == 3 or (leaf.ndim == 4 and leaf.shape[1] in (1, 3))
    return numbers and channels and min(leaf.shape[-2:]) >= 4


def _address(pixels: np.ndarray, side: int) -> str:
    """Return bytes (H, W, …) as the data address of a PNG file, made smaller than `side`."""
    from PIL import Image

    image = Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
    image.thumbnail((side, side), Image.Resampling.BOX)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def choose_ranks(ranks: Sequence[int] | None, most: int) -> list[int]:
    """Choose the K's to show: those given, or about ten up to `most`, denser at its start."""
    if ranks is None:
        return sorted({round(float(k)) for k in np.geomspace(1, most, _STEPS)})
    if not all(is_whole(k) and 1 <= k <= most for k in ranks):
        raise BadValueError(f"ranks: expected whole numbers from 1 to the {most}, got {ranks!r}.")
    return sorted({int(k) for k in ranks})


def settle(
    source: Source,
    prediction: Prediction,
    asked: Mapping[str, Any],
    indices: list[int],
    ranks: list[int],
    pictures: Pictures | None,
    progress: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Predict some inputs at several ranks; return their scores and their pictures, if any.

    The scores (n, R) come with the ends of their intervals; with all pairs they have to be those of
    `prediction`, which was made with the arguments `asked`. Inputs are read once, in chunks.
    """
    fit = source.fit
    how = {**asked, "classes": _asked_classes(prediction), "moderation": None, "progress": False}
    last = how.pop("rank", fit.rank)
    scores, images = torch.empty(3, len(indices), len(ranks)), []
    side = int(min(_LARGEST, max(_SMALLEST, (_PIXELS / max(len(indices), 1)) ** 0.5)))
    with Progress("Report", len(indices), "input", progress) as bar:
        for start in range(0, len(indices), _READ_SIZE):
            chosen = indices[start : start + _READ_SIZE]
            batch = source.read(chosen)
            for place, k in enumerate(ranks):
                found = fit.predict(batch.inputs, rank=k, **how)
                at_rank = torch.stack([found.score, found.score_low, found.score_high])
                scores[:, start : start + len(chosen), place] = at_rank
            images += _pictures(batch, chosen, pictures, side)
            bar.show(start + len(chosen))
    if last in ranks:
        known = prediction.score[torch.as_tensor(indices)]
        off = (scores[0, :, ranks.index(last)] - known).abs() > _AGREE * known.abs() + 1e-9
        if bool(off.any()):
            raise BadValueError(
                f"prediction: expected fit.predict(inputs, **asked) of these inputs, in order, got "
                f"{int(off.sum())} of {len(off)} scores that differ from the fit's own."
            )
    score, low, high = map(short, scores)
    return {"ranks": ranks, "score": score, "low": low, "high": high}, images


def _asked_classes(prediction: Prediction) -> Any:
    """Return what `classes=` the prediction was made with."""
    chosen = prediction.classes
    if chosen is None or (len(chosen) > 1 and bool((chosen == chosen[0]).all())):
        return None if chosen is None else chosen[0].tolist()
    return f"top{chosen.shape[1]}"
