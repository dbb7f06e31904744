"""What a network computes, noted so that a network that computes something else is refused.

The same weights in other code, or with other buffers that `state_dict` leaves out, are another
function. Noted are the outputs of some inputs, generated in the range of the training data, and a
few numbers for each tensor that the state leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltabars.inputs import Inputs, Signature, leaves
from deltabars.memory import ran_out
from deltabars.network import Network

COUNT = 4  # inputs
MOST_NUMBERS = 1 << 24  # of the inputs together
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fill the unit interval evenly
_MOST_IN_DOUBLE = 1 << 26  # numbers of a network whose weights are copied to float64
# Relative to the largest output: devices and versions round differently, models differ by more.
_SAME = {torch.float64: 1e-8, torch.float32: 1e-3}
_SAME_TENSOR = 1e-5  # relative to the norm

Range = tuple[tuple[int, ...], float, float]  # the shape of one example, the least, the largest


@dataclass(frozen=True)
class Behaviour:
    """What a network computes, as far as it is noted.

    Attributes:
        ranges: of the generated inputs, by leaf; empty where the network does not take them.
        outputs: of those inputs, (COUNT, C) in float64.
        dtype: what they were computed in.
        tensors: three numbers for each tensor that the state leaves out, by name.
    """

    ranges: tuple[Range, ...]
    outputs: Tensor
    dtype: torch.dtype
    tensors: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, network: Network, signature: Signature, ranges: tuple[Range, ...]) -> Behaviour:
        """Note what a network computes. Cost: a forward pass of a few inputs, in float64."""
        kinds = [torch.float64, network.dtype]
        weights = [*network.trained.values(), *network.constants.values()]
        if sum(value.numel() for value in weights) > _MOST_IN_DOUBLE:
            kinds = [network.dtype]
        if sum(COUNT * math.prod(shape) for shape, _, _ in ranges) > MOST_NUMBERS:
            kinds = []
        for kind in kinds:
            found = _outputs(network, generated(signature, ranges, network.device, kind), kind)
            if found is not None and bool(found[0].isfinite().all()):
                return cls(ranges, found[0].double().cpu(), kind, found[1])
        return cls((), torch.zeros(0, 0, dtype=torch.float64), network.dtype, {})

    def difference(self, network: Network, signature: Signature) -> str:
        """How a network differs from the one that is noted; nothing if it does not."""
        if not self.ranges:
            return ""
        inputs = generated(signature, self.ranges, network.device, self.dtype)
        found = _outputs(network, inputs, self.dtype)
        if found is None:
            return "it does not take the inputs that it took"
        outputs, tensors = found[0].double().cpu(), found[1]
        for name, numbers in self.tensors.items():
            here = tensors.get(name)
            near = _SAME_TENSOR * max(numbers[1], here[1] if here else 0.0)
            if here is not None and any(
                not abs(a - b) <= near for a, b in zip(here, numbers, strict=True)
            ):
                return f"{name} has other values"
        if outputs.shape != self.outputs.shape:
            return f"it has {outputs.shape[1]} outputs, not {self.outputs.shape[1]}"
        gap = float((outputs - self.outputs).abs().max())
        scale = float(self.outputs.abs().max())
        if not gap <= _SAME[self.dtype] * scale:
            return (
                f"outputs of generated inputs differ by {gap / (scale or 1.0):.2g} of the largest"
            )
        return ""


def ranges_of(inputs: Inputs) -> tuple[Range, ...]:
    """The range of each leaf of some inputs."""
    return tuple(
        (tuple(leaf.shape[1:]), float(leaf.min()), float(leaf.max()))
        if leaf.numel() and not leaf.is_complex()
        else (tuple(leaf.shape[1:]), 0.0, 1.0)
        for leaf in leaves(inputs)
    )


def generated(
    signature: Signature, ranges: tuple[Range, ...], device: torch.device, dtype: torch.dtype
) -> Inputs:
    """Inputs of a signature, with numbers that fill the ranges evenly; the same ones always."""
    parts = []
    start = 1
    for name, (shape, low, high) in zip(signature.dtypes, ranges, strict=True):
        kind = getattr(torch, name.removeprefix("torch."))
        size = COUNT * math.prod(shape)
        even = torch.arange(start, start + size, dtype=torch.float64) * _GOLDEN % 1.0
        start += size
        if kind.is_floating_point or kind.is_complex:
            part = (low + (high - low) * even).to(dtype if kind.is_floating_point else kind)
        else:
            part = (low + (high - low + 1) * even).floor().clamp(max=high).to(kind)
        parts.append(part.view(COUNT, *shape).to(device))
    if signature.names is not None:
        return dict(zip(signature.names, parts, strict=True))
    return parts[0] if len(parts) == 1 else tuple(parts)


def _outputs(
    network: Network, inputs: Inputs, kind: torch.dtype
) -> tuple[Tensor, dict[str, tuple[float, ...]]] | None:
    """The outputs, and numbers of the tensors that the state leaves out; None where it fails."""

    def moved(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value.to(kind) if value.is_floating_point() else value
            for name, value in values.items()
        }

    try:
        before = _left_out(network)
        like = replace(
            network,
            trained=moved(network.trained),
            constants=moved(network.constants),
            dtype=kind,
        )
        with like.evaluation():
            outputs = like.outputs(like.trained, inputs)
        after = _left_out(network)  # what a pass replaces is a note of that pass
    except Exception as error:  # of the user's own: not every model takes any numbers, or float64
        if ran_out(error):
            raise
        return None
    kept = {name: value for name, value in after.items() if before.get(name) is value}
    return outputs, {name: _numbers(value) for name, value in kept.items()}


def _left_out(network: Network) -> dict[str, Tensor]:
    """The buffers that `state_dict` leaves out, and the tensors that modules hold as attributes."""
    state = network.model.state_dict()
    found = {name: value for name, value in network.constants.items() if name not in state}
    for prefix, module in network.model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}".lstrip(".")] = value
    parameters = dict(network.model.named_parameters())
    return {name: value for name, value in found.items() if name not in parameters}


def _numbers(tensor: Tensor) -> tuple[float, ...]:
    """Three numbers that hardly any other tensor has: two weighted sums, and the norm."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = plain.detach().cpu().double().flatten()
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64) * _GOLDEN % 1.0
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    rest = torch.where(values.isfinite(), 0.0, values.nan_to_num(2.0, 1.0, -1.0)) @ weights
    norm = float(finite.norm())
    return float(finite @ weights), norm, float(rest) * max(norm, 1.0)
