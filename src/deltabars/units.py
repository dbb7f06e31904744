"""Units that no example switches on, and how to leave them out.

A ReLU passes nothing of a unit whose input is negative. Where that is so for every training
example, no loss depends on the weights into and out of that unit, in a whole neighbourhood of the
trained point: the unit can be left out, and no derivative changes. The same goes for weights of
inputs that are always zero. Networks trained with weight decay have many such units: in the paper's
network 133 of 224 are silent on MNIST.

The units are watched while the gradient of the cost is computed (`Units.watch`); later passes under
`Units.compact` compute the others alone, with slices of the layers' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from deltabars.inputs import Inputs, leaves
from deltabars.kept import Kept, Layer
from deltabars.memory import ran_out
from deltabars.network import Network, weighted_sum
from deltabars.ranks import Ranks
from deltabars.walks import Compact, Watch

# Relative: units that are missed change far more than rounding does, and what it does at kinks.
_AGREE = {torch.float32: 1e-3, torch.float64: 1e-9}


class Units:
    """Which units of a network any of the examples switch on."""

    def __init__(self, network: Network, ranks: Ranks) -> None:
        self._network, self._ranks = network, ranks
        self._layers: list[Layer] | None = None
        self._route: list[tuple[str, ...]] = []
        self._kept: list[Kept] = []

    @contextmanager
    def watch(self, inputs: Inputs, trained: Mapping[str, Tensor]) -> Iterator[None]:
        """A context to run a forward pass in, which adds what is seen to what is known."""
        walk = Watch(leaves(inputs), _names(trained))
        with walk:
            yield
        seen = [] if walk.spoilt else walk.layers
        if self._layers is None:
            self._layers, self._route = seen, walk.route
        elif self._route == walk.route and _shapes(self._layers) == _shapes(seen):
            self._layers = [a.merge(b) for a, b in zip(self._layers, seen, strict=True)]
        else:  # the way through the network is not always the same
            self._layers = []

    @property
    def any_silent(self) -> bool:
        """Whether there is anything to leave out."""
        return bool(self._kept)

    def compact(self, inputs: Inputs) -> AbstractContextManager[Any]:
        """A context to run a forward pass in, which leaves out the units that are silent."""
        return Compact(self._kept, leaves(inputs))

    def reached(self, inputs: Inputs, gradient: Tensor) -> Tensor | None:
        """The places in ω of the parameters that the examples reach, ascending; None for all.

        To be called when all examples have been watched, with the gradient (P,) of the sum of their
        losses. From then on silent units are left out, if a pass over some inputs without them
        agrees with one with them, and if the gradient is zero by all that would be left out: what
        an operation of one's own does with a unit is out of sight.
        """
        kept = [layer.kept() for layer in self._seen_anywhere()]
        if all(layer.is_all for layer in kept):
            return None
        walks: list[Compact] = []

        def during(trained: Mapping[str, Tensor]) -> Compact:
            walks.append(Compact(kept, leaves(inputs), _names(trained)))
            return walks[0]

        whole = self._network.gradient(inputs, weighted_sum)
        try:
            part = self._network.gradient(inputs, weighted_sum, during)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if ran_out(error):
                raise
            part = torch.full_like(whole, torch.inf)
        agree = float((part - whole).norm()) <= _AGREE[whole.dtype] * float(whole.norm())
        if not all(self._ranks.gather(agree)):
            return None
        everything = {
            name: torch.ones_like(value, dtype=torch.bool)
            for name, value in self._network.trained.items()
        }
        used = self._network.parameters.flatten({**everything, **walks[0].used})
        rounding = torch.finfo(whole.dtype).eps * float(gradient.abs().max())
        if bool((gradient.abs()[~used] > rounding).any()):
            return None
        self._kept = kept
        return None if bool(used.all()) else used.nonzero().squeeze(1)

    def _seen_anywhere(self) -> list[Layer]:
        """What all ranks have seen; nothing where they differ in their way through the network."""
        own = self._layers or []
        if self._ranks.count == 1:
            return own
        mine = self._route, [layer.to("cpu") for layer in own]
        (route, merged), *others = self._ranks.gather(mine)
        for other, layers in others:
            if other != route or _shapes(layers) != _shapes(merged):
                return []
            merged = [a.merge(b) for a, b in zip(merged, layers, strict=True)]
        return [layer.to(self._network.device) for layer in merged]


def _names(trained: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(value): name for name, value in trained.items()}


def _shapes(layers: list[Layer]) -> list[torch.Size]:
    return [layer.shape for layer in layers]
