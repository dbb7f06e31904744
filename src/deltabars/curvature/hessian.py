"""The Hessian of the cost, H = ∇²(mean loss) + λI (the paper's equation for Σ^H)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from deltabars.batches import Batch
from deltabars.curvature.base import CurvatureOperator
from deltabars.problem import Problem

Tensors = dict[str, Tensor]
_TOGETHER = 8  # vectors


class HessianOperator(CurvatureOperator):
    """H through exact Hessian-vector products: the derivative of the gradient along a vector.

    Pearlmutter's product, forward over reverse: about three gradients a vector and pass. Several
    vectors share a forward pass, eight at a time, which bounds the memory they take.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        _load_forward_derivatives()

    def _data_sum(self, vectors: Tensor) -> Tensor:
        space = self.problem.parameters
        trained = dict(self.problem.network.trained)
        total = torch.zeros_like(vectors)
        for batch in self.problem.chunks():
            gradient = torch.func.grad(partial(self._chunk_loss, batch=batch))
            along = partial(_derivative_along, gradient, trained)
            for group, sums in zip(vectors.split(_TOGETHER), total.split(_TOGETHER), strict=True):
                products = torch.func.vmap(along)(space.unflatten(group))
                sums += space.flatten(products, batch_dims=1)
        return total

    def _chunk_loss(self, trained: dict[str, Tensor], batch: Batch) -> Tensor:
        return self.problem.losses(trained, batch).sum()


@cache
def _load_forward_derivatives() -> None:
    """Let torch set up its forward derivatives now, without the deprecation it warns itself of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script`")
        torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


def _derivative_along(
    function: Callable[[Tensors], Tensors], point: Tensors, tangent: Tensors
) -> Tensors:
    derivative: Tensors = torch.func.jvp(function, (point,), (tangent,))[1]
    return derivative
