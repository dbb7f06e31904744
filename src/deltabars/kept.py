"""What of the layers of a network counts: outputs that are ever passed on, inputs ever given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Layer:
    """What was seen of one call of a layer.

    Attributes:
        shape: of its weight.
        outputs: which outputs a ReLU let pass, for any example, (O,); None for all of them, as
            far as is known.
        inputs: which inputs were other than zero, for any example, (I,); None likewise.
        exposed: whether anything but a ReLU depends on the outputs.
    """

    shape: torch.Size
    outputs: Tensor | None = None
    inputs: Tensor | None = None
    exposed: bool = False

    def merge(self, other: Layer) -> Layer:
        """What was seen of two calls, on different examples."""
        return Layer(
            self.shape,
            _either(self.outputs, other.outputs),
            _either(self.inputs, other.inputs),
            self.exposed or other.exposed,
        )

    def to(self, device: torch.device | str) -> Layer:
        """The same on a device."""
        outputs, inputs = (
            None if mask is None else mask.to(device) for mask in (self.outputs, self.inputs)
        )
        return Layer(self.shape, outputs, inputs, self.exposed)

    def kept(self) -> Kept:
        """What of it counts."""
        rows = None if self.exposed else _places(self.outputs)
        return Kept(self.shape, rows, _places(self.inputs))


@dataclass(frozen=True)
class Kept:
    """What of a layer counts: the places of outputs and of inputs; None for all of them."""

    shape: torch.Size
    rows: Tensor | None
    columns: Tensor | None

    @property
    def is_all(self) -> bool:
        """Whether there is nothing to leave out."""
        return self.rows is None and self.columns is None


def _places(mask: Tensor | None) -> Tensor | None:
    """The places of a mask that are set; None where all are, or where there is no mask.

    One at the least: a layer without outputs would be none.
    """
    if mask is None or bool(mask.all()):
        return None
    return mask.nonzero().squeeze(1) if bool(mask.any()) else mask.new_zeros(1, dtype=torch.long)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else first | second
