"""A model at its trained point, as a pure function of a chosen subset of its parameters.

It is computed with a private copy of the user's module (see `private`), called with copies of its
parameters and buffers (`torch.func.functional_call`). Where there can be none, the module itself is
called, and everything about it is put back after each use.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltabars.errors import BadValueError, ModelError, ModelWarning, first_line, option
from deltabars.problem.definitions import AsDefined
from deltabars.problem.inputs import Inputs, map_leaves
from deltabars.problem.parameters import (
    LastLayer,
    ParameterSpace,
    Selection,
    as_written,
    plain_model,
)
from deltabars.problem.private import Seen, named_state, private_copy
from deltabars.runtime.memory import ran_out
from deltabars.runtime.precision import (
    Shared,
    Turns,
    draws_numbers,
    full_precision,
    same_bits,
    working_dtype,
)


@dataclass(frozen=True, eq=False)
class Network:
    """The outputs z of a model, as a function of `parameters` around the trained values ω̂.

    Attributes:
        model: a private copy of the user's module; the module itself where there can be none.
        weights: the fingerprint of the module's state.
        given: the module itself, as long as the copy is not tried out (see `settled`).
        held: names of parameters and buffers that the forward pass reaches not through their
            modules alone, but through a list or a closure, say.
    """

    model: torch.nn.Module
    parameters: ParameterSpace
    trained: Mapping[str, Tensor]  # ω̂ by name, copied, on `device` in `dtype`
    constants: Mapping[str, Tensor]  # the other parameters and the buffers, likewise
    device: torch.device
    dtype: torch.dtype
    # By parameter: derivatives are by ω/scale, that is, times the scale; empty for plain ones.
    scales: Mapping[str, float] = field(default_factory=dict)
    deterministic: bool = False  # whether a GPU is to give the same bits each time
    weights: str = ""
    given: torch.nn.Module | None = None
    is_private: bool = True
    held: frozenset[str] = frozenset()

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
            state = named_state(model)
            devices = {value.device for value in state.values()}
            if device is None and len(devices) > 1:
                raise ModelError(
                    f"Expected a model on one device, got {sorted(map(str, devices))}. "
                    "Move it with model.to(…), or name the device to compute on with "
                    f"{option('device=')}."
                )
            own = state[space.names[0]].dtype
            kind = working_dtype(own, dtype)
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
            weights = [as_written(name) for name, _ in model.named_parameters()]
            digest = fingerprint(model)
            try:
                private = private_copy(model, copies, own)
            except Exception:  # of the user's own; what is wrong is seen when it is called
                private = model
        bad = [name for name in weights if not bool(copies[name].isfinite().all())]
        if bad:
            raise ModelError(
                f"Expected finite weights, got NaN or infinity in {', '.join(bad[:6])}. "
                "Did the training diverge?"
            )
        trained = {name: copies.pop(name) for name in space.names}
        place = trained[space.names[0]].device  # "cuda" has become "cuda:0"
        return cls(
            private,
            space,
            trained,
            copies,
            place,
            kind,
            deterministic=deterministic,
            weights=digest,
            given=model,
        )

    def settled(self, inputs: Inputs) -> Network:
        """The same with a private copy that some inputs have shown to be one; or with none.

        A copy is none where it fails, uses tensors of the model itself, or computes something else.
        """
        given = self.given
        if given is None:
            return self
        named = {id(value): name for name, value in named_state(given).items()}
        own = {id(value): f"own {name}" for name, value in named_state(self.model).items()}
        seen = Seen(named | own)
        problem = ""
        try:
            with self.evaluation(), seen:
                outputs = self.outputs(self.trained, inputs)
        except Exception as error:
            if ran_out(error):
                raise
            problem = f"a copy fails ({type(error).__name__}: {first_line(error)})"
        held = {name for name in seen.names if not name.startswith("own ")}
        if held or self.model is given:
            problem = f"it refers to {min(held)} from elsewhere" if held else "it has no copy"
        elif not problem and self._is_another(given, inputs, outputs):
            problem = "a copy computes something else"
        if not problem:
            held = {name.removeprefix("own ") for name in seen.names}
            return replace(self, given=None, held=frozenset(held))
        result = replace(self, given=None, model=given, is_private=False, held=frozenset(held))
        with result.evaluation():
            result.outputs(self.trained, inputs)  # errors of the model come before the warning
        warnings.warn(
            f"Model: expected one that can be copied, got one that cannot ({problem}). It is "
            "called itself: no other thread may call it while a fit or a prediction runs, and its "
            "parameters must keep their names.",
            ModelWarning,
            stacklevel=4,
        )
        return result

    def _is_another(self, given: torch.nn.Module, inputs: Inputs, outputs: Tensor) -> bool:
        """Whether the model itself has other outputs; not known where it would be altered."""
        state, copies = named_state(given), {**self.constants, **self.trained}
        unlike = any(module.training for module in given.modules()) or any(
            (value.device, value.dtype) != (copies[name].device, copies[name].dtype)
            or not torch.equal(value.detach(), copies[name])
            for name, value in state.items()
        )
        if unlike:
            return False
        args, kwargs = _arguments(inputs)
        with _TURNS.at(given), self.evaluation(), AsDefined():
            found = _logits(given(*args, **kwargs))
            return not same_outputs(found, outputs) and not self.is_random(inputs)

    def is_random(self, inputs: Inputs) -> bool:
        """Whether the same inputs give different outputs from pass to pass.

        A pass that draws random numbers is suspected, and repeated far more often, so that what
        happens in a few passes of a hundred is seen. Cost: up to `_PASSES` on two inputs, for as
        long as `_SECONDS`.
        """
        few = map_leaves(lambda leaf: leaf[:2], inputs)
        suspected = draws_numbers(lambda: self.outputs(self.trained, few))
        first, started = self.outputs(self.trained, few), time.perf_counter()
        for _ in range(_PASSES[suspected]):
            if not same_outputs(self.outputs(self.trained, few), first):
                return True
            if time.perf_counter() - started > _SECONDS[suspected]:
                break
        whole = self.outputs(self.trained, inputs)
        return not same_outputs(self.outputs(self.trained, inputs), whole)

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
        state = {**self.constants, **trained}
        held = {}
        if self.held:
            own = named_state(self.model)
            held = {id(own[name]): state[name] for name in self.held}
        if not self.is_private:  # of which parts may be compiled
            state = {name: state[as_written(name)] for name in _names(self.model)}
        with AsDefined(held):
            return _logits(torch.func.functional_call(self.model, state, *_arguments(inputs)))

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
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                outputs = self.outputs(trained, inputs)  # held, so that no storage is used twice
        except RuntimeError as error:  # of torch.func in the forward pass, which bars such hooks
            if ran_out(error):
                raise
            with cast(Any, _Sizes)() as mode:
                self.outputs(self.trained, inputs)
            return int(mode.total)
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
                    f"{option('params', LastLayer())}: expected the last registered layer to "
                    f"produce the outputs, got {name}, which does not. Name the right one with "
                    f"{option('params=')}."
                )

    def same_bits(self) -> AbstractContextManager[None]:
        """Deterministic algorithms alone, where they were asked for; a CPU has no others."""
        return same_bits(self.deterministic and self.device.type == "cuda")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Compute in eval mode and full precision; everything is as before afterwards.

        Another thread waits until this one is done with the model, whose parameters are others in
        the meantime; where it is the user's, its flags and hooks as well.

        Raises:
            ModelError: it is the user's, and its parameters have other names than at the fit.
        """
        with _TURNS.at(self.model):
            self._check_names()
            yield from self._evaluation()

    def _check_names(self) -> None:
        if self.is_private:
            return
        expected = {*self.trained, *self.constants}
        found = {as_written(name) for name in _names(self.model)}
        if found != expected:
            raise ModelError(
                "Model: the model's parameters were renamed since the fit: missing "
                f"{_some(expected - found)}; new {_some(found - expected)}. Bring it back to what "
                "it was, or fit again."
            )

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
            with self.same_bits(), full_precision(self.device), _not_compiled(), _plain_calls():
                yield
        finally:
            for module in training:
                module.training = True
            for module, name, hooks in hooked:
                setattr(module, name, hooks)


