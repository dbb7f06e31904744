"""Many copies of the paper's network as one, against torch's own layers in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deltabars.recipes import training as module
from deltabars.recipes.paper import CIFAR10, MNIST, PaperNetwork, paper_network
from deltabars.recipes.training import Stack, channels_last

# The side after the first convolution is odd here, and odd again after the second.
ODD = dataclasses.replace(MNIST, name="odd", side=33, channels=2)
RECIPES = {"mnist": MNIST, "cifar10": CIFAR10, "odd": ODD}
# Sums of up to 3,136 products in another order, in float64: a few hundred units in the last place.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def make_networks(recipe, count=3):
    """Different weights, of a size that training leads to; biases that are not zero."""
    generator = torch.Generator().manual_seed(7)
    networks = [paper_network(seed, recipe).double() for seed in range(count)]
    with torch.no_grad():
        for network in networks:
            for parameter in network.parameters():
                new = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.06 * new)
    return networks


def make_images(recipe, count=5):
    """Noise on the upper left, constant elsewhere: there all that a pooling looks at is equal."""
    generator = torch.Generator().manual_seed(8)
    images = torch.full((count, recipe.channels, recipe.side, recipe.side), 0.5).double()
    part = images[1:, :, : recipe.side // 2, : recipe.side // 2]
    part.copy_(torch.rand(part.shape, generator=generator, dtype=torch.float64))
    images[-1, :, -5:] = 0
    return images


def stacked(networks, recipe):
    stack = Stack.of(recipe, networks)
    return Stack(recipe, stack.weights.requires_grad_())


def as_rows(networks, recipe, of):
    """Tensors of the shapes of parameters, `of` each parameter, in the order of a stack's rows."""
    rows = []
    for network in networks:
        copy = PaperNetwork(recipe.channels, recipe.side).double()
        for mine, other in zip(copy.parameters(), network.parameters(), strict=True):
            mine.data = of(other).detach().clone()
        rows.append(copy)
    return Stack.of(recipe, rows).weights


@pytest.fixture(params=list(RECIPES))
def recipe(request):
    return RECIPES[request.param]


def test_the_third_recipe_has_odd_sizes_before_both_poolings():
    side = ODD.side - 2
    assert side % 2 == 1
    assert (side // 2 - 2) % 2 == 1


def test_logits(recipe):
    networks, images = make_networks(recipe), make_images(recipe)
    found = stacked(networks, recipe).logits(channels_last(images)[None])
    assert found.shape == (3, 5, 10)
    for place, network in enumerate(networks):
        torch.testing.assert_close(found[place], network(images), **CLOSE)


def test_each_network_may_have_images_of_its_own(recipe):
    networks, images = make_networks(recipe), make_images(recipe)
    own = torch.stack([channels_last(images.roll(place, 0)) for place in range(3)])
    found = stacked(networks, recipe).logits(own)
    for place, network in enumerate(networks):
        torch.testing.assert_close(found[place], network(images.roll(place, 0)), **CLOSE)


def test_gradient(recipe):
    networks, images = make_networks(recipe), make_images(recipe)
    generator = torch.Generator().manual_seed(9)
    signal = torch.randn(3, 5, 10, generator=generator, dtype=torch.float64)
    stack = stacked(networks, recipe)
    logits = stack.logits(channels_last(images)[None])
    (found,) = torch.autograd.grad((logits * signal).sum(), stack.weights)
    for place, network in enumerate(networks):
        (network(images) * signal[place]).sum().backward()
    exact = as_rows(networks, recipe, lambda parameter: parameter.grad)
    # As CLOSE, relative to the largest: a small one is a difference of large ones.
    assert all(bool(p.grad.any()) for network in networks for p in network.parameters())
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11 * float(exact.abs().max()))


