"""The inputs of a network: the tensors inside, and what kind they are of.

Inputs are a tensor, a tuple of tensors (`model(*inputs)`) or a mapping of tensors
(`model(**inputs)`); in each the first dimension counts examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deltabars.errors import DataError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True)
class Signature:
    """The inputs a model was fitted with: leaf names, types, and shapes without the batch."""

    names: tuple[str, ...] | None  # None: positional
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # None where the shape differs between batches

    @classmethod
    def of(cls, inputs: Inputs) -> Signature:
        """The signature of one batch of inputs."""
        names = tuple(inputs) if isinstance(inputs, dict) else None
        parts = leaves(inputs)
        return cls(
            names,
            tuple(str(leaf.dtype) for leaf in parts),
            tuple(tuple(leaf.shape[1:]) for leaf in parts),
        )

    @property
    def count(self) -> int:
        """How many tensors one example's input has."""
        return len(self.dtypes)

    def merge(self, other: Signature) -> Signature:
        """The signature of two batches together; shapes that differ are left open."""
        if (self.names, self.dtypes) != (other.names, other.dtypes):
            raise DataError(
                f"Data: expected batches of one kind, got {self.describe()} and then "
                f"{other.describe()}."
            )
        shapes = tuple(
            a if a == b else None for a, b in zip(self.shapes, other.shapes, strict=True)
        )
        return Signature(self.names, self.dtypes, shapes)

    def check(self, inputs: Inputs, also: str) -> None:
        """Raise DataError unless `inputs` are of the kind the model was fitted with.

        Floating inputs may be of the type `also` as well, that of the computation.
        """
        got = Signature.of(inputs)
        types_fit = len(got.dtypes) == len(self.dtypes) and all(
            a == b or ("float" in a and b == also)
            for a, b in zip(self.dtypes, got.dtypes, strict=True)
        )
        shapes_fit = len(got.shapes) == len(self.shapes) and all(
            a is None or a == b for a, b in zip(self.shapes, got.shapes, strict=True)
        )
        if self.names == got.names and types_fit and shapes_fit:
            return
        raise DataError(
            f"Inputs: expected {self.describe()}, as in the training data, got {got.describe()}. "
            + (
                "Convert them as it was done for those: pixels of 0 to 255 by x.float() / 255, say."
                if "torch.uint8" in got.dtypes and got.shapes == self.shapes
                else "Convert or reshape them."
            )
        )

    def describe(self) -> str:
        """One line for messages, such as `torch.float32 (B, 1, 28, 28)`."""
        names = self.names or ("",) * self.count
        parts = []
        for name, dtype, shape in zip(names, self.dtypes, self.shapes, strict=True):
            sizes = "…" if shape is None else ", ".join(map(str, shape))
            parts.append(f"{name + ' ' if name else ''}{dtype} (B{', ' if sizes else ''}{sizes})")
        return " and ".join(parts)


def leaves(inputs: Inputs) -> list[Tensor]:
    """The tensors of one batch's inputs."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values()) if isinstance(inputs, dict) else list(inputs)


def map_leaves(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply `function` to each tensor of one batch's inputs."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(leaf) for name, leaf in inputs.items()}
    return tuple(function(leaf) for leaf in inputs)
