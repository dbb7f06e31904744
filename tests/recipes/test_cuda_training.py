"""Training on a GPU, as a recorded graph of steps. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from deltabars.recipes.paper import MNIST
from deltabars.recipes.training import Stack, train
from deltabars.runtime.precision import same_bits
from tests.recipes.test_training import make_data, start_network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

# Graphs of 50 steps after 5 to warm up: two in the first stretch with 5 steps left over, one in the
# second with 10 left over.
STEPS, SCHEDULE = 170, ((0, 1e-3), (110, 2e-4))


def trained(device, dtype, rows=None):
    start = Stack.of(MNIST, [start_network(seed) for seed in range(2)])
    return train(
        Stack(MNIST, start.weights.to(device, dtype)),
        *(part.to(dtype) if part.is_floating_point() else part for part in make_data()),
        steps=STEPS,
        schedule=SCHEDULE,
        rows=rows,
        progress=False,
    ).weights.cpu()


@pytest.mark.parametrize("bootstrap", [False, True])
def test_recorded_steps_equal_those_of_the_cpu(bootstrap):
    rows = torch.randint(130, (2, 130), generator=torch.Generator().manual_seed(0))
    here, there = (
        trained(device, torch.float64, rows if bootstrap else None) for device in ("cpu", "cuda")
    )
    # The learning rate is a float32 number on both; rounding in float64 grows over 170 steps.
    torch.testing.assert_close(there, here, rtol=0, atol=1e-6)


def test_same_bits():
    with same_bits(True):
        one, other = (trained("cuda", torch.float32) for _ in range(2))
    assert torch.equal(one, other)