def test_of_equals_the_first_takes_the_gradient(recipe):
    """Whole numbers: patches that differ have equal products, and every sum is exact."""
    generator = torch.Generator().manual_seed(5)
    networks, images = make_networks(recipe), make_images(recipe)
    images = (images > 0.5).double()
    for network in networks:
        for parameter in network.parameters():
            whole = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.data = whole.double()
    first = networks[0].conv1(images)
    windows = first.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    tied = (windows == windows.amax(-1, keepdim=True)).sum(-1) > 1
    assert int((tied & (windows.amax(-1) > 0)).sum()) > 1000
    stack = stacked(networks, recipe)
    logits = stack.logits(channels_last(images)[None])
    (found,) = torch.autograd.grad(logits.sum(), stack.weights)
    for place, network in enumerate(networks):
        assert torch.equal(logits[place], network(images))
        network(images).sum().backward()
    assert torch.equal(found, as_rows(networks, recipe, lambda parameter: parameter.grad))


def test_padding_has_no_gradient(recipe):
    networks, images = make_networks(recipe), make_images(recipe)
    stack = stacked(networks, recipe)
    logits = stack.logits(channels_last(images)[None])
    (found,) = torch.autograd.grad(logits.square().sum(), stack.weights)
    is_weight = as_rows(networks, recipe, torch.ones_like).bool()
    size = sum(parameter.numel() for parameter in networks[0].parameters())
    assert is_weight.sum(1).tolist() == [size] * 3
    assert stack.weights.shape[1] > size
    assert not found[~is_weight].any()
    assert not stack.weights[~is_weight].any()


def test_round_trip_bit_for_bit(recipe):
    networks = [paper_network(seed, recipe) for seed in range(3)]
    for network in networks:
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    stack = Stack.of(recipe, networks)
    assert len(stack) == 3
    for place, network in enumerate(networks):
        back = stack.network(place).state_dict()
        for name, value in network.state_dict().items():
            assert torch.equal(back[name], value), name


@pytest.mark.parametrize("numbers", [1, 500_000, 1 << 27])
def test_probabilities_whatever_the_chunks(monkeypatch, numbers):
    monkeypatch.setattr(module, "_PATCH_NUMBERS", numbers)
    networks, images = make_networks(MNIST, 2), make_images(MNIST, 11)
    sizes = []
    logits = Stack.logits
    monkeypatch.setattr(
        Stack, "logits", lambda self, x: sizes.append(x.shape[1]) or logits(self, x)
    )
    found = stacked(networks, MNIST).probabilities(images)
    # 9·32·14² = 56,448 numbers an image and network: 500,000 are four images of two networks.
    assert sizes == {1: [1] * 11, 500_000: [4, 4, 3], 1 << 27: [11]}[numbers]
    assert not found.requires_grad
    exact = torch.stack([network(images).softmax(1) for network in networks])
    torch.testing.assert_close(found, exact, **CLOSE)


@pytest.mark.parametrize("enough", [1, 8, 30, 10**9])
def test_gradient_of_a_product_is_the_same_in_all_parts(monkeypatch, enough):
    """1, 4, 10 and (none being enough) again 1 parts: the sum over 200 patches in other orders."""
    monkeypatch.setattr(module, "_ENOUGH", enough)
    generator = torch.Generator().manual_seed(3)
    new = {"generator": generator, "dtype": torch.float64}
    patches = torch.randn(3, 200, 12, **new).requires_grad_()
    matrix = torch.randn(3, 12, 8, **new).requires_grad_()
    signal = torch.randn(3, 200, 8, **new)
    left = torch.autograd.grad((module._PRODUCT(patches, matrix) * signal).sum(), (patches, matrix))
    right = torch.autograd.grad((patches @ matrix * signal).sum(), (patches, matrix))
    for found, exact in zip(left, right, strict=True):
        # Sums of 200 numbers of size 1 in float64, in another order.
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=200 * 1e-15)


def test_gradient_of_a_whole_stack_is_the_same_in_all_parts(monkeypatch):
    networks, images = make_networks(MNIST, 2), make_images(MNIST, 4)
    found = []
    for enough in (1, 8):  # one part, and four: 4 images' patches are a multiple in every layer
        monkeypatch.setattr(module, "_ENOUGH", enough)
        stack = stacked(networks, MNIST)
        logits = stack.logits(channels_last(images)[None])
        found += torch.autograd.grad(logits.square().sum(), stack.weights)
    scale = float(found[0].abs().max())
    assert not torch.equal(*found)  # other sums, other roundings
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11 * scale)
