"""What calls of torch's functions do to the channels of their arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from deltabars.problem.inputs import Inputs, leaves
from deltabars.problem.network import Network, weighted_sum
from deltabars.runtime.distributed import Group
from deltabars.runtime.memory import ran_out

RELUS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
# What is done to each channel by itself, and keeps zeros zero.
DROPOUTS = {F.dropout, F.dropout2d, torch.clone, Tensor.clone}
POOLINGS = {torch.max_pool2d, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d}
RESHAPES = {torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape, torch.reshape}
_FACTS = (int, str, torch.dtype, torch.device, torch.layout)


def is_plain_layer(func: Any, args: tuple[Any, ...], full: int | None) -> bool:
    """Whether a call is of a layer that takes (B, I), or (B, C, H, W) without groups.

    `full` is the number of inputs or channels with those that are left out, where that is known.
    """
    if func not in (F.linear, F.conv2d) or len(args) < 2:
        return False
    inputs, weight = args[:2]
    size = 2 if func is F.linear else 4
    if inputs.ndim != size or weight.ndim != size:
        return False
    return bool(weight.shape[1] == (inputs.shape[1] if full is None else full))


def batch_norm_arguments(
    input: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `F.batch_norm`, in their order."""
    return input, mean, variance, weight, bias, training, momentum, eps


def is_fact(result: Any) -> bool:
    """Whether a result is about the shape or kind of a tensor, and not about its values."""
    return result is not None and all(isinstance(leaf, _FACTS) for leaf in tree_leaves(result))


