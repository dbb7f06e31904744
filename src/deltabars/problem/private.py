"""A private copy of a module: its structure, on tensors of its own.

Whatever happens to the user's module later (it is trained on, pruned, wrapped, called by another
thread), the copy computes what the module computed, and computing with it alters nothing of the
user's. Code is shared; parameters and buffers are given, so that a copy takes next to no memory.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deltabars.problem.parameters import as_written

_CONTAINERS = (list, tuple, dict, OrderedDict, set, frozenset, deque, defaultdict)
_SAME = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype,
    torch.device, torch.Size, types.BuiltinFunctionType,
)  # fmt: skip
# What trains or feeds a module has no say in its outputs, and may be large.
_SERVICES = (
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset, torch.utils.data.DataLoader,
)  # fmt: skip
# Hooks that cannot run under torch.func, or have no say in the outputs.
_NO_SAY = (
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def private_copy(model: nn.Module, state: Mapping[str, Tensor], own: torch.dtype) -> nn.Module:
    """A copy of a module in eval mode, without hooks on gradients, with the tensors of `state`.

    Modules, containers, bound methods, closures and objects that refer to parts of the module refer
    to parts of the copy; what cannot be copied (locks, files) is shared. Other tensors that the
    module holds are copied to the device and type of the state, where they had those of the module.

    Args:
        state: parameters and buffers by the names that `named_parameters` and `named_buffers` give,
            without those of compilation; the copy shares their memory.
        own: the type of the module's parameters.
    """
    copier = _Copier(model, state, own)
    private: nn.Module = copier(model)
    copier.fill_cells()
    for module in private.modules():
        vars(module).update({name: OrderedDict() for name in _NO_SAY}, training=False)
    return private


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by their names, without those of compilation."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {as_written(name): value for name, value in found.items()}


class Seen(TorchFunctionMode):
    """Notes which of some tensors torch's functions are given.

    Attributes:
        names: of those that were, by the identity of all of them; a copy has others than its model.
    """

    def __init__(self, watched: Mapping[int, str]) -> None:
        super().__init__()
        self._watched = watched
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note its arguments."""
        kwargs = kwargs or {}
        found = {id(leaf) for leaf in tree_leaves((args, kwargs))} & self._watched.keys()
        self.names |= {self._watched[key] for key in found}
        return func(*args, **kwargs)


