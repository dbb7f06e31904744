"""The columns of rows of derivatives that are kept: those of the parameters that are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltabars.parameters import ParameterSpace


@dataclass(frozen=True)
class Part:
    """What is kept of one parameter.

    Attributes:
        place: where among the columns that are kept.
        numbers: which of the parameter's numbers, (p,); None for all of them.
        outputs, inputs: of a weight (O, …), the rows and columns of its matrix (O, I) that these
            numbers are all crossings of; None where they are not.
    """

    place: slice
    numbers: Tensor | None
    outputs: Tensor | None = None
    inputs: Tensor | None = None


def kept_parts(space: ParameterSpace, reached: Tensor | None) -> Mapping[str, Part]:
    """The parts of all parameters, by name; for all numbers where `reached` is None."""
    if reached is None:
        return {name: Part(place, None) for name, place in space.places.items()}
    parts, done = {}, 0
    for (name, place), shape in zip(space.places.items(), space.shapes, strict=True):
        numbers = reached[(reached >= place.start) & (reached < place.stop)] - place.start
        here = slice(done, done + len(numbers))
        done = here.stop
        if len(numbers) == place.stop - place.start:
            parts[name] = Part(here, None)
        else:
            parts[name] = Part(here, numbers, *_crossings(numbers, shape))
    return parts


def _crossings(numbers: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | tuple[()]:
    """The rows and columns of a weight that the numbers are all crossings of; else nothing."""
    if len(shape) < 2 or not len(numbers):
        return ()
    width = torch.Size(shape[1:]).numel()
    outputs, inputs = (numbers // width).unique(), (numbers % width).unique()
    return (outputs, inputs) if len(outputs) * len(inputs) == len(numbers) else ()