def changes_its_first(func: Any) -> bool:
    """Whether a function writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return bool(name.endswith("_"))


@dataclass
class Layer:
    """What was seen of one call of a layer.

    Attributes:
        shape: of its weight.
        outputs: which outputs a ReLU let pass, for any example, (O,); None for all of them, as
            far as is known.
        inputs: which inputs were other than zero, for any example, (I,); None likewise.
        exposed: whether anything but a ReLU depends on the outputs.
    """

    shape: torch.Size
    outputs: Tensor | None = None
    inputs: Tensor | None = None
    exposed: bool = False

    def merge(self, other: Layer) -> Layer:
        """What was seen of two calls, on different examples."""
        return Layer(
            self.shape,
            _either(self.outputs, other.outputs),
            _either(self.inputs, other.inputs),
            self.exposed or other.exposed,
        )

    def to(self, device: torch.device | str) -> Layer:
        """The same on a device."""
        outputs, inputs = (
            None if mask is None else mask.to(device) for mask in (self.outputs, self.inputs)
        )
        return Layer(self.shape, outputs, inputs, self.exposed)

    def kept(self) -> Kept:
        """What of it counts."""
        rows = None if self.exposed else _places(self.outputs)
        return Kept(self.shape, rows, _places(self.inputs))


@dataclass(frozen=True)
class Kept:
    """What of a layer counts: the places of outputs and of inputs; None for all of them."""

    shape: torch.Size
    rows: Tensor | None
    columns: Tensor | None

    @property
    def is_all(self) -> bool:
        """Whether there is nothing to leave out."""
        return self.rows is None and self.columns is None


def _places(mask: Tensor | None) -> Tensor | None:
    """The places of a mask that are set; None where all are, or where there is no mask.

    One at the least: a layer without outputs would be none.
    """
    if mask is None or bool(mask.all()):
        return None
    return mask.nonzero().squeeze(1) if bool(mask.any()) else mask.new_zeros(1, dtype=torch.long)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else first | second


@dataclass(frozen=True)
class _State:
    """What is known of a tensor on its way through a network.

    Attributes:
        layer: the call whose outputs it holds, while it is watched; None for the inputs.
        passed: whether a ReLU is behind it, so that what is left out of it is zero.
        full: how many channels or features it has, with those that are left out.
        kept: the places of those that are not; None for all of them.
    """

    layer: Layer | None
    passed: bool
    full: int
    kept: Tensor | None = None


class _Walk(TorchFunctionMode):
    """A forward pass in which the outputs of layers are followed to where they are used."""

    def __init__(self, inputs: Iterable[Tensor], names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._states: dict[int, tuple[Tensor, _State]] = {}  # with the tensor: identities may recur
        for leaf in inputs:
            if leaf.ndim > 1:
                self._follow(leaf, _State(None, True, leaf.shape[1]))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and follow what it does."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        first = args[0] if args else None
        state = self._state(first)
        # Without gradients a tensor may be in the hands of a Function whose backward is its own.
        if torch.is_grad_enabled() and not any(
            self._state(tensor) for tensor in tensors if tensor is not first
        ):
            if is_plain_layer(func, args, None if state is None else state.full):
                if state is not None and not state.passed:  # a layer upon a layer
                    self._expose(state)
                    state = None
                return self._layer(func, args, kwargs, state)
            if state is not None:
                if func in RELUS:
                    return self._relu(func(*args, **kwargs), state)
                if func in DROPOUTS or (func in POOLINGS and args[0].ndim == 4):
                    return self._follow(func(*args, **kwargs), state)
                if not state.passed and func is F.batch_norm:
                    arguments = batch_norm_arguments(*args, **kwargs)
                    if not arguments[5]:
                        return self._follow(self._batch_norm(arguments, state), state)
                if state.passed and func in RESHAPES:
                    return self._reshape(func, args, kwargs, state)
        result = self._other(func, args, kwargs)
        if len(tensors) > 1 or not is_fact(result):
            for tensor in tensors:
                self._lose(tensor, tensor is first and changes_its_first(func))
        return result

    def _state(self, tensor: Any) -> _State | None:
        held = self._states.get(id(tensor))
        return None if held is None else held[1]

    def _follow(self, tensor: Tensor, state: _State) -> Tensor:
        self._states[id(tensor)] = (tensor, state)
        return tensor

    def _relu(self, result: Tensor, state: _State) -> Tensor:
        return self._follow(result, replace(state, passed=True))

    def _reshape(self, func: Any, args: Any, kwargs: Any, state: _State) -> Any:
        """Flattening keeps features apart; any other reshaping is not followed."""
        whole = _stand_in(args[0], state)
        like = func(whole, *args[1:], **kwargs)
        shape = like.shape
        if shape != whole.flatten(1).shape or like.dtype != whole.dtype:
            return self._other(func, args, kwargs)  # of what has passed a ReLU, which may be seen
        each = shape[1] // state.full
        kept = state.kept
        if kept is not None:
            kept = (kept[:, None] * each + torch.arange(each, device=kept.device)).flatten()
        return self._follow(args[0].flatten(1), replace(state, full=shape[1], kept=kept))

    def _lose(self, tensor: Tensor, changed: bool) -> None:
        """A tensor went where nothing is followed; `changed` if it was altered in place."""
        state = self._state(tensor)
        if state is None:
            return
        is_input = state.passed and state.layer is None and state.kept is None
        if (changed and not is_input) or not state.passed:
            self._expose(state)
        if changed:
            del self._states[id(tensor)]

    @abstractmethod
    def _layer(self, func: Any, args: Any, kwargs: Any, state: _State | None) -> Tensor:
        """Call a layer."""

    @abstractmethod
    def _batch_norm(self, args: Any, state: _State) -> Tensor:
        """Normalise the outputs of a layer, channel by channel."""

    @abstractmethod
    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call any other function."""

    @abstractmethod
    def _expose(self, state: _State) -> None:
        """A tensor was seen before its ReLU, or changed."""


