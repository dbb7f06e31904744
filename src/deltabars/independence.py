"""Whether a model's outputs for one example depend on the others in its batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deltabars.errors import ModelError
from deltabars.inputs import Inputs, map_leaves
from deltabars.memory import ran_out
from deltabars.network import Network

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
