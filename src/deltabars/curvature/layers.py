"""What a convolution sees: the patches of its input, one for each position of its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deltabars.problem.parameters import ParameterSpace


def patches(
    images: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """The patches (B, T, C·k·l) of images (B, C, H, W), in the order of a weight (O, C, k, l).

    On a GPU a strided view is copied, some fifty times as fast as by `F.unfold`, which goes from
    image to image; on a CPU that is what pays.
    """
    if images.device.type == "cpu":
        return F.unfold(images, kernel, dilation, padding, stride).mT
    if any(padding):
        images = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    windows = images.unfold(2, spans[0], stride[0]).unfold(3, spans[1], stride[1])
    windows = windows[..., :: dilation[0], :: dilation[1]]  # (B, C, h, w, k, l)
    count = windows.shape[2] * windows.shape[3]
    columns = windows.shape[1] * kernel[0] * kernel[1]
    return windows.permute(0, 2, 3, 1, 4, 5).reshape(images.shape[0], count, columns)


Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """How a convolution moves over its input."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair


@dataclass(frozen=True)
class Call:
    """One call of a layer on a batch.

    Attributes:
        weight, bias: the names of its parameters; None for those that are not asked for.
        inputs: what went in, (B, …, I) or (B, I, H, W).
        version: of the inputs at the time, to notice if they are changed in place later.
        edge: where in the graph of derivatives its output is.
        window: of a convolution.
    """

    weight: str | None
    bias: str | None
    inputs: Tensor
    version: int
    edge: GradientEdge
    window: Window | None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of it that are asked for."""
        return tuple(name for name in (self.weight, self.bias) if name)

    @property
    def is_changed(self) -> bool:
        """Whether what went in has been altered since."""
        return self.inputs._version != self.version

    def factors(self, gradients: Tensor) -> Factors:
        """The factors a and δ of this call, from the gradients (R, B, …) by its output."""
        if self.window is None:
            activations = self.inputs.reshape(self.inputs.shape[0], -1, self.inputs.shape[-1])
            signals = gradients.flatten(2, -2).mT if gradients.ndim > 3 else gradients[..., None]
        else:
            window = self.window
            activations = patches(
                self.inputs, window.kernel, window.stride, window.padding, window.dilation
            )
            signals = gradients.flatten(3)
        return Factors(self.weight, self.bias, activations, signals.transpose(0, 1))


@dataclass(frozen=True)
class Factors:
    """What a layer's part of R rows of derivatives is made of, for each of B examples.

    Attributes:
        weight, bias: the names of the layer's parameters.
        activations: a, (B, T, I).
        signals: δ, (B, R, O, T).
    """

    weight: str | None
    bias: str | None
    activations: Tensor
    signals: Tensor

    def at(self, outputs: Tensor, inputs: Tensor) -> Factors:
        """The factors of some outputs (O',) and inputs (I',) alone."""
        activations, signals = self.activations, self.signals
        if len(inputs) < activations.shape[2]:
            activations = activations.index_select(2, inputs)
        if len(outputs) < signals.shape[2]:
            signals = signals.index_select(2, outputs)
        return replace(self, activations=activations, signals=signals)

    def not_zero(self) -> tuple[Tensor, Tensor]:
        """The outputs (O',) and inputs (I',) that are not zero throughout."""
        outputs = self.signals.transpose(0, 2).flatten(1).any(1)
        inputs = self.activations.flatten(0, 1).any(0)
        return outputs.nonzero().squeeze(1), inputs.nonzero().squeeze(1)

    def weight_rows(self, out: Tensor | None = None) -> Tensor:
        """Σ_t δ_t a_tᵀ, (B, R, O·I), in `out` where that is given. Cost: T·O·I operations a row."""
        batch, count, outputs, _ = self.signals.shape
        if out is None:
            rows = self.signals.flatten(1, 2) @ self.activations  # (B, R·O, I)
            return rows.view(batch, count, outputs * rows.shape[2])
        for r in range(count):
            place = out[:, r].unflatten(1, (outputs, -1))
            torch.bmm(self.signals[:, r], self.activations, out=place)
        return out

    def bias_rows(self) -> Tensor:
        """Σ_t δ_t, (B, R, O)."""
        return self.signals.sum(-1)

    def gram(self) -> Tensor:
        """The inner products of the weight's rows, (B, R, R), float64: Σ_ts (a_t·a_s)(δ_t·δ_s)."""
        activations, signals = self.activations.double(), self.signals.double()
        between = activations @ activations.mT  # (B, T, T)
        weighted = signals @ between.unsqueeze(1)  # (B, R, O, T)
        return weighted.flatten(2) @ signals.flatten(2).mT

    def add_projection(self, basis: Tensor, total: Tensor) -> None:
        """Add the products of the weight's rows with a basis (K, O, I) to (B, R, K), float64.

        The activations, which all R rows share, are contracted with the basis first: T·K·O·I
        operations for all rows together.
        """
        count, outputs, inputs = basis.shape
        columns = basis.permute(2, 0, 1).reshape(inputs, count * outputs)  # (I, K·O)
        for t in range(self.signals.shape[3]):
            shared = (self.activations[:, t] @ columns).unflatten(1, (count, outputs))  # (B, K, O)
            total += self.signals[..., t] @ shared.mT  # (B, R, K)

    def numbers_per_input(self, columns: int) -> int:
        """How many numbers the rows, or what takes their place, are for one input."""
        _, count, outputs, positions = self.signals.shape
        inputs = self.activations.shape[2]
        ends = positions * (inputs + count * outputs)
        return ends + (columns * outputs if self.is_cheaper_shared() else count * outputs * inputs)

    def is_cheaper_shared(self) -> bool:
        """Whether `add_projection` takes well fewer operations than forming the rows first."""
        return 2 * self.signals.shape[3] <= self.signals.shape[1]


def joined(layers: Sequence[Factors]) -> list[Factors]:
    """The factors with those of one weight put together: the sum of its calls is over positions."""
    calls: dict[str | None, list[Factors]] = {}
    for factors in layers:
        calls.setdefault(factors.weight, []).append(factors)
    return [
        group[0]
        if len(group) == 1
        else replace(
            group[0],
            activations=torch.cat([factors.activations for factors in group], 1),
            signals=torch.cat([factors.signals for factors in group], 3),
        )
        for group in calls.values()
    ]


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
        return {name: Part(place, None) for name, place in space.slices.items()}
    parts, done = {}, 0
    for (name, place), shape in zip(space.slices.items(), space.shapes, strict=True):
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
