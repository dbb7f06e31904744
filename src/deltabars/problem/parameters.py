"""The user's module: within its wrappers, copied, which of its parameters count, and with which λ.

With λᵢ for parameter i and D = diag(λᵢ) the cost is mean loss + ½ ωᵀDω, and its curvature A + D.
In the coordinates ω' = S⁻¹ω, S = D^{-½}, that becomes S A S + I: the same form as with a single λ,
which is 1 there. Derivatives by ω' are those by ω times S, and everything else stays as it is.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import inspect
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from deltabars.errors import BadValueError, ModelError, first_line, is_option

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_COMPILED = "_orig_mod"
# What trains or feeds a module has no say in its outputs, and may be large.
_SERVICES = (
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset, torch.utils.data.DataLoader,
)  # fmt: skip
# Hooks that cannot run under torch.func, or have no say in the outputs.
_UNUSED_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_SAME = 1e-9  # relative: levels of parameters that are meant to be one


def plain_model(model: Any) -> nn.Module:
    """Return the module within those that train it on several processes, or compile it."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    while (inside := as_written(model)) is not model or isinstance(model, _WRAPPERS):
        model = model.module if isinstance(model, _WRAPPERS) else inside
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError(
            "model: expected a module of Python code, got one of TorchScript, whose parameters "
            "cannot be exchanged. Give the module that it was made from."
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = [name for name, value in tensors.items() if is_lazy(value) or value.is_meta]
    if empty:
        raise ModelError(
            f"model: expected weights, got {len(empty)} tensors without values ({_few(empty, 1)}), "
            "on the meta device or not initialised. Load the weights first: "
            "model.to_empty(device=…) and load_state_dict(…), or one forward pass of a lazy module."
        )
    for part in (*model.modules(), *tensors.values()):
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if kinds & {"DTensor", "FullyShardedDataParallel"}:
            raise ModelError(
                f"model: expected whole parameters on every process, got {type(part).__name__}, "
                "which has a part of them on each. Load a full state dict into a plain model: "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
                "torch.distributed.checkpoint.state_dict."
            )
    return model


def as_written(given: Any) -> Any:
    """Return the module that was compiled, or the name of a parameter in it; others as they are."""
    if isinstance(given, str):
        return given.replace(f"{_COMPILED}.", "")
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return getattr(given, _COMPILED) if isinstance(given, compiled) else given


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their names, without those of compilation."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {as_written(name): value for name, value in found.items()}


def private_copy(
    model: nn.Module, state: Mapping[str, Tensor], own: torch.dtype, kind: torch.dtype
) -> nn.Module:
    """Copy a module by `copy.deepcopy`, in eval mode and without hooks on gradients.

    Its parameters and buffers share the memory of `state`; other tensors that it holds are copied
    to the device of the state, and from the type `own` to `kind`. What trains or feeds the module,
    and attributes that cannot be copied (locks, files), are shared. Closures in its attributes that
    refer to modules refer to their copies.
    """
    memo: dict[int, Any] = {}
    theirs = named_state(model)
    device, there = (next(iter(each.values())).device for each in (theirs, state))
    for name, value in theirs.items():
        mine = state[name].detach()  # another tensor, with the same memory
        is_parameter = isinstance(value, nn.Parameter)
        memo[id(value)] = nn.Parameter(mine, value.requires_grad) if is_parameter else mine
    held = [vars(module) for module in model.modules()]
    compiled, closures = [], []
    for leaf in tree_leaves(held):
        if isinstance(leaf, Tensor) and id(leaf) not in memo:
            place = there if leaf.device == device else leaf.device
            with torch.inference_mode(False):
                mine = leaf.detach().to(place, kind if leaf.dtype == own else None, copy=True)
            memo[id(leaf)] = mine
        elif isinstance(leaf, _SERVICES):
            memo[id(leaf)] = leaf
        elif isinstance(leaf, nn.Module) and as_written(leaf) is not leaf:
            compiled.append(leaf)
        function = leaf.func if isinstance(leaf, partial) else leaf
        if isinstance(function, types.FunctionType) and function.__closure__:
            cells = tuple(types.CellType() for _ in function.__closure__)  # to be filled
            of = function.__code__, function.__globals__, function.__name__, function.__defaults__
            new = types.FunctionType(*of, cells)
            new.__kwdefaults__ = function.__kwdefaults__
            closures.append((function, new))
    memo |= {id(old): new for old, new in closures}

    def copied(memo: dict[int, Any]) -> nn.Module:
        for module in compiled:
            memo[id(module)] = copy.deepcopy(as_written(module), memo)
        whole = copy.deepcopy(model, memo)
        for old, new in closures:
            for mine, cell in zip(new.__closure__ or (), old.__closure__ or (), strict=True):
                value = cell.cell_contents  # parts of the copy, and all else as it is
                is_part = isinstance(value, nn.Module | types.MethodType) or id(value) in memo
                mine.cell_contents = copy.deepcopy(value, memo) if is_part else value
        return whole

    try:
        private = copied(dict(memo))
    except Exception:  # of some attribute: a lock, a file
        for attributes in reversed(held):  # parts come before what they are in
            for value in attributes.values():
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    memo[id(value)] = value
        try:
            private = copied(memo)
        except Exception as error:
            raise ModelError(
                "Model: expected one that copy.deepcopy can copy, got "
                f"{type(error).__name__}: {first_line(error)}. Take out what cannot be copied."
            ) from error
    for module in private.modules():
        vars(module).update({name: OrderedDict() for name in _UNUSED_HOOKS}, training=False)
        if parametrize.is_parametrized(module):  # its class is its own, which changes would change
            kept: Any = type(module)
            names = {k: v for k, v in vars(kept).items() if k not in ("__dict__", "__weakref__")}
            module.__class__ = type(kept)(kept.__name__, kept.__bases__, names)
    return private


@dataclass(frozen=True)
class LastLayer:
    """A selection that is resolved when a model is at hand (see `last_layer`)."""

    def names(self, model: torch.nn.Module) -> list[str]:
        """Name the parameters held directly by the last registered module that holds any."""
        last: list[str] = []
        for prefix, module in model.named_modules():
            own = module.named_parameters(prefix=prefix, recurse=False)
            last = [as_written(name) for name, _ in own] or last
        if not last:
            raise ModelError("Expected a model with parameters, got one without any.")
        return last

    def __repr__(self) -> str:
        return "last_layer()"


L2Rates = float | Mapping[str, float]
AUTO = "auto"  # λ by the evidence
Selection = str | Sequence[str] | Callable[..., bool] | LastLayer | None


def last_layer(model: torch.nn.Module | None = None) -> LastLayer | list[str]:
    """Select the parameters of a model's last layer: `fit(…, params=last_layer())`.

    The last layer is the last module registered that holds parameters of its own; `fit` checks that
    it produces the model's outputs. With a model the names are returned, to look at them.

    Example:
        >>> import torch, deltabars
        >>> deltabars.last_layer(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
        ['1.weight', '1.bias']
    """
    return LastLayer() if model is None else LastLayer().names(model)


@dataclass(frozen=True)
class ParameterSpace:
    """Named parameters, one after the other in a flat vector of P numbers, in the model's order."""

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
        ends = [0, *accumulate(self.sizes)]
        return {name: slice(*pair) for name, pair in zip(self.names, pairwise(ends), strict=True)}

    @classmethod
    def select(cls, model: torch.nn.Module, selection: Selection = None) -> ParameterSpace:
        """Select the parameters of `model` that `selection` names; tied weights count once.

        Args:
            model: any module.
            selection: `None` for all; a shell-style name pattern or a list of them (`"fc*"`,
                `"*.bias"`); a predicate of the name, or of the name and the parameter;
                or `last_layer()`.
        """
        parameters = {as_written(name): value for name, value in model.named_parameters()}
        if isinstance(selection, LastLayer) or not parameters:
            selection = LastLayer().names(model)
        if selection is None:
            chosen = set(parameters)
        elif callable(selection) and not isinstance(selection, nn.Module):
            chosen = _by_predicate(parameters, selection)
        else:
            chosen = _by_patterns(model, parameters, selection)
        names = tuple(name for name in parameters if name in chosen)
        frozen = [name for name in names if not parameters[name].requires_grad]
        if frozen:
            raise ModelError(
                f"Expected trained parameters, got {len(frozen)} frozen ones "
                f"(requires_grad=False): {_few(frozen)}. Leave them out with "
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


def _by_predicate(parameters: Mapping[str, Tensor], predicate: Callable[..., bool]) -> set[str]:
    taken = inspect.signature(predicate).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = sum(one.kind in positional and one.default is one.empty for one in taken)
    by_name = takes == 1
    given = parameters.items()
    chosen = {n for n, value in given if (predicate(n) if by_name else predicate(n, value))}
    if not chosen:
        raise BadValueError(
            "params: expected a predicate that selects at least one parameter, got one that "
            f"selects none of {_few(list(parameters))}."
        )
    return chosen


def _by_patterns(model: nn.Module, parameters: Mapping[str, Tensor], selection: Any) -> set[str]:
    given = [selection] if isinstance(selection, str) else selection
    patterns = list(given) if isinstance(given, Iterable) else []
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise BadValueError(
            f"params: expected None, name patterns or a predicate, got {selection!r}. "
            'Give patterns such as ["fc*", "*.bias"].'
        )
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
                f"matches none. The model has {_few(close)}."
            )
        chosen.update(first_name[id(aliases[name])] for name in matched)
    return chosen


def _few(names: Sequence[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


@dataclass(frozen=True)
class Prior:
    """The λ of a set of parameters."""

    given: L2Rates  # by the user: a number, or numbers by name pattern
    level: float  # λ in the coordinates ω' = ω/scale
    scales: Mapping[str, float]  # by parameter; empty where ω' is ω

    @classmethod
    def read(
        cls, l2: Any, space: ParameterSpace, scales: Mapping[str, float] | None = None
    ) -> Prior:
        """Check λ > 0, or such numbers by name pattern, for the parameters of `space`.

        Where several patterns match a parameter the last one counts. If the coordinates (`scales`)
        are chosen already, λ must be one number in them.
        """
        if not isinstance(l2, Mapping):
            number = _check_number(l2)
            if scales:
                raise BadValueError(
                    f"l2: expected a mapping from name patterns to numbers, like that of the fit, "
                    f"got {number:g}. The λs of such a fit can change by a common factor alone; "
                    "fit again for others."
                )
            return cls(number, number, {})
        own = _by_parameter(l2, space)
        given = {pattern: float(value) for pattern, value in l2.items()}
        if scales is None:
            return cls(given, 1.0, {name: value**-0.5 for name, value in own.items()})
        levels = [value * scales.get(name, 1.0) ** 2 for name, value in own.items()]
        if max(levels) > min(levels) * (1 + _SAME):
            raise BadValueError(
                "l2: expected the λs of the fit times a common factor, got factors from "
                f"{min(levels):g} to {max(levels):g}. Fit again for other ratios."
            )
        return cls(given, levels[0], scales)

    def times(self, factor: float) -> Prior:
        """Multiply all λs by a number."""
        return Prior(scaled(self.given, factor), factor * self.level, self.scales)


def scaled(l2: L2Rates, factor: float) -> L2Rates:
    """Multiply λ, or several, by a number."""
    if isinstance(l2, Mapping):
        return {pattern: factor * value for pattern, value in l2.items()}
    return factor * l2


def _check_number(l2: Any) -> float:
    """Return λ as a float; refuse it unless it is finite and above zero."""
    if isinstance(l2, bool) or not isinstance(l2, Real) or not math.isfinite(l2) or l2 <= 0:
        number, several = "Python number", "a mapping from name patterns to such numbers, or 'auto'"
        if is_option("l2"):
            number, several = "number", "PATTERN=NUMBER …, or auto"
        raise BadValueError(
            f"l2: expected a finite {number} above zero (the weight decay of the training cost), "
            f"{several}, got {l2!r}."
        )
    return float(l2)


def _by_parameter(l2: Mapping[Any, Any], space: ParameterSpace) -> dict[str, float]:
    own: dict[str, float] = {}
    for pattern, value in l2.items():
        if isinstance(value, Real) and value == 0:
            raise BadValueError(
                f"l2: expected numbers above zero, got 0 for {pattern!r}. For parameters that were "
                "trained without decay give a small one, such as 1e-4 of the others'."
            )
        number = _check_number(value)
        is_pattern = isinstance(pattern, str)
        matched = [n for n in space.names if is_pattern and fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            raise BadValueError(
                f"l2: expected patterns that match a parameter, got {pattern!r}, which matches "
                f"none of {_few(space.names)}."
            )
        own.update(dict.fromkeys(matched, number))
    left = [name for name in space.names if name not in own]
    if left:
        raise BadValueError(
            f"l2: expected a λ for every parameter, got none for {_few(left)}. "
            "Start with a pattern for all: {'*': 0.01, …}."
        )
    return {name: own[name] for name in space.names}
