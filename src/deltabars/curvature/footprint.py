"""What rows of derivatives take of memory, before there are many of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from deltabars.curvature.layers import Factors


@dataclass(frozen=True)
class Footprint:
    """The memory of R rows by the parameters, for each input.

    Attributes:
        count: R.
        outputs: C, of the network.
        activations: bytes that a forward pass keeps for its derivatives.
        loose: numbers of the rows that are held whole.
        layers: of each layer the numbers that it takes, and how many more for each vector of a
            basis.
    """

    count: int
    outputs: int
    activations: int
    loose: int
    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        outputs: Tensor,
        count: int,
        layers: Iterable[Factors],
        loose: Mapping[str, Tensor],
        activations: int,
    ) -> Footprint:
        """Of rows that were computed for some inputs, with outputs (B, C)."""
        numbers = [
            (factors.numbers_per_input(0), factors.numbers_per_input(1)) for factors in layers
        ]
        return cls(
            count,
            outputs.shape[1],
            activations // len(outputs),
            sum(rows.shape[1] * rows.shape[2] for rows in loose.values()),
            tuple((none, one - none) for none, one in numbers),
        )

    def largest_layer(self, columns: int) -> int:
        """The numbers of the layer that takes most, with bases of that many vectors together."""
        return max((none + columns * each for none, each in self.layers), default=0)
