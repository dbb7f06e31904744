"""Training against a plain loop of torch's own Adam, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deltabars.errors import BadValueError
from deltabars.recipes.paper import CIFAR10, L2, MNIST, paper_network
from deltabars.recipes.training import Stack, train

COUNT = 130  # not a multiple of 100: the second batch holds 30 images and the first 70 again
STEPS = 4
SCHEDULE = ((0, 1e-3), (2, 2e-4))


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


def trained(networks, data, recipe=MNIST, **options):
    options = {"steps": STEPS, "schedule": SCHEDULE, "progress": False} | options
    return train(Stack.of(recipe, networks), *data, **options)


def plain_loop(network, images, labels, steps=STEPS, schedule=SCHEDULE):
    optimiser = torch.optim.Adam(network.parameters(), weight_decay=L2)
    for step in range(steps):
        (group,) = optimiser.param_groups
        group["lr"] = [rate for first, rate in schedule if first <= step][-1]
        places = [(step * 100 + place) % len(labels) for place in range(100)]
        optimiser.zero_grad()
        functional.cross_entropy(network(images[places]), labels[places]).backward()
        optimiser.step()
    return network


def assert_trained_alike(found, exact, start, recipe=MNIST):
    """A row of weights against a network, to 1e-5 of how far it went.

    The learning rate is a float32 number (5e-8), and Adam divides by √v: the rounding of a gradient
    that is all but zero becomes a share of a step.
    """
    before, after = Stack.of(recipe, [start, exact]).weights
    moved = float((after - before).abs().max())
    assert moved > 1e-3  # one step's worth at least: else nothing was trained
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, after, rtol=0, atol=1e-5 * moved)


@pytest.mark.parametrize("recipe", [MNIST, CIFAR10], ids=lambda recipe: recipe.name)
def test_it_is_adam_on_batches_in_order(recipe):
    data = make_data(recipe)
    found = trained([start_network(0, recipe)], data, recipe)
    exact = plain_loop(start_network(0, recipe), *data)
    assert_trained_alike(found.weights[0], exact, start_network(0, recipe), recipe)


def test_fewer_images_than_a_batch_come_round_within_it():
    data = make_data(count=40)
    found = trained([start_network(0)], data)
    exact = plain_loop(start_network(0), *data)
    assert_trained_alike(found.weights[0], exact, start_network(0))


def test_several_at_once_are_each_alone():
    data = make_data()
    found = trained([start_network(seed) for seed in range(3)], data)
    assert not torch.equal(found.weights[0], found.weights[1])
    for seed in range(3):
        exact = plain_loop(start_network(seed), *data)
        assert_trained_alike(found.weights[seed], exact, start_network(seed))


def test_each_network_sees_its_rows_alone():
    images, labels = make_data()
    rows = torch.randint(COUNT, (2, COUNT), generator=torch.Generator().manual_seed(4))
    found = trained([start_network(0), start_network(0)], (images, labels), rows=rows)
    for place, own in enumerate(rows):
        exact = plain_loop(start_network(0), images[own], labels[own])
        assert_trained_alike(found.weights[place], exact, start_network(0))
    # An image that is in no row may be anything.
    absent = [place for place in range(COUNT) if place not in rows]
    assert absent
    images[absent] = torch.nan
    again = trained([start_network(0), start_network(0)], (images, labels), rows=rows)
    assert torch.equal(again.weights, found.weights)


def test_the_same_start_gives_the_same_bits():
    images, labels = make_data()
    data = images.float(), labels
    first, second = (
        trained([start_network(seed).float() for seed in range(2)], data).weights for _ in range(2)
    )
    assert first.dtype == torch.float32
    assert torch.equal(first, second)


def test_what_was_given_stays_as_it_was():
    images, labels = make_data()
    start = Stack.of(MNIST, [start_network(0)])
    before = [value.clone() for value in (start.weights, images, labels)]
    found = train(start, images, labels, steps=2, schedule=SCHEDULE, progress=False)
    for value, old in zip((start.weights, images, labels), before, strict=True):
        assert torch.equal(value, old)
    assert not start.weights.requires_grad
    assert not found.weights.requires_grad
    assert not torch.equal(found.weights, start.weights)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_longer_schedule_is_cut(steps):
    data = make_data()
    schedule = ((0, 1e-3), (3, 2e-4), (8, 1e-5), (20, 1e-6))
    found = trained([start_network(0)], data, steps=steps, schedule=schedule)
    exact = plain_loop(start_network(0), *data, steps=steps, schedule=schedule)
    assert_trained_alike(found.weights[0], exact, start_network(0))


def test_padding_stays_zero():
    found = trained([start_network(0)], make_data()).weights
    ones = start_network(0)
    for parameter in ones.parameters():
        parameter.data.fill_(1)
    padding = Stack.of(MNIST, [ones]).weights == 0
    assert int(padding.sum()) > 0
    assert not found[padding].any()


class TestStart:
    @pytest.mark.parametrize(("recipe", "size"), [(MNIST, 93_322), (CIFAR10, 122_570)])
    def test_weights_are_standard_normal_and_biases_zero(self, recipe, size):
        network = paper_network(5, recipe)
        parameters = dict(network.named_parameters())
        assert sum(parameter.numel() for parameter in parameters.values()) == size
        for name, parameter in parameters.items():
            if name.endswith("bias"):
                assert not parameter.any()
                continue
            n = parameter.numel()
            # Five times the sampling errors of a mean, 1/√n, and of a std, 1/√(2n).
            assert abs(float(parameter.detach().double().mean())) < 5 / n**0.5
            assert abs(float(parameter.detach().double().std()) - 1) < 5 / (2 * n) ** 0.5

    @pytest.mark.parametrize("recipe", [MNIST, CIFAR10], ids=lambda recipe: recipe.name)
    def test_seed_decides_and_the_caller_s_numbers_stay(self, recipe):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        one, same, other = (paper_network(seed, recipe) for seed in (0, 0, 1))
        assert torch.equal(torch.rand(3), expected)
        for name, value in one.named_parameters():
            assert torch.equal(value, same.get_parameter(name))
            assert name.endswith("bias") or not torch.equal(value, other.get_parameter(name))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"schedule": ()}, "rates from step 0 on"),
        ({"schedule": ((2, 1e-3),)}, "rates from step 0 on"),
        ({"schedule": ((0, 1e-3), (2, 1e-4), (1, 1e-5))}, "in their order"),
        ({"steps": 0}, "one step or more"),
        ({"rows": torch.zeros(2, 130, dtype=torch.long)}, r"rows: expected \(1, 130\)"),
    ],
)
def test_what_cannot_be_followed(options, match):
    with pytest.raises(BadValueError, match=match):
        trained([start_network(0)], make_data(), **options)


def test_images_of_another_recipe():
    with pytest.raises(BadValueError, match=r"expected \(N, 1, 28, 28\) and N labels"):
        trained([start_network(0)], make_data(CIFAR10))
