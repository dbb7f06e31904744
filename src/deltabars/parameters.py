"""A named subset of a model's parameters, and its one flat vector."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deltabars.errors import BadValueError, ModelError
from deltabars.plain import as_written

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
    def places(self) -> dict[str, slice]:
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
