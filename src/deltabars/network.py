"""A model at its trained point, as a pure function of a chosen subset of its parameters.

The user's module is only ever *called*, with copies of its parameters and buffers
(`torch.func.functional_call`), and its training flags are put back after each use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltabars.batches import Inputs, map_leaves
from deltabars.errors import BadValueError, ModelError
from deltabars.parameters import LastLayer, ParameterSpace, Selection

_CUDNN: Any = torch.backends.cudnn  # its switches are set up at run time


@dataclass(frozen=True, eq=False)
class Network:
    """The outputs z of a model, as a function of `parameters` around the trained values ω̂."""

    model: torch.nn.Module
    parameters: ParameterSpace
    trained: Mapping[str, Tensor]  # ω̂ by name, copied, on `device` in `dtype`
    constants: Mapping[str, Tensor]  # the other parameters and the buffers, likewise
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def capture(
        cls,
        model: torch.nn.Module,
        selection: Selection | ParameterSpace = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Network:
        """Copy a model's state; `device` and `dtype` default to the model's own.

        Half-precision models are computed in float32.
        """
        if not isinstance(model, torch.nn.Module):
            raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
        space = (
            selection
            if isinstance(selection, ParameterSpace)
            else ParameterSpace.select(model, selection)
        )
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        devices = {value.device for value in state.values()}
        if device is None and len(devices) > 1:
            raise ModelError(
                f"Expected a model on one device, got {sorted(map(str, devices))}. "
                "Move it with model.to(…), or name the device to compute on with device=."
            )
        place = torch.device(device) if device is not None else next(iter(devices))
        kind = _working_dtype(state[space.names[0]].dtype, dtype)
        copies = {
            name: value.detach().to(place, kind if value.is_floating_point() else None, copy=True)
            for name, value in state.items()
        }
        bad = [name for name, value in copies.items() if not bool(value.isfinite().all())]
        if bad:
            raise ModelError(
                f"Expected finite weights, got NaN or infinity in {', '.join(bad[:6])}."
            )
        trained = {name: copies.pop(name) for name in space.names}
        return cls(model, space, trained, copies, place, kind)

    @property
    def point(self) -> Tensor:
        """ω̂ as one vector (P,)."""
        return self.parameters.flatten(self.trained)

    def outputs(self, trained: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The outputs z (B, C) at the parameters `trained`; differentiable in them."""
        args: tuple[Tensor, ...] = ()
        kwargs: dict[str, Tensor] = {}
        if isinstance(inputs, dict):
            kwargs = inputs
        else:
            args = inputs if isinstance(inputs, tuple) else (inputs,)
        state = {**self.constants, **trained}
        result = torch.func.functional_call(self.model, state, args, kwargs)
        return _logits(result)

    def one_output(self, trained: Mapping[str, Tensor], example: Inputs) -> Tensor:
        """The outputs z (C,) of one example that has no batch dimension, for use under vmap."""
        return self.outputs(trained, map_leaves(lambda leaf: leaf.unsqueeze(0), example)).squeeze(0)

    def check_last_layer(self, selection: object, num_outputs: int) -> None:
        """Refuse a `last_layer()` selection that cannot be what produces the outputs."""
        if isinstance(selection, LastLayer) and not any(
            shape and shape[0] == num_outputs for shape in self.parameters.shapes
        ):
            raise ModelError(
                f"last_layer(): expected the last registered layer to produce the {num_outputs} "
                f"outputs, got {', '.join(self.parameters.names)}. Name the right one with "
                "params=[…]."
            )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Compute in eval mode and full precision; everything is as before afterwards."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),  # torch.func turns gradients on where it needs them
                torch.autocast(self.device.type, enabled=False),
                _full_float32(self.device),
            ):
                yield
        finally:
            for module in training:
                module.training = True


def fingerprint(model: torch.nn.Module) -> str:
    """A digest of a model's whole state: names, shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name}:{tuple(value.shape)}:{value.dtype};".encode())
        plain = value.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _working_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    supported = (torch.float32, torch.float64)
    if asked is not None and asked not in supported:
        raise BadValueError(
            f"dtype: expected torch.float32 or torch.float64, got {asked}: "
            "curvature needs the digits."
        )
    if asked is None and not own.is_floating_point:
        raise ModelError(f"Expected real floating-point parameters, got {own}.")
    return asked or (own if own in supported else torch.float32)


def _logits(result: object) -> Tensor:
    if isinstance(result, Mapping) and "logits" in result:
        result = result["logits"]
    elif not isinstance(result, Tensor) and hasattr(result, "logits"):
        result = result.logits
    if not isinstance(result, Tensor):
        raise ModelError(
            "Model output: expected a tensor of logits (B, C), or an object with .logits, got "
            f"{type(result).__name__}. Wrap the model in a module that returns the logits alone."
        )
    if result.ndim != 2:
        raise ModelError(
            f"Model output: expected logits of shape (B, C), got {tuple(result.shape)}."
        )
    return result


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    """No TF32: its error (3e-4 on a tail vector) is of the order of λ itself."""
    if device.type != "cuda":
        yield
        return
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, _CUDNN.conv)
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
