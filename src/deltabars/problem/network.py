"""A model at its trained point, as a pure function of a chosen subset of its parameters.

It is computed with a private copy of the user's module (see `parameters.private_copy`), called with
tensors of the fit's own (`torch.func.functional_call`).
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deltabars.errors import BadValueError, ModelError, first_line, option
from deltabars.problem.data import (
    GENERATED,
    Inputs,
    Ranges,
    Signature,
    map_leaves,
    tensor_bytes,
)
from deltabars.problem.definitions import DEFINITIONS
from deltabars.problem.parameters import (
    LastLayer,
    ParameterSpace,
    Selection,
    as_written,
    named_state,
    plain_model,
    private_copy,
)
from deltabars.runtime.memory import ran_out
from deltabars.runtime.precision import (
    Shared,
    Turns,
    draws_numbers,
    full_precision,
    same_bits,
    working_dtype,
)

_TURNS = Turns()
_ROUNDING = 100  # units in the last place of the largest output
# Of passes that draw no random numbers, and of those that do.
_PASSES, _SECONDS = (60, 400), (0.05, 4.0)
_AS_WRITTEN = Shared(lambda: torch.compiler.set_stance("force_eager"))
# Relative to the largest output of each column: what batches of other sizes differ by.
_OTHER_SIZE = {torch.float32: 1e-4, torch.float64: 1e-9}
_OF_NOISE = 30  # how many times the change by rounded weights is still rounding
MOST_GENERATED = 1 << 24  # numbers of the inputs that tell what a network computes
# Relative to the largest output: devices and versions round differently, models differ by more.
_SAME = {torch.float64: 1e-8, torch.float32: 1e-4}
_SHARE = 32  # of a batch one example more is run a second time for so many


@dataclass(frozen=True, eq=False)
class Network:
    """The outputs z of a model, as a function of `parameters` around the trained values ω̂."""

    model: torch.nn.Module  # a private copy of the user's
    parameters: ParameterSpace
    trained: Mapping[str, Tensor]  # ω̂ by name, copied, on `device` in `dtype`
    constants: Mapping[str, Tensor]  # the other parameters and the buffers, likewise
    device: torch.device
    dtype: torch.dtype
    # By parameter: derivatives are by ω/scale, that is, times the scale; empty for plain ones.
    scales: Mapping[str, float] = field(default_factory=dict)
    deterministic: bool = False  # whether a GPU is to give the same bits each time
    weights: str = ""  # the fingerprint of the module's state
    given: torch.nn.Module | None = None  # the module itself, until the copy is verified

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
            space = selection
            if not isinstance(space, ParameterSpace):
                space = ParameterSpace.select(model, space)
            state = named_state(model)
            devices = {value.device for value in state.values()}
            if device is None and len(devices) > 1:
                raise ModelError(
                    f"Expected a model on one device, got {sorted(map(str, devices))}. Move it "
                    f"with model.to(…), or name the device with {option('device=')}."
                )
            own = state[space.names[0]].dtype
            kind = working_dtype(own, dtype)
            types = {name: kind for name in state if state[name].is_floating_point()}
            try:
                place = torch.device(device) if device is not None else next(iter(devices))
                with torch.inference_mode(False):  # derivatives cannot be taken of what it makes
                    copies = {
                        name: value.detach().to(place, types.get(name), copy=True)
                        for name, value in state.items()
                    }
            except (RuntimeError, AssertionError, TypeError) as error:
                raise BadValueError(
                    f"device: expected one that torch has here, got {device!r} "
                    f"({first_line(error)})."
                ) from error
            digest = weights_fingerprint(model)
            private = private_copy(model, copies, own, kind)
        weights = [name for name in state if isinstance(state[name], torch.nn.Parameter)]
        bad = ", ".join([name for name in weights if not copies[name].isfinite().all()][:6])
        if bad:
            raise ModelError(
                f"Expected finite weights, got NaN or infinity in {bad}. Did the training diverge?"
            )
        trained = {name: copies.pop(name) for name in space.names}
        place = trained[space.names[0]].device  # "cuda" has become "cuda:0"
        return cls(
            private, space, trained, copies, place, kind, {}, deterministic, digest, given=model
        )  # fmt: skip

    def verified(self, inputs: Inputs) -> Network:
        """Check on some inputs that the private copy computes what the module computes, on its own.

        It must not use tensors of the module, or some of its own other than by way of their module,
        so that derivatives miss them.
        """
        if (given := self.given) is None:
            return self
        named = [*named_state(given).items(), *named_state(self.model).items()]
        calls = _Calls()
        with self.evaluation(), calls:
            outputs = self.outputs(self.trained, inputs)
        used = {name for name, value in named if id(value) in calls.taken}
        if used or self._is_another(given, inputs, outputs):
            problem = f"it uses {min(used)} otherwise" if used else "a copy computes something else"
            raise ModelError(
                "Model: expected one that uses its parameters and buffers as attributes of its "
                f"modules (self.layer.weight) alone, got one that does not: {problem}. Global "
                "names, closures, lists of parameters and identities do not lead to a copy's own."
            )
        return replace(self, given=None)

    def _is_another(self, given: torch.nn.Module, inputs: Inputs, outputs: Tensor) -> bool:
        """Return whether the module has other outputs; not known where that would alter it."""
        copies = {**self.constants, **self.trained}
        if any(module.training for module in given.modules()) or any(
            (value.device, value.dtype) != (copies[name].device, copies[name].dtype)
            or not torch.equal(value.detach(), copies[name])
            for name, value in named_state(given).items()
        ):
            return False
        with _TURNS.at(given), self.evaluation(), AsDefined():
            args, kwargs = _arguments(inputs)
            found = _logits(given(*args, **kwargs))
            return not same_outputs(found, outputs) and not self.is_random(inputs)

    def is_random(self, inputs: Inputs) -> bool:
        """Return whether the same inputs give different outputs from pass to pass.

        Two inputs are passed up to `_PASSES` times, for as long as `_SECONDS`: far more often where
        random numbers are drawn, so that what happens in a few passes of a hundred is seen.
        """
        few = map_leaves(lambda leaf: leaf[:2], inputs)
        suspected = draws_numbers(lambda: self.outputs(self.trained, few))
        first, started = self.outputs(self.trained, few), time.perf_counter()
        for _ in range(_PASSES[suspected]):
            if not same_outputs(self.outputs(self.trained, few), first):
                return True
            if time.perf_counter() - started > _SECONDS[suspected]:
                break
        return not same_outputs(*(self.outputs(self.trained, inputs) for _ in range(2)))

    @property
    def point(self) -> Tensor:
        """ω̂ as one vector (P,)."""
        return self.parameters.flatten(self.trained)

    @cached_property
    def scale(self) -> Tensor | None:
        """The scales of all parameters, (P,); None where all are 1."""
        if not self.scales:
            return None
        parts = {
            name: torch.full_like(each, self.scales[name]) for name, each in self.trained.items()
        }
        return self.parameters.flatten(parts)

    def _variables(self) -> dict[str, Tensor]:
        """Return copies of the trained values to take derivatives by."""
        return {name: value.clone().requires_grad_() for name, value in self.trained.items()}

    def outputs(self, trained: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Compute the outputs z (B, C) at the parameters `trained`; differentiable in them."""
        state = {**self.constants, **trained}
        with AsDefined():
            return _logits(torch.func.functional_call(self.model, state, *_arguments(inputs)))

    def one_output(self, trained: Mapping[str, Tensor], example: Inputs) -> Tensor:
        """Compute z (C,) of one example that has no batch dimension, for use under vmap."""
        return self.outputs(trained, map_leaves(lambda leaf: leaf.unsqueeze(0), example)).squeeze(0)

    def gradient(self, inputs: Inputs, total: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the gradient (P,) of a number `total` that outputs (B, C) give, at ω̂."""
        trained = self._variables()
        with torch.enable_grad():
            number = total(self.outputs(trained, inputs))
            if not number.requires_grad:
                return torch.zeros_like(self.point)
            parts = torch.autograd.grad(number, list(trained.values()), materialize_grads=True)
        return self.parameters.flatten(dict(zip(trained, parts, strict=True)))

    def activation_bytes(self, inputs: Inputs) -> int:
        """Measure the memory of everything that a forward pass keeps for its derivatives."""
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor.detach()  # itself it would keep alive, by way of what made it

        trained = self._variables()
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                outputs = self.outputs(trained, inputs)  # held, so that no storage is used twice
        except RuntimeError as error:  # of torch.func in the forward pass, which bars such hooks
            if ran_out(error):
                raise
            with _Calls() as calls:
                self.outputs(self.trained, inputs)
            return calls.bytes
        for weight in [*trained.values(), *self.constants.values()]:
            sizes.pop(weight.untyped_storage().data_ptr(), None)
        return sum(sizes.values()) + outputs.nbytes

    def check_last_layer(self, examples: Inputs) -> None:
        """Refuse a `last_layer()` selection that cannot be what produces the outputs."""
        trained = self._variables()
        with torch.enable_grad():
            columns = self.outputs(trained, examples).sum(0).unbind()  # (C,)
        for name, value in trained.items():
            is_last = value.ndim > 0 and len(value) == len(columns)
            for column in columns if is_last and columns[0].requires_grad else ():
                (part,) = torch.autograd.grad(column, value, retain_graph=True, allow_unused=True)
                is_last &= part is not None and bool(part.any())
            if not is_last:
                raise ModelError(
                    f"{option('params', LastLayer())}: expected the last registered layer to "
                    f"produce the outputs, got {name}, which does not. Name the right one with "
                    f"{option('params=')}."
                )

    def check_independence(self, inputs: Inputs, outputs: Tensor, *, closely: bool = False) -> None:
        """Refuse outputs (B, C) that are others where an example has other company.

        A few examples are run again, in another order; `closely`, as many, drawn with replacement,
        half of them backwards, and some alone.
        """
        count, outputs = len(outputs), outputs.detach()
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
                is_same = self._is_independent(inputs, outputs, chosen)
            except RuntimeError as error:  # a model that takes batches in one order alone, say
                if ran_out(error) or len(sample) == 1:
                    raise
                is_same = self._is_independent(inputs, outputs, chosen.sort().values)
            if not is_same:
                raise ModelError(
                    "Model output: expected that of one example not to depend on the rest of its "
                    "batch, got one that does. Batch norm needs its running statistics "
                    "(track_running_stats=True), recurrent layers batch_first=True."
                )

    def _is_independent(self, inputs: Inputs, outputs: Tensor, sample: Tensor) -> bool:
        """Return whether some examples have the same outputs alone, but for rounding."""
        some, expected = map_leaves(lambda leaf: leaf[sample], inputs), outputs[sample]
        try:
            found = self.outputs(self.trained, some)
        except ValueError:  # statistics of a batch that has a single example
            return False
        if found.shape != expected.shape:
            return False
        gap, scale = (found - expected).abs().amax(0), outputs.abs().amax(0)
        over = gap > _OTHER_SIZE[self.dtype] * scale
        if not bool(gap.isfinite().all()) or not bool(over.any()):
            return True  # outputs that are not finite have an error of their own
        return not bool((gap > _OF_NOISE * self._noise(some, found))[over].any())

    def _noise(self, inputs: Inputs, outputs: Tensor) -> Tensor:
        """Measure how far outputs move with weights rounded as coarsely as any result is, (C,)."""
        with _Calls() as calls:
            self.outputs(self.trained, inputs)
        generator = torch.Generator().manual_seed(0)
        eps = max((torch.finfo(kind).eps for kind in calls.kinds), default=0.0)

        def rounded(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            step = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            return value * (1 + eps * step.to(value.device)).to(value.dtype)

        state = {**self.trained, **self.constants}
        state = {name: rounded(value) for name, value in state.items()}
        moved = self.outputs(state, map_leaves(rounded, inputs))
        return (moved - outputs).abs().amax(0)

    def same_bits(self) -> AbstractContextManager[None]:
        """Ask for deterministic algorithms, where they are wanted; a CPU has no others."""
        return same_bits(self.deterministic and self.device.type == "cuda")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Compute in full precision, models as they were written, and in one thread at a time."""
        # Without `_dynamo` nothing is compiled, and importing it takes seconds.
        eager = _AS_WRITTEN() if "torch._dynamo" in sys.modules else nullcontext()
        with _TURNS.at(self.model), full_precision(self.device), self.same_bits(), eager, _plain():
            yield


@contextmanager
def _calls_instead_of_checkpoints() -> Iterator[None]:
    checkpoints: Any = torch.utils.checkpoint
    reentrant = checkpoints.CheckpointFunction
    again = checkpoints._checkpoint_without_reentrant_generator

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            return function(*args) if _CALLING.get() else reentrant.apply(function, preserve, *args)

    checkpoints.CheckpointFunction = Reentrant
    checkpoints._checkpoint_without_reentrant_generator = lambda *args, **kwargs: (
        iter([None]) if _CALLING.get() else again(*args, **kwargs)
    )
    try:
        yield
    finally:
        checkpoints.CheckpointFunction = reentrant
        checkpoints._checkpoint_without_reentrant_generator = again


_CALLING = ContextVar("_CALLING", default=False)  # in this thread
_calls = Shared(_calls_instead_of_checkpoints)


@contextmanager
def _plain() -> Iterator[None]:
    """Call in this thread what `torch.utils.checkpoint` is given, which computes the same.

    It saves memory by a second forward pass amid the backward one, which no transform sees.
    """
    token = _CALLING.set(True)
    try:
        with _calls():
            yield
    finally:
        _CALLING.reset(token)


@dataclass(frozen=True)
class Behaviour:
    """What a network computes, to tell it from others with the same weights."""

    ranges: Ranges  # of generated inputs (see `Signature.generate`); empty where there are none
    outputs: Tensor  # of those inputs, in float64

    @classmethod
    def of(cls, network: Network, signature: Signature, ranges: Ranges) -> Behaviour:
        """Note what a network computes. Cost: a forward pass of a few inputs."""
        if sum(GENERATED * math.prod(shape) for shape, _, _ in ranges) <= MOST_GENERATED:
            outputs = _generated_outputs(network, signature, ranges)
            if outputs is not None and bool(outputs.isfinite().all()):
                return cls(ranges, outputs)
        return cls((), torch.zeros(0, 0, dtype=torch.float64))

    def difference(self, network: Network, signature: Signature) -> str:
        """Describe how a network differs from the one that is noted; empty if it does not."""
        if not self.ranges:
            return ""
        outputs = _generated_outputs(network, signature, self.ranges)
        if outputs is None:
            return "it does not take the inputs that it took"
        if outputs.shape != self.outputs.shape:
            return f"it has {outputs.shape[1]} outputs, not {self.outputs.shape[1]}"
        gap, scale = (float(x.abs().max()) for x in (outputs - self.outputs, self.outputs))
        if gap <= _SAME[network.dtype] * scale:
            return ""
        return f"outputs of generated inputs differ by {gap / (scale or 1.0):.2g} of the largest"


def _generated_outputs(network: Network, signature: Signature, ranges: Ranges) -> Tensor | None:
    """Compute the outputs of generated inputs; None where the model does not take any numbers."""
    try:
        with network.evaluation():
            inputs = signature.generate(ranges, network.device, network.dtype)
            return network.outputs(network.trained, inputs).double().cpu()
    except Exception as error:  # of the user's own
        if ran_out(error):
            raise
        return None


class AsDefined(TorchFunctionMode):
    """Computes operations by their `DEFINITIONS`; it costs a microsecond a call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or what it is made of."""
        return DEFINITIONS.get(func, func)(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Notes what torch's functions take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: set[int] = set()  # identities of what they take
        self.kinds: set[torch.dtype] = set()  # floating types: a part may be computed in float16
        self.bytes = 0  # that they return in all

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and note its arguments and the types of its results."""
        result = func(*args, **(kwargs or {}))
        self.taken |= {id(leaf) for leaf in tree_leaves((args, kwargs))}
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.kinds |= {leaf.dtype for leaf in found if leaf.is_floating_point()}
        self.bytes += sum(leaf.nbytes for leaf in found)
        return result


def _arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the arguments of a forward pass, in tensors that it may change."""
    own = map_leaves(torch.clone, inputs)
    return ((), own) if isinstance(own, dict) else (own if isinstance(own, tuple) else (own,), {})


def same_outputs(a: Tensor, b: Tensor) -> bool:
    """Return whether outputs are the same but for rounding, NaN counted as a value."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    scale = float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
    near = (a - b).abs() <= _ROUNDING * torch.finfo(b.dtype).eps * scale
    return bool((near | (a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def model_errors(advice: str = "") -> Iterator[None]:
    """Say in terms of the user's model what `torch.func` could not do with it; and an advice."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        if ran_out(error):
            raise
        raise ModelError(
            "Model: expected a forward pass that takes inputs of this shape and type and that "
            "torch can differentiate (no in-place changes of buffers, no branches on values); "
            f"torch says: {first_line(error)}{advice}"
        ) from error


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Return a digest of a model's state as files have it: names, shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    with _TURNS.at(model):
        state = {as_written(name): value for name, value in model.state_dict().items()}
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name}:{tuple(value.shape)}:{value.dtype};".encode())
            digest.update(tensor_bytes(value))
    return digest.hexdigest()


def _logits(result: object) -> Tensor:
    if isinstance(result, Mapping) and "logits" in result:
        result = result["logits"]
    result = getattr(result, "logits", result)
    if isinstance(result, Tensor) and result.ndim == 2:
        return result
    got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise ModelError(
        "Model output: expected logits, a tensor of shape (B, C), or an object with .logits, got "
        f"{got}. Wrap the model in a module that returns them so."
    )
