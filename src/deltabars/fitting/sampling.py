"""Parameter vectors drawn from the covariance of a state."""

from __future__ import annotations

import torch
from torch import Tensor

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.fitting.state import FittedState
from deltabars.runtime.precision import full_precision


def sample(state: FittedState, n: int, seed: int, full_rank: bool) -> Tensor:
    """`n` parameter vectors (n, P); the arguments are those of `DeltaFit.sample`, and checked."""
    if not is_whole(n) or n < 1:
        raise BadValueError(f"n: expected a whole number from 1 on, got {n!r}.")
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise BadValueError(f"seed: expected a whole number from 0 on, got {seed!r}.")
    network = state.network
    generator = torch.Generator().manual_seed(int(seed))
    noise = torch.randn((n, state.num_parameters), generator=generator, dtype=torch.float64)
    noise = noise.to(network.device, network.dtype)
    vectors = {name: pairs.vectors for name, pairs in state.spectra.items()}
    with full_precision(network.device):
        covariance = state.covariance_of(state.estimator, state.rank, full_rank)
        drawn = covariance.root(vectors, noise)
        return network.point + (drawn if network.scale is None else drawn * network.scale)
