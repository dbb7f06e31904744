"""Hessian products as gradients of gradients, for models without forward derivatives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deltabars.batches import Batch
from deltabars.curvature.singles import UNSUPPORTED
from deltabars.errors import (
    ModelError,
    first_line,
    option,
)
from deltabars.likelihoods import Likelihood
from deltabars.memory import ran_out
from deltabars.network import Network

_EXAMPLES = 3  # that the products are checked on
_STEP = 1e-5  # relative to the weights: rounding and curvature both leave some 1e-9
_AGREE = 1e-2  # relative: a derivative that torch leaves out is a large part of the whole


def gradient_products(
    network: Network, likelihood: Likelihood, batch: Batch, vectors: Tensor
) -> Tensor:
    """∂(g·v)/∂ω for each row v of (b, P), with g the gradient of the batch's summed loss.

    Cost: a gradient, and about two more a vector.

    Raises:
        ModelError: an operation of the model has no second derivatives.
    """
    trained = {name: value.detach().requires_grad_() for name, value in network.trained.items()}
    try:
        gradient = _gradient(network, likelihood, batch, trained, create_graph=True)
        return torch.stack([_flat(network, gradient, trained, vector) for vector in vectors])
    except UNSUPPORTED as error:
        if ran_out(error):
            raise
        raise _without_second_derivatives(first_line(error)) from error


def check_gradient_products(network: Network, likelihood: Likelihood, batch: Batch) -> None:
    """Refuse a model whose gradients of gradients are not the derivative of its gradient.

    torch leaves out, without a word, what a backward pass computes out of its sight; so a product
    is compared with a difference of two gradients, in float64 and on a few examples.

    Raises:
        ModelError: they differ.
    """
    network = replace(
        network,
        trained={name: value.double() for name, value in network.trained.items()},
        constants={
            name: value.double() if value.is_floating_point() else value
            for name, value in network.constants.items()
        },
        dtype=torch.float64,
    )
    few = batch.rows(slice(0, _EXAMPLES)).to(network.device, torch.float64)
    point, space = network.point, network.parameters
    direction = _gradient(network, likelihood, few, dict(network.trained))
    length = float(direction.norm())
    if not length:
        return
    direction = direction / length
    step = _STEP * max(1.0, float(point.norm()))
    ahead, behind = (
        _gradient(network, likelihood, few, space.unflatten(point + sign * step * direction))
        for sign in (1, -1)
    )
    difference = (ahead - behind) / (2 * step)
    product = gradient_products(network, likelihood, few, direction[None])[0]
    if not float((product - difference).norm()) <= _AGREE * float(difference.norm()):
        raise _without_second_derivatives("torch gives wrong ones without saying so")


def _gradient(
    network: Network,
    likelihood: Likelihood,
    batch: Batch,
    trained: dict[str, Tensor],
    create_graph: bool = False,
) -> Tensor:
    assert batch.targets is not None
    trained = {
        name: value if value.requires_grad else value.detach().requires_grad_()
        for name, value in trained.items()
    }
    with torch.enable_grad():
        outputs = network.outputs(trained, batch.inputs).double()
        loss = likelihood.loss(outputs, batch.targets).sum()
        parts = torch.autograd.grad(
            loss, list(trained.values()), create_graph=create_graph, materialize_grads=True
        )
        return network.parameters.flatten(dict(zip(trained, parts, strict=True)))


def _flat(network: Network, gradient: Tensor, trained: dict[str, Tensor], vector: Tensor) -> Tensor:
    if not gradient.requires_grad:  # a loss that is linear in the weights
        return torch.zeros_like(vector)
    parts = torch.autograd.grad(
        gradient, list(trained.values()), vector, retain_graph=True, materialize_grads=True
    )
    return network.parameters.flatten(dict(zip(trained, parts, strict=True)))


def _without_second_derivatives(reason: str) -> ModelError:
    return ModelError(
        f"Hessian: expected operations with second derivatives, got one without ({reason}). Take "
        f"{option('estimator', 'ggn')} or 'opg', which need first derivatives alone, or leave the "
        f"parameters before it out with {option('params=')}."
    )
