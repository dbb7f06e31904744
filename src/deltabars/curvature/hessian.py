"""The Hessian of a training cost, H = ∇²(mean loss) + λI, through its products with vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.linear_part import LinearPart, Tensors, forward_derivatives, held_bytes
from deltabars.curvature.pullback import UNSUPPORTED
from deltabars.curvature.slicing import Sliced, Slices, slices_of
from deltabars.errors import ModelError, ModelWarning, first_line, option, warn
from deltabars.problem.data import Batch, Inputs, leaves, map_leaves
from deltabars.problem.network import Network, model_errors
from deltabars.problem.problem import Problem
from deltabars.runtime.memory import KEPT, attempt, ran_out, share
from deltabars.runtime.precision import without_noise
from deltabars.runtime.vectors import Spaces

_MOST_TOGETHER = 16  # vectors
_MOST_SHAPES = 16  # of chunks that are traced: a trace costs as much as some products
_SMALL = {"cpu": 1 << 23, "cuda": 1 << 29}  # bytes of activations that leave a device idle
_WORTH_SLICING = 0.7  # of the parameters that are reached, or fewer: else checks cost more
_SAME = {torch.float32: 1e-4, torch.float64: 1e-9}  # relative: with slices and without
# What tracing and rewriting raise on graphs that they do not support.
_UNTRACEABLE = (*UNSUPPORTED, ValueError, KeyError, AttributeError)
_EXAMPLES = 3  # that products by gradients of gradients are checked on
_STEP = 1e-5  # relative to the weights: rounding and curvature both leave some 1e-9
_AGREE = 1e-2  # relative: a derivative that torch leaves out is a large part of the whole


class HessianOperator(CurvatureOperator):
    """Multiply vectors by H: the derivative of the gradient along a vector.

    Pearlmutter's product, forward over reverse. What does not depend on the vector is computed
    once for each chunk of the data and kept, as far as it fits the memory budget; a product over
    kept chunks costs about as much as a gradient, over others about two gradients. Data that do
    not fit in memory, or whose shapes differ, are not kept. Where torch has no forward derivatives
    of a model, its products are gradients of gradients, with a warning.

    Where few parameters are reached (see `Problem.reached`), layers are computed with slices of
    their weights. That rows and columns of H are zero elsewhere, and that slices give the same
    products and outputs, is checked on all examples; else nothing is left out.

    Attributes:
        kept_bytes: the memory that is held from product to product.

    Example:
        >>> import torch, deltabars
        >>> from deltabars.curvature import HessianOperator
        >>> data = torch.eye(4), torch.arange(4)
        >>> hessian = HessianOperator(deltabars.Problem(torch.nn.Linear(4, 4), data, l2=0.1))
        >>> vectors = torch.randn(2, 20)
        >>> torch.allclose(hessian.matmat(vectors), vectors @ hessian.to_dense(), atol=1e-5)
        True
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        with without_noise(), forward_derivatives():  # torch's set-up warns of its own deprecation
            torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
        count, most = problem.data.num_here, problem.chunk_size.value
        fewest = -(-count // most)  # chunks; some more, where they are even: one shape, one trace
        even = (count // n for n in range(fewest, min(2 * fewest, count) + 1) if count % n == 0)
        self._chunk_size = problem.chunk_size.at_most(next(even, most))
        self._slices: Slices = {}
        self._backward_twice = False  # where forward derivatives cannot be had
        self._room = share(problem.memory_budget, KEPT) if problem.data.is_uniform else 0
        self._forget()
        if problem.reached is not None:
            with problem.network.evaluation(), model_errors():
                self._leave_out(problem.reached)

    def _forget(self) -> None:
        """Drop what is kept from product to product."""
        self._parts: dict[tuple[torch.Size, ...], LinearPart | None] = {}
        self._kept: list[Tensors] = []
        self.kept_bytes = 0

    def _leave_out(self, reached: Tensor) -> None:
        """Leave out the rows and columns of H that are zero, and slice layers, if checks agree.

        Parameters without a derivative may still have a second one (those of a unit between weights
        that are all but zero), so a product with a random vector decides. Cost: a product from the
        start, and two forward passes.
        """
        problem, size = self.problem, self.problem.num_parameters
        self.spaces = Spaces.of(size, None, problem.group)
        if len(reached) > _WORTH_SLICING * size:
            return
        vector = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
        vector = vector.to(self.device, self.dtype)
        chunks = problem.chunks(self._chunk_size.value)
        parts = self._chunk_size.each(chunks, lambda batch: self._untraced(batch, vector))
        exact = problem.group.all_reduce_(sum(parts, torch.zeros_like(vector)))
        nonzero = exact[0] != 0
        nonzero[reached] = True
        indices = nonzero.nonzero().squeeze(1)
        if len(indices) > _WORTH_SLICING * size:
            return
        self.spaces = Spaces.of(size, indices, problem.group)
        if self._backward_twice:
            return
        self._slices = slices_of(problem.parameters, indices)
        sliced = problem.group.all_reduce_(self._pass(vector))
        most, network = _SAME[self.dtype], problem.network

        def agree(batch: Batch) -> bool:
            whole = network.outputs(network.trained, batch.inputs)
            with Sliced(network.trained, self._slices):
                found = network.outputs(network.trained, batch.inputs)
            return bool((found - whole).abs().max() <= most * whole.abs().max())

        same = float((sliced - exact).norm()) <= most * float(exact.norm())
        same = same and all(
            list(self._chunk_size.each(problem.chunks(self._chunk_size.value), agree))
        )
        if not all(problem.group.gather_objects(same)):
            self._slices = {}
            self._forget()

    def _data_sum(self, vectors: Tensor) -> Tensor:
        scale, indices = self.problem.network.scale, self.spaces.indices
        whole = self._put_back(vectors)
        whole = whole if scale is None else whole * scale
        while True:
            total = attempt(partial(self._pass, whole))
            if total is not None:
                total = total if scale is None else total * scale
                return total if indices is None else total.index_select(1, indices)
            self._forget()
            self._room //= 2
            self._chunk_size.halve(min(self._chunk_size.value, self.problem.data.num_here))

    def _pass(self, vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors)
        small = _SMALL.get(self.device.type, _SMALL["cuda"])
        for position, batch in enumerate(self.problem.chunks(self._chunk_size.value)):
            product = self._chunk_product(position, batch)
            # One vector where a chunk keeps the device busy; several where calls are what costs.
            together = small // (len(batch) * self.problem.activation_bytes + 1)
            together = max(1, min(_MOST_TOGETHER, together))
            for group, sums in zip(vectors.split(together), total.split(together), strict=True):
                sums += product(group)
        return total

    def _chunk_product(self, position: int, batch: Batch) -> Callable[[Tensor], Tensor]:
        """Return the function from vectors (b, P) to their products with a chunk's Hessian."""
        if self._backward_twice:
            return partial(self._twice_backward, batch)
        fixed = self._fixed(batch)
        part = self._part(batch, fixed)
        if part is None:
            return partial(self._untraced, batch)
        if position < len(self._kept):
            prepared = self._kept[position]
        else:
            prepared = part.prepare(fixed)
            size = held_bytes(prepared, [*fixed, *self.problem.network.constants.values()])
            is_next = position == len(self._kept) and self._room > 0
            if is_next and self.kept_bytes + size <= self._room:
                self._kept.append(prepared)
                self.kept_bytes += size
        return partial(self._apply, partial(part.apply, prepared))

    def _untraced(self, batch: Batch, vectors: Tensor) -> Tensor:
        """Compute products with a chunk's Hessian from the start; backward twice if need be."""
        if not self._backward_twice:
            whole = partial(self._derivative, batch.inputs, *self._fixed(batch))
            try:
                with forward_derivatives():
                    return self._apply(lambda tangents: whole(*tangents), vectors)
            except UNSUPPORTED as error:
                if ran_out(error):
                    raise
                self._backward_twice = True
                warn(
                    "Model: expected operations with forward derivatives, for Hessian products, "
                    f"got one without ({first_line(error)}). Continuing with gradients of "
                    "gradients, which are slower.",
                    ModelWarning,
                )
                self._check_twice_backward(batch)
        return self._twice_backward(batch, vectors)

    def _twice_backward(
        self, batch: Batch, vectors: Tensor, network: Network | None = None
    ) -> Tensor:
        """Compute ∂(g·v)/∂ω for each row v of (b, P), with g the gradient of a chunk's loss."""
        network = network or self.problem.network
        trained = {name: value.detach().requires_grad_() for name, value in network.trained.items()}
        derive = partial(torch.autograd.grad, inputs=list(trained.values()), materialize_grads=True)

        def flat(parts: Tensors) -> Tensor:
            return network.parameters.flatten(dict(zip(trained, parts, strict=True)))

        try:
            with torch.enable_grad():
                loss = self._loss(batch, network.outputs(trained, batch.inputs))
                gradient = flat(derive(loss, create_graph=True))
            if not gradient.requires_grad:  # a loss that is linear in the weights
                return torch.zeros_like(vectors)
            return torch.stack(
                [flat(derive(gradient, grad_outputs=v, retain_graph=True)) for v in vectors]
            )
        except UNSUPPORTED as error:
            if ran_out(error):
                raise
            raise _without_second_derivatives(first_line(error)) from error

    def _check_twice_backward(self, batch: Batch) -> None:
        """Refuse a model whose gradients of gradients are not the derivative of its gradient.

        torch silently leaves out what a backward pass computes outside of its graph. So a product
        is compared with a difference of two gradients, in float64 and on a few examples.
        """

        def double(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: v.double() if v.is_floating_point() else v for n, v in values.items()}

        own = self.problem.network
        trained, constants = double(own.trained), double(own.constants)
        network = replace(own, trained=trained, constants=constants, dtype=torch.float64)
        few = batch.rows(slice(0, _EXAMPLES)).to(network.device, torch.float64)
        point = network.point

        def gradient(at: Tensor) -> Tensor:
            there = replace(network, trained=network.parameters.unflatten(at))
            return there.gradient(few.inputs, partial(self._loss, few))

        direction = gradient(point)
        length = float(direction.norm())
        if not length:
            return
        direction = direction / length
        step = _STEP * max(1.0, float(point.norm()))
        ahead, behind = (gradient(point + sign * step * direction) for sign in (1, -1))
        difference = (ahead - behind) / (2 * step)
        product = self._twice_backward(few, direction[None], network)[0]
        if not float((product - difference).norm()) <= _AGREE * float(difference.norm()):
            raise _without_second_derivatives("torch silently gives wrong ones")

    def _loss(self, batch: Batch, outputs: Tensor) -> Tensor:
        assert batch.targets is not None
        return self.problem.likelihood.loss(outputs.double(), batch.targets).sum()

    def _apply(self, derivative: Callable[[list[Tensor]], Tensors], vectors: Tensor) -> Tensor:
        space = self.problem.parameters

        def one(vector: Tensor) -> Tensor:
            tangents = space.unflatten(vector)
            products = derivative([tangents[name] for name in space.names])
            return space.flatten(dict(zip(space.names, products, strict=True)))

        if vectors.shape[0] == 1:
            return one(vectors[0])[None]
        return torch.func.vmap(one)(vectors)

    def _part(self, batch: Batch, fixed: list[Tensor]) -> LinearPart | None:
        """Return the linear part for chunks of this shape; None where tracing fails."""
        key = tuple(tensor.shape for tensor in fixed)
        if key in self._parts or len(self._parts) >= _MOST_SHAPES:
            return self._parts.get(key)
        # Tensors of their own: a trace tells its arguments apart by identity.
        tangents = [value.clone() for value in self.problem.network.trained.values()]
        part, function = None, partial(self._derivative, batch.inputs)
        try:
            part = LinearPart(function, fixed, tangents, self.device)
        except _UNTRACEABLE as error:  # operations that depend on values, such as one_hot
            if ran_out(error):
                raise
        self._parts[key] = part
        return part

    def _fixed(self, batch: Batch) -> list[Tensor]:
        assert batch.targets is not None
        return [*self.problem.network.trained.values(), *leaves(batch.inputs), batch.targets]

    def _derivative(self, like: Inputs, *arguments: Tensor) -> Tensors:
        """Differentiate the gradient of a chunk's loss: from ω̂, inputs, targets and tangents."""
        names = self.problem.parameters.names
        count = len(names)
        trained = dict(zip(names, arguments[:count], strict=True))
        tangents = dict(zip(names, arguments[-count:], strict=True))
        *parts, targets = arguments[count:-count]
        rest = iter(parts)
        batch = Batch(map_leaves(lambda _: next(rest), like), targets)

        def loss(at: dict[str, Tensor]) -> Tensor:
            with ConstantWithoutGrad(), Sliced(at, self._slices):
                return self.problem.losses(at, batch).sum()

        derivative = torch.func.jvp(torch.func.grad(loss), (trained,), (tangents,))[1]
        return tuple(derivative[name] for name in names)


class ConstantWithoutGrad(TorchFunctionMode):
    """Make what a model computes under `torch.no_grad` a constant to forward derivatives too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and cut its result off where no gradients are recorded."""
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            return result
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)


def _without_second_derivatives(reason: str) -> ModelError:
    return ModelError(
        f"Hessian: expected operations with second derivatives, got one without ({reason}). Take "
        f"{option('estimator', 'ggn')} or 'opg', which need first derivatives alone, or leave out "
        f"the parameters before it with {option('params=')}."
    )
