"""Training of a small network to the optimum of its cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def train_to_convergence(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    l2: float,
    steps: int = 400,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> float:
    """Minimise mean loss + (l2/2)·‖w‖² by L-BFGS in float64; return the norm of the gradient."""
    kind = next(model.parameters()).dtype
    weights = list(model.double().parameters())
    optimiser = torch.optim.LBFGS(
        weights, max_iter=steps, history_size=30, line_search_fn="strong_wolfe",
        tolerance_grad=1e-7, tolerance_change=0.0,
    )  # fmt: skip

    def cost() -> Tensor:
        optimiser.zero_grad()
        total = loss(model(images.double()), labels)
        total = total + 0.5 * l2 * sum(weight.square().sum() for weight in weights)
        total.backward()
        return total

    optimiser.step(cost)
    cost()
    norm = nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    optimiser.zero_grad()
    model.to(kind).eval()
    return float(norm)
