"""Whether a model and data go together, seen from one input before anything long is computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltabars.errors import DataError, ModelError, first_line
from deltabars.sources.data import NamedData
from deltabars.sources.folders import Pictures
from deltabars.sources.source import Source


def check_together(model: nn.Module, source: Source, data: NamedData) -> None:
    """Refuse data without targets, and pictures that the model does not take.

    Raises:
        DataError: there are no targets, or other classes than the model has outputs.
        ModelError: the model does not take the pictures.
    """
    pictures = source.dataset
    if isinstance(pictures, Pictures):
        if source.classes is None:
            raise DataError(
                f"--data: expected pictures in sub-folders, which are their classes, in "
                f"{data.spec}, got no sub-folders: without classes there is nothing to fit."
            )
        image = pictures[0][0]
        outputs = _outputs(model, image)
        if isinstance(outputs, Tensor) and outputs.shape[1:] != (len(source.classes),):
            raise DataError(
                f"--data: expected a sub-folder for each output of the model, got "
                f"{len(source.classes)} in {data.spec} for outputs of shape "
                f"{tuple(outputs.shape[1:])}. Empty folders may stand for classes without pictures."
            )
    elif isinstance(source.data, Tensor):
        raise DataError(
            f"--data: expected inputs and targets from {data.spec}, got inputs alone: without "
            "targets there is nothing to fit."
        )


def _outputs(model: nn.Module, image: Tensor) -> object:
    first = next(model.parameters(), image)
    try:
        with torch.no_grad():
            return model(image[None].to(first.device, first.dtype))
    except RuntimeError as error:
        raise ModelError(
            f"--model: expected a model that takes pictures {(1, *image.shape)}, got one that does "
            f"not ({first_line(error)}). --gray makes one channel of them, --size another size."
        ) from error
