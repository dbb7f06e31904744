"""Whether a model and data go together, seen from one input before anything long is computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from deltabars.batches import Batch, iterate, labelled
from deltabars.errors import DataError, ModelError, first_line
from deltabars.inputs import leaves
from deltabars.sources.data import NamedData
from deltabars.sources.folders import Pictures
from deltabars.sources.source import Source


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
