"""How predictions change with the parameters: F = ∂(prediction)/∂ω, and its projections F·Q."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.inputs import Inputs
from deltabars.likelihoods import Likelihood
from deltabars.network import Network
from deltabars.summation import inner

SPACES = ("probability", "logit")


@dataclass(frozen=True)
class Sensitivity:
    """What a batch's error bars need of F (B, C, P): everything else follows from these.

    Attributes:
        value: the prediction itself, in the space that F belongs to, (B, C).
        gram: F Fᵀ for each input, (B, C, C), float64.
        projections: for each basis Q (K, P) its F Qᵀ, (B, C, K), float64.
    """

    value: Tensor
    gram: Tensor
    projections: Mapping[str, Tensor]


def output_jacobian(network: Network, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The outputs z (B, C) and ∂z/∂ω at ω̂ (B, C, P). Cost: C gradients an input."""

    def one(trained: dict[str, Tensor], example: Inputs) -> tuple[Tensor, Tensor]:
        output = network.one_output(trained, example)
        return output, output

    jacobian = torch.func.vmap(torch.func.jacrev(one, has_aux=True), in_dims=(None, 0))
    rows, outputs = jacobian(dict(network.trained), inputs)
    return outputs, network.parameters.flatten(rows, batch_dims=2)


def sensitivities(
    network: Network,
    likelihood: Likelihood,
    inputs: Inputs,
    bases: Mapping[str, Tensor],
    space: str = "probability",
) -> tuple[Tensor, Sensitivity]:
    """The outputs z (B, C), and F of the mean (or of z itself) reduced to its projections.

    Args:
        bases: named orthonormal bases, rows (K, P).
        space: `"probability"` for F = (∂m/∂z)·∂z/∂ω, `"logit"` for F = ∂z/∂ω.

    Cost: C gradients an input, then C·P·K a basis; memory B·C·P numbers.
    """
    check_space(space)
    outputs, rows = output_jacobian(network, inputs)
    value = outputs
    if space == "probability":
        value = likelihood.mean(outputs)
        rows = likelihood.push_forward(outputs, rows)
    # Squares of these are subtracted from one another later on: from here on in float64.
    gram = inner(rows, rows)
    projections = {name: inner(rows, basis) for name, basis in bases.items()}
    return outputs, Sensitivity(value, gram, projections)


def check_space(space: str) -> None:
    """Refuse a space that does not exist."""
    if space not in SPACES:
        raise BadValueError(f"space: expected 'probability' or 'logit', got {space!r}.")