class _Copier:
    """Copies values of a module; each once, whatever refers to it."""

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor], own: torch.dtype) -> None:
        self._memo: dict[int, Any] = {}
        self._held: list[Any] = []  # so that no identity recurs
        self._cells: list[tuple[types.CellType, Any]] = []
        self._modules = {id(module) for module in model.modules()}
        given = named_state(model)
        self._tensors = {id(value) for value in given.values()}
        for name, value in given.items():
            mine = state[name].detach()  # another tensor, with the same memory
            if isinstance(value, nn.Parameter):
                mine = nn.Parameter(mine, requires_grad=value.requires_grad)
            self._keep(value, mine)
        example, original = next(iter(state.values())), next(iter(given.values()))
        self._from, self._to = (original.device, own), example.device
        kinds = {value.dtype for value in state.values() if value.is_floating_point()}
        self._kind = kinds.pop() if len(kinds) == 1 else own

    def __call__(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, (*_SAME, *_SERVICES)):
            return value
        if isinstance(value, Tensor):
            return self._keep(value, self._moved(value))
        if isinstance(value, nn.Module):
            return self._module(value)
        if type(value) in _CONTAINERS:
            return self._container(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, functools.partial):
            parts = (self(part) for part in value.args)
            return type(value)(self(value.func), *parts, **self(value.keywords))
        if type(value) is weakref.ref:
            there = value()
            return weakref.ref(self(there)) if self._is_own(there) else value
        return self._object(value)

    def fill_cells(self) -> None:
        """Let closures that refer to the module refer to the copy, now that it is whole."""
        while self._cells:
            cell, contents = self._cells.pop()
            cell.cell_contents = self(contents)

    def _keep(self, value: Any, mine: Any) -> Any:
        self._held.append(value)
        self._memo[id(value)] = mine
        return mine

    def _is_own(self, value: Any) -> bool:
        return id(value) in self._modules or id(value) in self._tensors

    def _moved(self, value: Tensor) -> Tensor:
        device, own = self._from
        alike = value.dtype == own
        with torch.inference_mode(False):
            mine = value.detach().to(
                self._to if value.device == device else value.device,
                self._kind if alike else value.dtype,
                copy=True,
            )
        return nn.Parameter(mine, value.requires_grad) if type(value) is nn.Parameter else mine

    def _module(self, module: nn.Module) -> Any:
        inside = as_written(module)
        if inside is not module:  # compiled
            return self._keep(module, self(inside))
        kind: Any = type(module)
        parametrized = parametrize.is_parametrized(module)
        if not parametrized and hasattr(kind, "__deepcopy__"):
            try:
                return self._keep(module, kind.__deepcopy__(module, self._memo))
            except Exception:  # of the user's own; the plain way is left
                self._memo.pop(id(module), None)
        if parametrized:  # of a class of its own, which later changes would change
            names = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
            kind = type(kind)(kind.__name__, kind.__bases__, names)
        private = self._keep(module, kind.__new__(kind))
        attributes = dict(vars(module))
        attributes.pop("_compiled_call_impl", None)
        left_out = _left_out(module)
        for name, value in attributes.items():
            # What a module leaves out of a pickle is not its own: the trainer of Lightning.
            shared = name in left_out and hasattr(value, "__dict__") and not self._is_own(value)
            private.__dict__[name] = value if shared else self(value)
        return private

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, dict):
            mine: Any = self._keep(value, copy.copy(value))
            mine.clear()
            mine.update((self(key), self(part)) for key, part in value.items())
        elif isinstance(value, list | deque):
            mine = self._keep(value, copy.copy(value))
            mine.clear()
            mine.extend(self(part) for part in value)
        else:
            mine = self._keep(value, kind(self(part) for part in value))
        return mine

    def _function(self, function: types.FunctionType) -> Any:
        """The function; another one with its code where its closure refers to the module."""
        if not self._refers(function, set()):
            return function
        cells = tuple(
            types.CellType() if self._refers(cell, set()) else cell
            for cell in function.__closure__ or ()
        )
        mine = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells or None
        )
        self._keep(function, mine)
        mine.__dict__.update(function.__dict__)
        mine.__defaults__ = self(function.__defaults__)
        mine.__kwdefaults__ = self(function.__kwdefaults__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if cell is not old:
                self._cells.append((cell, old.cell_contents))
        return mine

    def _refers(self, value: Any, seen: set[int]) -> bool:
        """Whether a closure, a default or a container holds a part of the module."""
        if self._is_own(value):
            return True
        if id(value) in seen:
            return False
        seen.add(id(value))
        parts: list[Any] = []
        if isinstance(value, types.CellType):
            try:
                parts = [value.cell_contents]
            except ValueError:  # empty as yet
                return False
        elif isinstance(value, types.FunctionType):
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            parts = [*(value.__closure__ or ()), *defaults]
        elif isinstance(value, types.MethodType):
            parts = [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict):
            parts = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            parts = list(value)
        return any(self._refers(part, seen) for part in parts)

    def _object(self, value: Any) -> Any:
        """A plain object with copied attributes; others as they copy themselves, if they do."""
        kind = type(value)
        plain = all(
            getattr(kind, name, None) is getattr(object, name, None)
            for name in ("__reduce_ex__", "__reduce__", "__getstate__", "__deepcopy__")
        )
        slots = any("__slots__" in vars(base) for base in kind.__mro__)
        if plain and not slots and hasattr(value, "__dict__"):
            try:
                mine = self._keep(value, object.__new__(kind))
            except TypeError:  # built upon a type of C
                pass
            else:
                mine.__dict__.update((name, self(part)) for name, part in vars(value).items())
                return mine
        try:
            return self._keep(value, copy.deepcopy(value, self._memo))
        except Exception:  # locks, files, generators: one is enough
            return self._keep(value, value)


def _left_out(module: nn.Module) -> set[str]:
    """The names of attributes that a module leaves out of its pickle."""
    if type(module).__getstate__ is nn.Module.__getstate__:
        return set()
    try:
        state = module.__getstate__()
    except Exception:  # of the user's own
        return set()
    if not isinstance(state, dict):
        return set()
    return {name for name, value in vars(module).items() if state.get(name) is not value}
