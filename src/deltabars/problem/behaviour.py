"""Whether a model's outputs for one example depend on the others in its batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deltabars.errors import ModelError
from deltabars.problem.inputs import Inputs, Signature, leaves, map_leaves
from deltabars.problem.network import Network
from deltabars.runtime.memory import ran_out

# Relative to the largest output of each column: what batches of other sizes differ by.
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-9}
_OF_NOISE = 30  # how many times the change by rounded weights is still rounding
_SHARE = 32  # of a batch one example more is run a second time for so many


def check_independence(
    network: Network, inputs: Inputs, outputs: Tensor, *, closely: bool = False
) -> None:
    """Refuse outputs (B, C) that are others where an example has other company.

    A few examples are run again, in another order. `closely` for a batch drawn from this one with
    replacement, of the same size; for a part of it, backwards; and for examples alone.

    Cost: a forward pass over 1/32 of the examples, and over two more; `closely`, about two passes.

    Raises:
        ModelError: they are.
    """
    count = len(outputs)
    if count == 1:
        return
    generator = torch.Generator().manual_seed(count)
    samples = [torch.randperm(count, generator=generator)[: 2 + count // _SHARE]]
    if closely:
        last = torch.tensor([count - 1])
        drawn = torch.randint(count, (count,), generator=generator)
        samples = [drawn, torch.arange(count // 2, -1, -1), last, last * 0]
    for sample in samples:
        chosen = sample.to(outputs.device)
        try:
            _check(network, inputs, outputs.detach(), chosen)
        except RuntimeError as error:  # a model that takes batches in one order alone, say
            if ran_out(error) or len(sample) == 1:
                raise
            _check(network, inputs, outputs.detach(), chosen.sort().values)


def _check(network: Network, inputs: Inputs, outputs: Tensor, sample: Tensor) -> None:
    some, expected = map_leaves(lambda leaf: leaf[sample], inputs), outputs[sample]
    try:
        found = network.outputs(network.trained, some)
    except ValueError as error:  # statistics of a batch that has a single example
        raise _refusal() from error
    if found.shape != expected.shape:
        raise _refusal()
    gap, scale = (found - expected).abs().amax(0), outputs.abs().amax(0)
    if not bool(gap.isfinite().all()):
        return  # outputs that are not finite have an error of their own
    over = gap > _ROUNDING[network.dtype] * scale
    if bool(over.any()) and bool((gap > _OF_NOISE * _noise(network, some, found))[over].any()):
        raise _refusal()


def _noise(network: Network, inputs: Inputs, outputs: Tensor) -> Tensor:
    """How far the outputs move with weights that are rounded as coarsely as any result is, (C,)."""
    types = _Types()
    with types:
        network.outputs(network.trained, inputs)
    generator = torch.Generator().manual_seed(0)
    eps = max((torch.finfo(kind).eps for kind in types.seen), default=0.0)

    def rounded(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        step = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return value * (1 + eps * step.to(value.device)).to(value.dtype)

    trained, constants = (
        {name: rounded(value) for name, value in weights.items()}
        for weights in (network.trained, network.constants)
    )
    moved = replace(network, constants=constants).outputs(trained, map_leaves(rounded, inputs))
    return (moved - outputs).abs().amax(0)


class _Types(TorchFunctionMode):
    """Notes the floating types of all results: a model may compute a part in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note the types of what it returns."""
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.seen |= {leaf.dtype for leaf in tensors if leaf.is_floating_point()}
        return result


def _refusal() -> ModelError:
    return ModelError(
        "Model output: expected that of one example not to depend on the rest of its batch, got "
        "one that does. Batch norm needs its running statistics (track_running_stats=True), "
        "recurrent layers batch_first=True."
    )


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