_TURNS = Turns()
_ROUNDING = 100  # units in the last place of the largest output
# Of passes that draw no random numbers, and of those that do.
_PASSES, _SECONDS = (60, 400), (0.05, 4.0)
_AS_WRITTEN = Shared(lambda: torch.compiler.set_stance("force_eager"))


def _names(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "") or "none"


def _arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The arguments of a forward pass, in tensors that it may change."""
    own = map_leaves(torch.clone, inputs)
    if isinstance(own, dict):
        return (), own
    return (own if isinstance(own, tuple) else (own,)), {}


def same_outputs(a: Tensor, b: Tensor) -> bool:
    """Whether outputs are the same but for rounding, NaN counted as a value."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    scale = float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
    near = (a - b).abs() <= _ROUNDING * torch.finfo(b.dtype).eps * scale
    return bool((near | (a == b) | (a.isnan() & b.isnan())).all())


def weighted_sum(outputs: Tensor) -> Tensor:
    """A number that each output (B, C) has another part in."""
    return (outputs * torch.arange(1, outputs.shape[1] + 1, device=outputs.device)).sum()


@contextmanager
def model_errors(advice: str = "") -> Iterator[None]:
    """Say in terms of the user's model what `torch.func` could not do with it; and an advice."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError) as error:
        if ran_out(error):
            raise
        raise ModelError(
            "Model: expected a forward pass that takes inputs of this shape and type and that "
            "torch can differentiate (no in-place changes of buffers, no branches on values); "
            f"torch says: {first_line(error)}{advice}"
        ) from error
    except AttributeError as error:
        raise ModelError(
            f"Model: expected a forward pass that runs, got an error ({first_line(error)}). Was a "
            "part of the model deleted or renamed?"
        ) from error


def fingerprint(model: torch.nn.Module) -> str:
    """A digest of a model's whole state: names, shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    with _TURNS.at(model):
        state = {as_written(name): value for name, value in model.state_dict().items()}
    for name, value in sorted(state.items()):
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name}:{tuple(value.shape)}:{value.dtype};".encode())
        plain = value.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _calls_instead_of_checkpoints() -> Iterator[None]:
    """In this thread `torch.utils.checkpoint` calls what it is given, which computes the same.

    It saves memory by a second forward pass amid the backward one, which no mode or transform sees.
    """
    again = _CHECKPOINTS._checkpoint_without_reentrant_generator
    reentrant = _CHECKPOINTS.CheckpointFunction

    def nothing() -> Iterator[None]:
        yield

    def without(*args: Any, **kwargs: Any) -> Any:
        return nothing() if getattr(_HERE, "depth", 0) else again(*args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            if getattr(_HERE, "depth", 0):
                return function(*args)
            return reentrant.apply(function, preserve, *args)

    _CHECKPOINTS._checkpoint_without_reentrant_generator = without
    _CHECKPOINTS.CheckpointFunction = Reentrant
    try:
        yield
    finally:
        _CHECKPOINTS._checkpoint_without_reentrant_generator = again
        _CHECKPOINTS.CheckpointFunction = reentrant


_CHECKPOINTS: Any = torch.utils.checkpoint
_HERE = threading.local()
_checkpoints = Shared(_calls_instead_of_checkpoints)


@contextmanager
def _plain_calls() -> Iterator[None]:
    _HERE.depth = getattr(_HERE, "depth", 0) + 1
    try:
        with _checkpoints():
            yield
    finally:
        _HERE.depth -= 1


class _Sizes(TorchDispatchMode):
    """Adds up the memory of all results."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += sum(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


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
