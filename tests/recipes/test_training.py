"""Training against a plain loop of torch's own Adam, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from deltabars.errors import BadValueError
from deltabars.recipes.paper import CIFAR10, L2, MNIST, paper_network
from deltabars.recipes.training import train

COUNT = 130  # not a multiple of 100: the second batch holds 30 images and the first 70 again
OPTIONS = {"steps": 4, "schedule": ((0, 1e-3), (2, 2e-4), (8, 1e-5)), "progress": False}


def make_data(recipe=MNIST, count=COUNT):
    generator = torch.Generator().manual_seed(2)
    shape = (count, recipe.channels, recipe.side, recipe.side)
    images = torch.rand(shape, generator=generator, dtype=torch.float64)
    return images, torch.randint(10, (count,), generator=generator)


def start_network(seed, recipe=MNIST):
    """Small weights: with those of N(0, 1) logits are in the thousands, and nothing is smooth."""
    network = paper_network(seed, recipe).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.06)
    return network


def trained(seeds, data, recipe=MNIST, **options):
    return train([start_network(seed, recipe) for seed in seeds], *data, **(OPTIONS | options))


def plain_loop(network, images, labels, steps=4, schedule=OPTIONS["schedule"]):
    optimiser = torch.optim.Adam(network.parameters(), weight_decay=L2)
    for step in range(steps):
        (group,) = optimiser.param_groups
        group["lr"] = [rate for first, rate in schedule if first <= step][-1]
        batch = [(step * 100 + index) % len(labels) for index in range(100)]
        optimiser.zero_grad()
        functional.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimiser.step()
    return network


def vector(network):
    return parameters_to_vector(network.parameters()).detach()


def assert_trained_alike(found, exact, start):
    """Compare two networks, to 1e-5 of how far the training went."""
    # The learning rate is a float32 number (5e-8), and Adam divides by √v: the rounding of a
    # gradient that is all but zero becomes a share of a step.
    moved = float((vector(exact) - vector(start)).abs().max())
    assert moved > 1e-3  # one step's worth at least
    assert not found.training
    torch.testing.assert_close(vector(found), vector(exact), rtol=0, atol=1e-5 * moved)


@pytest.mark.parametrize(("recipe", "count", "steps"), [(MNIST, COUNT, 4), (CIFAR10, 40, 2)])
def test_several_at_once_are_each_adam_on_batches_in_order(recipe, count, steps):
    data = make_data(recipe, count)
    found = trained(range(2), data, recipe, steps=steps)
    for seed, network in enumerate(found):
        exact = plain_loop(start_network(seed, recipe), *data, steps=steps)
        assert_trained_alike(network, exact, start_network(seed, recipe))


def test_each_network_sees_its_rows_alone():
    images, labels = make_data()
    rows = torch.randint(COUNT, (2, COUNT), generator=torch.Generator().manual_seed(4))
    found = trained([0, 0], (images, labels), rows=rows)
    for network, own in zip(found, rows, strict=True):
        exact = plain_loop(start_network(0), images[own], labels[own])
        assert_trained_alike(network, exact, start_network(0))


def test_the_same_start_gives_the_same_bits_and_stays_as_it_is():
    images, labels = make_data()
    start = [start_network(seed).float() for seed in range(2)]
    before = [vector(network) for network in start]
    first, second = (train(start, images.float(), labels, **OPTIONS) for _ in range(2))
    for index in range(2):
        assert torch.equal(vector(first[index]), vector(second[index]))
        assert torch.equal(vector(start[index]), before[index])
        assert not torch.equal(vector(first[index]), before[index])
        assert all(parameter.grad is None for parameter in start[index].parameters())


@pytest.mark.parametrize(("recipe", "size"), [(MNIST, 93_322), (CIFAR10, 122_570)])
def test_initial_weights(recipe, size):
    state = torch.get_rng_state()
    one, same, other = (dict(paper_network(seed, recipe).named_parameters()) for seed in (5, 5, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(parameter.numel() for parameter in one.values()) == size
    for name, value in one.items():
        assert torch.equal(value, same[name])
        if name.endswith("bias"):
            assert not value.any()
            continue
        assert not torch.equal(value, other[name])
        n, value = value.numel(), value.detach().double()
        # Five times the sampling errors of a mean, 1/√n, and of a std, 1/√(2n).
        assert abs(float(value.mean())) < 5 / n**0.5
        assert abs(float(value.std()) - 1) < 5 / (2 * n) ** 0.5


def test_schedules_out_of_order_are_refused():
    with pytest.raises(BadValueError, match="in their order"):
        trained([0], make_data(), schedule=((0, 1e-3), (2, 1e-4), (1, 1e-5)))


# On a GPU five steps are taken before one is recorded and replayed.
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_recorded_steps_equal_those_of_the_cpu():
    rows = torch.randint(130, (2, 130), generator=torch.Generator().manual_seed(0))
    options = {"steps": 30, "rows": rows, "progress": False}
    here, there = (
        train(
            [start_network(seed).to(device) for seed in range(2)],
            *make_data(), schedule=((0, 1e-3), (20, 2e-4)), **options,
        )
        for device in ("cpu", "cuda")
    )  # fmt: skip
    for one, other in zip(here, there, strict=True):
        # The learning rate is a float32 number on both; rounding in float64 grows over the steps.
        torch.testing.assert_close(vector(other).cpu(), vector(one), rtol=0, atol=1e-6)
