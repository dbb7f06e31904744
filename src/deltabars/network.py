"""A model at its trained point, as a pure function of a chosen subset of its parameters.

The user's module is only ever *called*, with copies of its parameters and buffers
(`torch.func.functional_call`), and its training flags are put back after each use.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deltabars.definitions import AsDefined
from deltabars.determinism import same_bits
from deltabars.errors import BadValueError, ModelError
from deltabars.inputs import Inputs, map_leaves
from deltabars.memory import ran_out
from deltabars.parameters import ParameterSpace, Selection
from deltabars.plain import plain_model
from deltabars.precision import full_precision, working_dtype
from deltabars.turns import Shared, Turns


@dataclass(frozen=True, eq=False)
class Network:
    """The outputs z of a model, as a function of `parameters` around the trained values ω̂."""

    model: torch.nn.Module
    parameters: ParameterSpace
    trained: Mapping[str, Tensor]  # ω̂ by name, copied, on `device` in `dtype`
    constants: Mapping[str, Tensor]  # the other parameters and the buffers, likewise
    device: torch.device
    dtype: torch.dtype
    # By parameter: derivatives are by ω/scale, that is, times the scale; empty for plain ones.
    scales: Mapping[str, float] = field(default_factory=dict)
    deterministic: bool = False  # whether a GPU is to give the same bits each time

    @classmethod
    def capture(
        cls,
        model: torch.nn.Module,
        selection: Selection | ParameterSpace = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> Network:
        """Copy a model's state; `device` and `dtype` default to the model's own.

        Half-precision models are computed in float32.
        """
        if not isinstance(deterministic, bool):
            raise BadValueError(f"deterministic: expected True or False, got {deterministic!r}.")
        model = plain_model(model)
        with _TURNS.at(model):
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
            kind = working_dtype(state[space.names[0]].dtype, dtype)
            try:
                place = torch.device(device) if device is not None else next(iter(devices))
                with torch.inference_mode(False):  # derivatives cannot be taken of what it makes
                    copies = {
                        name: value.detach().to(
                            place, kind if value.is_floating_point() else None, copy=True
                        )
                        for name, value in state.items()
                    }
            except (RuntimeError, AssertionError, TypeError) as error:
                raise BadValueError(
                    f"device: expected one that torch has here, got {device!r} "
                    f"({str(error).splitlines()[0]})."
                ) from error
            weights = [name for name, _ in model.named_parameters()]
        bad = [name for name in weights if not bool(copies[name].isfinite().all())]
        if bad:
            raise ModelError(
                f"Expected finite weights, got NaN or infinity in {', '.join(bad[:6])}. "
                "Did the training diverge?"
            )
        trained = {name: copies.pop(name) for name in space.names}
        place = trained[space.names[0]].device  # "cuda" has become "cuda:0"
        return cls(model, space, trained, copies, place, kind, deterministic=deterministic)

    @property
    def point(self) -> Tensor:
        """ω̂ as one vector (P,)."""
        return self.parameters.flatten(self.trained)

    @cached_property
    def scale(self) -> Tensor | None:
        """The scales of all parameters, (P,); None where all are 1."""
        if not self.scales:
            return None
        space = self.parameters
        own = {
            name: torch.full(shape, self.scales[name], dtype=torch.float64)
            for name, shape in zip(space.names, space.shapes, strict=True)
        }
        return space.flatten(own).to(self.device, self.dtype)

    def outputs(self, trained: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The outputs z (B, C) at the parameters `trained`; differentiable in them."""
        args: tuple[Tensor, ...] = ()
        kwargs: dict[str, Tensor] = {}
        if isinstance(inputs, dict):
            kwargs = inputs
        else:
            args = inputs if isinstance(inputs, tuple) else (inputs,)
        state = {**self.constants, **trained}
        with AsDefined():
            result = torch.func.functional_call(self.model, state, args, kwargs)
        return _logits(result)

    def one_output(self, trained: Mapping[str, Tensor], example: Inputs) -> Tensor:
        """The outputs z (C,) of one example that has no batch dimension, for use under vmap."""
        return self.outputs(trained, map_leaves(lambda leaf: leaf.unsqueeze(0), example)).squeeze(0)

    def gradient(
        self,
        inputs: Inputs,
        total: Callable[[Tensor], Tensor],
        during: Callable[[Mapping[str, Tensor]], AbstractContextManager[Any]] | None = None,
    ) -> Tensor:
        """The gradient (P,) of a number that the outputs (B, C) give, at the trained point.

        Args:
            inputs: of the network.
            total: from the outputs to the number.
            during: gives, for the parameters, a context that the number is computed in.
        """
        trained = {name: value.clone().requires_grad_() for name, value in self.trained.items()}
        with torch.enable_grad(), during(trained) if during else nullcontext():
            number = total(self.outputs(trained, inputs))
            if not number.requires_grad:
                return torch.zeros_like(self.point)
        with torch.enable_grad():
            parts = torch.autograd.grad(number, list(trained.values()), materialize_grads=True)
        return self.parameters.flatten(dict(zip(trained, parts, strict=True)))

    def activation_bytes(self, inputs: Inputs) -> int:
        """The memory of everything that a forward pass keeps for its derivatives."""
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor.detach()  # itself it would keep alive, by way of what made it

        trained = {name: value.clone().requires_grad_() for name, value in self.trained.items()}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            outputs = self.outputs(trained, inputs)  # held, so that no storage is used twice
        for weight in [*trained.values(), *self.constants.values()]:
            sizes.pop(weight.untyped_storage().data_ptr(), None)
        return sum(sizes.values()) + outputs.nbytes

    def check_last_layer(self, examples: Inputs) -> None:
        """Refuse a `last_layer()` selection that cannot be what produces the outputs."""
        trained = {name: value.clone().requires_grad_() for name, value in self.trained.items()}
        with torch.enable_grad():
            columns = self.outputs(trained, examples).sum(0).unbind()  # (C,)
        weights = list(trained.values())
        reaches = dict.fromkeys(trained, True)
        for column in columns:
            parts: Sequence[Tensor] = [torch.zeros(1)] * len(weights)
            if column.requires_grad:
                parts = torch.autograd.grad(
                    column, weights, retain_graph=True, materialize_grads=True
                )
            for name, part in zip(trained, parts, strict=True):
                reaches[name] &= bool(part.any())
        for name, value in trained.items():
            if value.ndim < 1 or value.shape[0] != len(columns) or not reaches[name]:
                raise ModelError(
                    "last_layer(): expected the last registered layer to produce the outputs, got "
                    f"{name}, which does not. Name the right one with params=[…]."
                )

    def same_bits(self) -> AbstractContextManager[None]:
        """Deterministic algorithms alone, where they were asked for; a CPU has no others."""
        return same_bits(self.deterministic and self.device.type == "cuda")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Compute in eval mode and full precision; everything is as before afterwards.

        Another thread waits until this one is done with the model, whose flags, hooks and
        parameters are others in the meantime.
        """
        with _TURNS.at(self.model):
            yield from self._evaluation()

    def _evaluation(self) -> Iterator[None]:
        training = [module for module in self.model.modules() if module.training]
        # Hooks on gradients cannot run under torch.func, and have no say in the outputs.
        hooked = [
            (module, name, hooks)
            for module in self.model.modules()
            for name in ("_backward_hooks", "_backward_pre_hooks")
            if (hooks := getattr(module, name))
        ]
        for module in training:
            module.training = False
        for module, name, _ in hooked:
            setattr(module, name, OrderedDict())
        try:
            with self.same_bits(), full_precision(self.device), _not_compiled():
                yield
        finally:
            for module in training:
                module.training = True
            for module, name, hooks in hooked:
                setattr(module, name, hooks)


_TURNS = Turns()
_AS_WRITTEN = Shared(lambda: torch.compiler.set_stance("force_eager"))


def weighted_sum(outputs: Tensor) -> Tensor:
    """A number that each output (B, C) has another part in."""
    return (outputs * torch.arange(1, outputs.shape[1] + 1, device=outputs.device)).sum()


@contextmanager
def model_errors() -> Iterator[None]:
    """Say in terms of the user's model what `torch.func` could not do with it."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError) as error:
        if ran_out(error):
            raise
        raise ModelError(
            "Model: expected a forward pass that takes inputs of this shape and type and that "
            "torch can differentiate (no in-place changes of buffers, no branches on values); "
            f"torch says: {str(error).splitlines()[0]}"
        ) from error


def fingerprint(model: torch.nn.Module) -> str:
    """A digest of a model's whole state: names, shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    with _TURNS.at(model):
        state = model.state_dict()
    for name, value in sorted(state.items()):
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name}:{tuple(value.shape)}:{value.dtype};".encode())
        plain = value.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _not_compiled() -> AbstractContextManager[Any]:
    """Run models that were compiled as they were written: derivatives look inside."""
    if "torch._dynamo" not in sys.modules:  # then none is, and importing it takes seconds
        return nullcontext()
    return _AS_WRITTEN()


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
            f"Model output: expected logits of shape (B, C), got {tuple(result.shape)}. Wrap the "
            "model in a module that reshapes them."
        )
    return result
