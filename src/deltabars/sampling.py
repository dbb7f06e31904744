"""Parameter vectors drawn from the covariance of a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.precision import full_precision

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit


def sample(fit: DeltaFit, n: int, seed: int, full_rank: bool) -> Tensor:
    """`n` parameter vectors (n, P); the arguments are those of `DeltaFit.sample`, and checked."""
    if not is_whole(n) or n < 1:
        raise BadValueError(f"n: expected a whole number from 1 on, got {n!r}.")
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise BadValueError(f"seed: expected a whole number from 0 on, got {seed!r}.")
    network = fit.network
    generator = torch.Generator().manual_seed(int(seed))
    noise = torch.randn((n, fit.num_parameters), generator=generator, dtype=torch.float64)
    noise = noise.to(network.device, network.dtype)
    vectors = {name: pairs.vectors for name, pairs in fit.spectra.items()}
    with full_precision(network.device):
        covariance = fit.covariance_of(fit.estimator, fit.rank, full_rank)
        drawn = covariance.root(vectors, noise)
        return network.point + (drawn if network.scale is None else drawn * network.scale)