class Watch(_Walk):
    """A forward pass that is watched.

    Args:
        inputs: of the network.
        names: of parameters by the identity of their tensors.

    Attributes:
        layers: the calls of layers, in their order.
        route: what was done with which parameters, in this order.
    """

    def __init__(self, inputs: Iterable[Tensor], names: Mapping[int, str]) -> None:
        self._versions: dict[int, int] = {}
        super().__init__(inputs, names)
        self.layers: list[Layer] = []
        self.route: list[tuple[str, ...]] = []
        self._spoilt = False

    @property
    def spoilt(self) -> bool:
        """Whether tensors were changed in a way that cannot be followed, as through a view."""
        return self._spoilt or any(
            _version(tensor) != self._versions[key] for key, (tensor, _) in self._states.items()
        )

    def _follow(self, tensor: Tensor, state: _State) -> Tensor:
        self._versions[id(tensor)] = _version(tensor)
        return super()._follow(tensor, state)

    def _note(self, what: str, arguments: Any) -> None:
        names = [self._names.get(id(leaf)) for leaf in tree_leaves(arguments)]
        if any(names):
            self.route.append((what, *filter(None, names)))

    def _layer(self, func: Any, args: Any, kwargs: Any, state: _State | None) -> Tensor:
        self._note("layer", (args, kwargs))
        inputs, weight = args[:2]
        layer = Layer(weight.shape)
        if func is F.linear and state is not None:
            layer.inputs = (inputs != 0).any(0)
        self.layers.append(layer)
        return self._follow(func(*args, **kwargs), _State(layer, False, weight.shape[0]))

    def _relu(self, result: Tensor, state: _State) -> Tensor:
        if state.layer is not None and not state.passed:
            on = (result > 0).transpose(0, 1).flatten(1).any(1)
            before = state.layer.outputs
            state.layer.outputs = on if before is None else before | on
        return super()._relu(result, state)

    def _batch_norm(self, args: Any, state: _State) -> Tensor:
        self._note("norm", args)
        return F.batch_norm(*args)

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._note("other", (args, kwargs))
        return func(*args, **kwargs)

    def _expose(self, state: _State) -> None:
        if state.layer is None or state.passed:
            self._spoilt = True
        else:
            state.layer.exposed = True


