"""Models within what trains them on several processes, or compiles them."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deltabars.errors import BadValueError, ModelError

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_FSDP = "torch.distributed.fsdp"
_COMPILED = "_orig_mod"


def plain_model(model: Any) -> torch.nn.Module:
    """The module within those that train it on several processes, or compile it.

    Raises:
        ModelError: it is no module, has no code of Python or no weights yet, or each process has a
            part of its parameters alone.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    while (inside := as_written(model)) is not model or isinstance(model, _WRAPPERS):
        model = model.module if isinstance(model, _WRAPPERS) else inside
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError(
            "model: expected a module of Python code, got one of TorchScript, whose parameters "
            "cannot be exchanged. Give the module that it was made from."
        )
    kinds = [_kind("torch.distributed.tensor", "DTensor"), _kind(_FSDP, "FullyShardedDataParallel")]
    sharded = tuple(kind for kind in kinds if kind is not None)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = [name for name, value in tensors.items() if is_lazy(value) or value.is_meta]
    if empty:
        raise ModelError(
            f"model: expected weights, got {len(empty)} tensors without values ({empty[0]}"
            f"{', …' if len(empty) > 1 else ''}), on the meta device or not initialised. Load the "
            "weights first: model.to_empty(device=…) and load_state_dict(…), or one forward pass "
            "of a lazy module."
        )
    parts = [*model.modules(), *tensors.values()]
    found = next((part for part in parts if isinstance(part, sharded)), None)
    if found is not None:
        raise ModelError(
            f"model: expected whole parameters on every process, got {type(found).__name__}, which "
            "has a part of them on each. Load a full state dict into a plain model: "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict."
        )
    return model


@overload
def as_written(given: str) -> str: ...
@overload
def as_written(given: torch.nn.Module) -> torch.nn.Module: ...
def as_written(given: str | torch.nn.Module) -> str | torch.nn.Module:
    """The module that was compiled, or the name of a parameter in it; others as they are."""
    if isinstance(given, str):
        return given.replace(f"{_COMPILED}.", "")
    compiled = _kind("torch._dynamo.eval_frame", "OptimizedModule")
    return getattr(given, _COMPILED) if compiled and isinstance(given, compiled) else given


def _kind(module: str, name: str) -> type | None:
    """A class of torch, where its module is in use; None where it is not."""
    return getattr(sys.modules.get(module), name, None)


Predicate = Callable[..., bool]


@dataclass(frozen=True)
class LastLayer:
    """A selection that is resolved when a model is at hand (see `last_layer`)."""

    def names(self, model: torch.nn.Module) -> list[str]:
        """The parameters held directly by the last registered module that holds any."""
        last: list[str] = []
        for prefix, module in model.named_modules():
            own = [name for name, _ in module.named_parameters(prefix=prefix, recurse=False)]
            last = [as_written(name) for name in own] or last
        if not last:
            raise ModelError("Expected a model with parameters, got one without any.")
        return last

    def __repr__(self) -> str:
        return "last_layer()"


Selection = str | Sequence[str] | Predicate | LastLayer | None


def last_layer(model: torch.nn.Module | None = None) -> LastLayer | list[str]:
    """Select the parameters of a model's last layer: `fit(…, params=last_layer())`.

    The last layer is the last module, in the order of registration, that holds parameters of its
    own; `fit` checks that it produces the model's outputs. With a model the names are returned, to
    look at them.

    Example:
        >>> import torch, deltabars
        >>> deltabars.last_layer(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
        ['1.weight', '1.bias']
    """
    return LastLayer() if model is None else LastLayer().names(model)


