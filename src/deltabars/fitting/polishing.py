"""polish(): a copy of a trained model, at the optimum of the cost that its error bars rest on.

Newton's method with conjugate gradients, within a trust region. A last layer is optimised on its
inputs, which are computed once: what is left is a linear model, in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deltabars.curvature.hessian import HessianOperator
from deltabars.errors import BadValueError, ConvergenceWarning, option, warn
from deltabars.fitting.state import check_positive, check_whole
from deltabars.likelihoods.base import Likelihood, Loss
from deltabars.problem.data import Batch
from deltabars.problem.network import model_errors
from deltabars.problem.parameters import (
    L2Rates,
    LastLayer,
    Selection,
    as_written,
    last_layer,
    named_state,
    plain_model,
    private_copy,
)
from deltabars.problem.problem import Problem
from deltabars.runtime.distributed import current_group
from deltabars.runtime.memory import BASIS, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import Spaces

_AIM = 0.3  # of the tolerance: the result is rounded to the type of the model
_DECREASE = 1e-4  # of what the slope promises, at least
_BACKTRACKS = 12  # each to a quarter of the step
_FORCING = 0.1  # of the gradient: the most that a Newton step may leave of it
_NOISE = 100  # units in the last place of the cost
_FEWER = 0.9  # of the gradient, at most, is left by a step whose gain is below the noise
_IDLE, _HARDLY = 8, 1e-4  # steps; of the cost, or of what is left of the gradient by `_FEWER`
_ONE_OF = 16  # weights makes up for the rounding of the others
_LEFT, _PRODUCTS = 1e-3, 200  # of their gradient, and at most for it


def polish(
    model: nn.Module,
    data: Any,
    l2: L2Rates,
    *,
    params: Selection = last_layer(),  # noqa: B008 - it is frozen
    likelihood: str | Likelihood | Loss | nn.Module = "categorical",
    tolerance: float = 1e-5,
    max_iterations: int = 2000,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> nn.Module:
    """Return a copy of a model with some parameters at the optimum of mean loss + (λ/2)·‖ω‖².

    ω are the chosen parameters; the others stay. The cost is that of `fit`: in eval mode (running
    statistics of batch norm, no dropout), on the data as they come. So training with AdamW, batch
    norm or augmentation, which ends elsewhere, is no obstacle to error bars: give `fit` the copy,
    with the same data, λ, parameters and likelihood. It is the given model in all else, training
    mode included, without gradients and without hooks on gradients and state dicts.

    The cost of a last layer has one optimum, for every likelihood of deltabars. Where the layer is
    an `nn.Linear` that ends the model, its inputs are computed in one pass, kept in a quarter of
    the memory budget, and optimised on in float64. Otherwise every iteration is a pass over the
    data, in `dtype`; and where the cost has several optima the result is a point of no larger cost
    and no larger relative gradient, at an optimum or on the way to one.

    Args:
        model, data, l2, likelihood, device, dtype, memory_budget, batch_size, progress: as for
            `deltabars.fit`.
        params: which parameters count, as for `fit`; the last layer by default.
        tolerance: for the relative gradient at the end: ‖∇cost‖ over ‖∇mean loss‖ + ‖λω‖.
        max_iterations: at most so many products with the Hessian; a ConvergenceWarning names the
            relative gradient that was reached, if that is above the tolerance.

    Raises:
        BadValueError, ModelError, DataError: with what was expected, found, and to be done.

    Example:
        >>> import deltabars
        >>> from deltabars.fitting.polishing import polish
        >>> from deltabars.recipes.digits import trained_digits
        >>> digits, model, train = trained_digits()
        >>> last = deltabars.last_layer()
        >>> polished = polish(model, train, l2=1e-3, params=last, progress=False)
        >>> problem = deltabars.Problem(polished, train, parameters=last, l2=1e-3)
        >>> problem.relative_gradient < 1e-5
        True
    """
    check_positive("tolerance", tolerance)
    check_whole("max_iterations", max_iterations, 1)
    if isinstance(l2, str):
        raise BadValueError(
            f"l2: expected a number, got {l2!r}. Give the l2 of a fit of the last layer, or the "
            "weight decay of the training."
        )
    if (count := current_group().size) > 1:
        raise BadValueError(
            f"polish: expected one process, got {count}. Polish in one of them, within "
            "deltabars.distributed.alone(), and load the weights in the others."
        )
    model = plain_model(model)
    with Progress("Reading the data", None, "example", progress) as bar:
        problem = Problem(
            model, data, likelihood, params, l2, device=device, dtype=dtype,
            memory_budget=memory_budget, chunk_size=batch_size, on_progress=bar.show,
        )  # fmt: skip
    names = problem.parameters.names
    with full_precision(problem.device):
        state = {name: value.detach().clone() for name, value in named_state(model).items()}
        own = state[names[0]].dtype
        polished = private_copy(model, state, own, own)
        start = _Point.of(_on_features(problem) or problem)
        with Progress("Polishing", None, "iteration", progress) as bar:
            best, done = _minimised(start, _AIM * tolerance, max_iterations, bar)
        end = _rounded(best, own, tolerance)
        end = end if end.cost <= start.cost else start
        for name, value in zip(names, end.problem.network.trained.values(), strict=True):
            state[name].copy_(value)
    # The copy of a compiled module is the module within, whose name is another.
    modes = {as_written(f"{name}."): module.training for name, module in model.named_modules()}
    for name, module in polished.named_modules():
        module.training = modes[f"{name}."]
    if end.relative > tolerance:
        _warn_of_gradient(end, best, tolerance, done, max_iterations)
    return polished


def _on_features(problem: Problem) -> Problem | None:
    """Return the same problem as one of a linear layer on its inputs; None where it is not.

    It is where the parameters are those of one `nn.Linear`, its result is the model's, and its
    inputs do not depend on them. Cost: a pass over the data.
    """
    network, prior = problem.network, problem.prior
    prefix, *others = {name.rpartition(".")[0] for name in problem.parameters.names}
    head = network.model.get_submodule(prefix)
    if others or type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return None
    size = (problem.num_examples, head.in_features)
    if math.prod(size) * problem.dtype.itemsize > share(problem.memory_budget, BASIS):
        return None
    features = torch.empty(size, device=problem.device, dtype=problem.dtype)
    calls: list[tuple[Tensor, Tensor]] = []
    targets: list[Tensor] = []

    def is_linear(batch: Batch) -> bool:
        assert batch.targets is not None
        calls.clear()
        with torch.enable_grad():
            variables = {name: v.clone().requires_grad_() for name, v in network.trained.items()}
            outputs = network.outputs(variables, batch.inputs)
        if len(calls) != 1 or calls[0][1] is not outputs or calls[0][0].requires_grad:
            return False
        start = sum(map(len, targets))
        features[start : start + len(batch)] = calls[0][0]
        targets.append(batch.targets)
        return True

    hook = head.register_forward_hook(lambda _, given, found: calls.append((given[0], found)))
    try:
        with network.evaluation(), model_errors():
            if not all(problem.chunk_size.each(problem.chunks(), is_linear)):
                return None
    finally:
        hook.remove()
    layer = {name: name.rpartition(".")[2] for name in problem.parameters.names}
    return Problem(
        copy.deepcopy(head).double(), (features, torch.cat(targets)), problem.likelihood,
        list(layer.values()),
        {layer[n]: prior.level / prior.scales.get(n, 1.0) ** 2 for n in layer},
        dtype=torch.float64, memory_budget=problem.memory_budget - features.nbytes,
        allow_probabilities=True,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Point:
    """The cost at a point and its gradient, in the coordinates of `Prior`, in float64."""

    problem: Problem  # at the point
    x: Tensor  # (P,)
    cost: float
    gradient: Tensor  # (P,)
    norm: float  # of the gradient by the weights
    relative: float  # see `Problem.relative_gradient`

    @classmethod
    def of(cls, problem: Problem, x: Tensor | None = None) -> _Point:
        """Evaluate the cost of a problem at a point, by default its own. Cost: a gradient."""
        network = problem.network
        scale = torch.ones_like(network.point) if network.scale is None else network.scale
        scale = scale.double()
        x = network.point.double() / scale if x is None else x
        weights = problem.parameters.unflatten((x * scale).to(problem.dtype))
        problem, total, losses = copy.copy(problem), torch.zeros_like(x), 0.0
        problem.network = network = replace(network, trained=weights)
        problem.reached = None  # elsewhere others may be reached
        problem.spaces = Spaces.of(problem.num_parameters, None, problem.group)

        def work(batch: Batch) -> tuple[Tensor, float]:
            noted: list[Tensor] = []

            def loss(outputs: Tensor) -> Tensor:
                assert batch.targets is not None
                noted.append(problem.likelihood.loss(outputs.double(), batch.targets).sum())
                return noted[0]

            return network.gradient(batch.inputs, loss), float(noted[0])

        with network.evaluation(), model_errors():
            for part, number in problem.chunk_size.each(problem.chunks(), work):
                total += part
                losses += number
        mean, pull = total / problem.num_examples, problem.l2 * x / scale  # ∇mean loss and λω
        whole = mean + pull
        norm, parts = float(whole.norm()), float(mean.norm()) + float(pull.norm())
        cost = losses / problem.num_examples + 0.5 * problem.l2 * float(x @ x)
        return cls(problem, x, cost, whole * scale, norm, norm / parts if parts else 0.0)

    @property
    def product(self) -> Callable[[Tensor], Tensor]:
        """The products of the Hessian with vectors (P,), in the coordinates of the gradient."""
        operator, dtype = HessianOperator(self.problem), self.problem.dtype
        return lambda vector: operator.whole_matmat(vector.to(dtype)[None])[0].double()

    def rounded(self, dtype: torch.dtype) -> _Point:
        """Return the point whose weights are rounded to that type."""
        scale = self.problem.network.scale
        scale = torch.ones_like(self.x) if scale is None else scale.double()
        return self.of(self.problem, (self.x * scale).to(dtype).double() / scale)


def _minimised(start: _Point, aim: float, most: int, bar: Progress) -> tuple[_Point, int]:
    """Return the point of the smallest relative gradient, and how many products it took.

    The cost falls from point to point. Where its fall is lost in rounding, the gradient decides.
    """
    point = best = start
    done, radius = 0, float(start.x.norm()) or float(start.gradient.norm()) / start.problem.l2
    idle = 0  # steps in a row that bring hardly anything, as at a kink of ReLU
    while best.relative > aim and done < most and idle < _IDLE:
        left = max(min(_FORCING, math.sqrt(point.relative)), aim / (2 * point.relative))
        rest = most - done
        step, gain, used = _newton_step(point.product, point.gradient, radius, left, rest)
        done += used
        slope, found = float(point.gradient @ step), None
        noise = _NOISE * torch.finfo(start.problem.dtype).eps * abs(point.cost)
        for part in (0.25**k for k in range(_BACKTRACKS)):
            tried = _Point.of(point.problem, point.x + part * step)
            falls = tried.cost <= point.cost + _DECREASE * part * slope
            is_near = tried.cost <= min(start.cost, point.cost + noise)
            if falls or (is_near and tried.relative < _FEWER * point.relative):
                found = tried
                break
        if found is None:
            break
        length = part * float(step.norm())
        ratio = (point.cost - found.cost) / gain if gain > noise else 1.0
        if part < 1 or ratio < 0.25:
            radius = length / (1 if part < 1 else 2)
        elif ratio > 0.75:
            radius = max(radius, 4 * length)
        fell = point.cost - found.cost > _HARDLY * abs(point.cost)
        idle = 0 if fell or found.relative < _FEWER * best.relative else idle + 1
        point = found
        best = point if point.relative < best.relative else best
        bar.show(done, f"relative gradient {best.relative:.1e}")
    return best, done


def _newton_step(
    product: Callable[[Tensor], Tensor], gradient: Tensor, radius: float, left: float, most: int
) -> tuple[Tensor, float, int]:
    """Minimise g·s + ½ s·Hs within ‖s‖ ≤ radius by conjugate gradients (Steihaug's).

    Until ‖g + Hs‖ is that part of ‖g‖ which may be left, or along the first direction without
    curvature to the edge. Returns s, by how much the quadratic falls, and the number of products.
    """
    step, residual = torch.zeros_like(gradient), -gradient
    direction, square = residual, float(residual @ residual)
    enough = left**2 * square
    used = 0
    while used < most and square:
        used += 1
        image = product(direction)
        curvature = float(direction @ image)
        length = square / curvature if curvature > 0 else math.inf
        along, across = float(step @ direction), float(direction @ direction)
        within = radius**2 - float(step @ step)
        edge = (math.sqrt(max(0.0, along**2 + across * within)) - along) / across
        step = step + min(length, edge) * direction
        residual = residual - min(length, edge) * image
        before, square = square, float(residual @ residual)
        if length >= edge or square <= enough:
            break
        direction = residual + square / before * direction
    return step, 0.5 * float(step @ (residual - gradient)), used


def _rounded(best: _Point, dtype: torch.dtype, tolerance: float) -> _Point:
    """Return a point whose weights are rounded to a type.

    Where that takes the gradient above the tolerance, some weights make up for the others: the
    smallest, which rounding moves the least, of those that the loss says more of than the penalty.
    """
    end = best.rounded(dtype)
    if end.relative <= tolerance or best.relative > tolerance:
        return end
    generator, product = torch.Generator().manual_seed(0), end.product
    signs = torch.randint(2, end.x.shape, generator=generator).to(end.x) * 2 - 1
    diagonal = signs * product(signs)  # about, by Hutchinson
    is_known = (diagonal - end.problem.l2).abs() > end.problem.l2
    smallest = torch.where(is_known, end.x.abs(), torch.inf).argsort()[: -(-len(signs) // _ONE_OF)]
    few = torch.zeros_like(signs).index_fill(0, smallest, 1.0)
    step, _, _ = _newton_step(
        lambda vector: few * product(few * vector), few * end.gradient, math.inf, _LEFT, _PRODUCTS
    )
    again = end.of(end.problem, end.x + step).rounded(dtype)
    return min(end, again, key=lambda point: point.relative)


def _warn_of_gradient(end: _Point, best: _Point, tolerance: float, done: int, most: int) -> None:
    """Warn of a gradient above the tolerance, and say what helps."""
    others = f"{option('dtype', torch.float64)}, or {option('params', LastLayer())}"
    advice = f"Give more {option('max_iterations=')}, {others}."
    if best.relative <= tolerance:
        advice = "The weights are rounded to the type of the model: polish model.double()."
    elif done < most:
        advice = f"The cost falls no further: kinks (of ReLU, say) or rounding. Try {others}."
    warn(
        f"polish: expected a relative gradient of {tolerance:.2g} or less, got {end.relative:.2g} "
        f"after {done:,} iterations (a norm of {end.norm:.2g}). {advice}",
        ConvergenceWarning,
    )