class Compact(_Walk):
    """A forward pass without the units that are silent.

    Args:
        layers: what counts of each call of a layer, in their order.
        inputs: of the network.
        names: of parameters by the identity of their tensors, whose use is to be noted.

    Attributes:
        used: which numbers of the named parameters were used, by name.
    """

    def __init__(
        self,
        layers: Iterable[Kept],
        inputs: Iterable[Tensor],
        names: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(inputs, names or {})
        self.used: dict[str, Tensor] = {}
        self._layers = iter(layers)

    def _layer(self, func: Any, args: Any, kwargs: Any, state: _State | None) -> Tensor:
        inputs, weight, *rest = args
        layer = next(self._layers, None)
        if layer is None or layer.shape != weight.shape:
            raise RuntimeError("A layer is called that was not watched.")
        columns = None if state is None else state.kept
        if state is not None and layer.columns is not None:
            here = layer.columns
            if columns is not None:  # which hold them all: what is left out before is zero here
                here = torch.searchsorted(columns, here)
            inputs, columns = inputs.index_select(1, here), layer.columns
        parts = [self._part(weight, layer.rows, columns)]
        if rest:
            parts.append(self._part(rest[0], layer.rows))
        if "bias" in kwargs:
            kwargs = {**kwargs, "bias": self._part(kwargs["bias"], layer.rows)}
        result = func(inputs, *parts, *rest[1:], **kwargs)
        return self._follow(result, _State(None, False, layer.shape[0], layer.rows))

    def _batch_norm(self, args: Any, state: _State) -> Tensor:
        return F.batch_norm(args[0], *(self._part(x, state.kept) for x in args[1:5]), *args[5:])

    def _part(self, tensor: Any, rows: Tensor | None, columns: Tensor | None = None) -> Any:
        """The rows and columns that are kept of a weight, a bias, or a buffer."""
        if tensor is None:
            return None
        name = self._names.get(id(tensor))
        if name is not None:
            used = self.used.setdefault(name, torch.zeros_like(tensor, dtype=torch.bool))
            some = torch.zeros_like(used)
            some[slice(None) if rows is None else rows] = True
            if columns is not None:
                inside = torch.zeros_like(used)
                inside[:, columns] = True
                some &= inside
            used |= some
        if rows is not None:
            tensor = tensor.index_select(0, rows)
        return tensor if columns is None else tensor.index_select(1, columns)

    def _lose(self, tensor: Tensor, changed: bool) -> None:
        name = self._names.get(id(tensor))
        if name is not None:
            self.used[name] = torch.ones_like(tensor, dtype=torch.bool)
        super()._lose(tensor, changed)

    def _other(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*tree_map(self._whole, args), **tree_map(self._whole, kwargs))

    def _whole(self, leaf: Any) -> Any:
        """A tensor with zeros where units are left out; before a ReLU, its shape alone."""
        state = self._state(leaf)
        if state is None or state.kept is None:
            return leaf
        whole = _stand_in(leaf, state)
        return whole.clone().index_copy(1, state.kept, leaf) if state.passed else whole

    def _expose(self, state: _State) -> None:
        if state.kept is not None or state.passed:
            raise RuntimeError("A tensor is used otherwise than it was when watched.")


def _version(tensor: Tensor) -> int:
    """A number that each change in place raises, of the tensor itself or of its views."""
    return -1 if tensor.is_inference() else tensor._version


def _stand_in(tensor: Tensor, state: _State) -> Tensor:
    """Zeros of the shape that a tensor has with nothing left out, without memory of their own."""
    return tensor.new_zeros(()).expand(tensor.shape[0], state.full, *tensor.shape[2:])


# Relative: units that are missed change far more than rounding does, and what it does at kinks.
_AGREE = {torch.float32: 1e-3, torch.float64: 1e-9}


class Units:
    """Which units of a network any of the examples switch on."""

    def __init__(self, network: Network, group: Group) -> None:
        self._network, self._group = network, group
        self._layers: list[Layer] | None = None
        self._route: list[tuple[str, ...]] = []
        self._kept: list[Kept] = []

    @contextmanager
    def watch(self, inputs: Inputs, trained: Mapping[str, Tensor]) -> Iterator[None]:
        """A context to run a forward pass in, which adds what is seen to what is known."""
        walk = Watch(leaves(inputs), _names(trained))
        with walk:
            yield
        seen = [] if walk.spoilt else walk.layers
        if self._layers is None:
            self._layers, self._route = seen, walk.route
        elif self._route == walk.route and _shapes(self._layers) == _shapes(seen):
            self._layers = [a.merge(b) for a, b in zip(self._layers, seen, strict=True)]
        else:  # the way through the network is not always the same
            self._layers = []

    @property
    def any_silent(self) -> bool:
        """Whether there is anything to leave out."""
        return bool(self._kept)

    def compact(self, inputs: Inputs) -> AbstractContextManager[Any]:
        """A context to run a forward pass in, which leaves out the units that are silent."""
        return Compact(self._kept, leaves(inputs))

    def reached(self, inputs: Inputs, gradient: Tensor) -> Tensor | None:
        """The places in ω of the parameters that the examples reach, ascending; None for all.

        To be called when all examples have been watched, with the gradient (P,) of the sum of their
        losses. From then on silent units are left out, if a pass over some inputs without them
        agrees with one with them, and if the gradient is zero by all that would be left out: what
        an operation of one's own does with a unit is out of sight.
        """
        kept = [layer.kept() for layer in self._seen_anywhere()]
        if all(layer.is_all for layer in kept):
            return None
        walks: list[Compact] = []

        def during(trained: Mapping[str, Tensor]) -> Compact:
            walks.append(Compact(kept, leaves(inputs), _names(trained)))
            return walks[0]

        whole = self._network.gradient(inputs, weighted_sum)
        try:
            part = self._network.gradient(inputs, weighted_sum, during)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if ran_out(error):
                raise
            part = torch.full_like(whole, torch.inf)
        agree = float((part - whole).norm()) <= _AGREE[whole.dtype] * float(whole.norm())
        if not all(self._group.gather(agree)):
            return None
        everything = {
            name: torch.ones_like(value, dtype=torch.bool)
            for name, value in self._network.trained.items()
        }
        used = self._network.parameters.flatten({**everything, **walks[0].used})
        rounding = torch.finfo(whole.dtype).eps * float(gradient.abs().max())
        if bool((gradient.abs()[~used] > rounding).any()):
            return None
        self._kept = kept
        return None if bool(used.all()) else used.nonzero().squeeze(1)

    def _seen_anywhere(self) -> list[Layer]:
        """What all ranks have seen; nothing where they differ in their way through the network."""
        own = self._layers or []
        if self._group.size == 1:
            return own
        mine = self._route, [layer.to("cpu") for layer in own]
        (route, merged), *others = self._group.gather(mine)
        for other, layers in others:
            if other != route or _shapes(layers) != _shapes(merged):
                return []
            merged = [a.merge(b) for a, b in zip(merged, layers, strict=True)]
        return [layer.to(self._network.device) for layer in merged]


def _names(trained: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(value): name for name, value in trained.items()}


def _shapes(layers: list[Layer]) -> list[torch.Size]:
    return [layer.shape for layer in layers]