@dataclass(frozen=True)
class ParameterSpace:
    """Named parameters and their places in one flat vector of P numbers, in the model's order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each parameter holds."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def slices(self) -> dict[str, slice]:
        """Where in the flat vector each parameter is."""
        ends = list(accumulate(self.sizes))
        return {
            name: slice(end - size, end)
            for name, size, end in zip(self.names, self.sizes, ends, strict=True)
        }

    @classmethod
    def select(cls, model: torch.nn.Module, selection: Selection = None) -> ParameterSpace:
        """The parameters of `model` that `selection` names.

        Args:
            model: any module. Tied weights count once, under their first name.
            selection: `None` for all; a shell-style name pattern or a list of them (`"fc*"`,
                `"*.bias"`); a predicate of the name, or of the name and the parameter;
                or `last_layer()`.

        Raises:
            ModelError: the model has no parameters, or a selected one is frozen.
            BadValueError: a pattern or a predicate selects nothing.
        """
        parameters = {as_written(name): value for name, value in model.named_parameters()}
        if not parameters:
            raise ModelError("Expected a model with parameters, got one without any.")
        chosen = _chosen_names(model, parameters, selection)
        names = tuple(name for name in parameters if name in chosen)
        frozen = [name for name in names if not parameters[name].requires_grad]
        if frozen:
            raise ModelError(
                f"Expected trained parameters, got {len(frozen)} frozen ones "
                f"(requires_grad=False): {_shorten(frozen)}. Leave them out with "
                "params=lambda name, p: p.requires_grad, or unfreeze them if they were trained."
            )
        return cls(names, tuple(tuple(parameters[name].shape) for name in names))

    def flatten(self, tensors: Mapping[str, Tensor], batch_dims: int = 0) -> Tensor:
        """Join named tensors (…, *shape) into one tensor (…, P)."""
        return torch.cat([tensors[name].flatten(batch_dims) for name in self.names], dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a tensor (…, P) into named tensors (…, *shape), each with memory of its own.

        Views would begin anywhere in the vector, which `torch.view_as_complex` does not support.
        """
        batch = vector.shape[:-1]
        parts = vector.split(self.sizes, dim=-1)
        return {
            name: part.reshape((*batch, *shape)).clone(memory_format=torch.contiguous_format)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


def _chosen_names(
    model: torch.nn.Module, parameters: Mapping[str, Tensor], selection: Selection
) -> set[str]:
    if selection is None:
        return set(parameters)
    if isinstance(selection, LastLayer):
        selection = selection.names(model)
    if callable(selection) and not isinstance(selection, torch.nn.Module):
        return _by_predicate(parameters, selection)
    given = [selection] if isinstance(selection, str) else selection
    patterns = list(given) if isinstance(given, Iterable) else []
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise BadValueError(
            f"params: expected None, name patterns or a predicate, got {selection!r}. "
            'Give patterns such as ["fc*", "*.bias"].'
        )
    return _by_patterns(model, parameters, patterns)


def _by_predicate(parameters: Mapping[str, Tensor], predicate: Predicate) -> set[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        parameter
        for parameter in inspect.signature(predicate).parameters.values()
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty
    ]
    takes_one = len(needed) == 1
    chosen = {
        name
        for name, value in parameters.items()
        if (predicate(name) if takes_one else predicate(name, value))
    }
    if not chosen:
        raise BadValueError(
            "params: expected a predicate that selects at least one parameter, got one that "
            f"selects none of {_shorten(list(parameters))}."
        )
    return chosen


def _by_patterns(
    model: torch.nn.Module, parameters: Mapping[str, Tensor], patterns: Sequence[str]
) -> set[str]:
    first_name = {id(value): name for name, value in parameters.items()}
    named = model.named_parameters(remove_duplicate=False)
    aliases = {as_written(name): value for name, value in named}
    chosen: set[str] = set()
    for pattern in map(as_written, patterns):
        matched = [name for name in aliases if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, list(aliases), n=3) or list(aliases)
            raise BadValueError(
                f"params: expected a pattern that matches a parameter, got {pattern!r}, which "
                f"matches none. The model has {_shorten(close)}."
            )
        chosen.update(first_name[id(aliases[name])] for name in matched)
    return chosen


def _shorten(names: Sequence[str], limit: int = 6) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
