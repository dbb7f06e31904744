"""ResNet-18 for small images, and its training."""

from __future__ import annotations

import pytest
import torch

from benchmarks.resnet import accuracy, resnet, train
from deltabars import Problem
from deltabars.errors import BadValueError

SMALL = {"classes": 3, "channels": 1, "width": 2, "blocks": (1, 1)}


def pictures(count=24):
    """Three kinds of pictures that can be told apart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    images = 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
    for label in range(3):
        images[labels == label, :, 2 * label : 2 * label + 3] += 1
    return images, labels


def test_the_standard_one_has_its_size():
    network = resnet(classes=10, channels=3)
    assert sum(weight.numel() for weight in network.parameters()) == 11_173_962
    assert network.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    convolutions = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 20  # 17 and three shortcuts
    assert [block.conv1.stride[0] for block in network.stages] == [1, 1, 2, 1, 2, 1, 2, 1]


def test_the_same_seed_gives_the_same_bits_and_draws_nothing_from_elsewhere():
    images, labels = pictures()
    results = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        network = resnet(3, **SMALL)
        train(network, images, labels, epochs=2, closing=1, batch_size=10, progress=False)
        results.append(torch.cat([weight.flatten() for weight in network.parameters()]))
    assert torch.equal(*results)
    other = resnet(4, **SMALL)
    assert not torch.equal(other.head.weight, resnet(3, **SMALL).head.weight)


def test_the_training_ends_near_an_optimum_of_the_cost_in_eval_mode():
    images, labels = pictures()
    ratios = []
    for epochs, closing in ((30, 0), (30, 300)):
        network = resnet(0, **SMALL)
        done = train(
            network, images, labels, l2=0.02, epochs=epochs, closing=closing, batch_size=24,
            rate=0.5, progress=False,
        )  # fmt: skip
        assert not network.training
        assert done.accuracy == accuracy(network, images, labels)
        ratios.append(Problem(network, (images, labels), l2=0.02).relative_gradient)
    assert done.accuracy == 1
    assert ratios[1] < 0.5 * ratios[0]
    assert ratios[1] < 0.3  # of a few hundred steps at a rate that falls to zero


def test_a_closing_epoch_that_raises_the_cost_is_undone():
    images, labels = pictures()
    network = resnet(0, **SMALL)
    train(network, images, labels, l2=0.02, epochs=40, closing=0, progress=False)

    def cost():
        problem = Problem(network, (images, labels), l2=0.02)
        return problem.mean_loss + problem.penalty

    def close(epochs):
        train(
            network, images, labels, l2=0.02, epochs=0, closing=epochs, batch_size=6, rate=1e4,
            progress=False,
        )  # fmt: skip

    weights, first = network.head.weight.detach().clone(), cost()
    close(1)
    assert torch.equal(network.head.weight, weights)
    assert cost() == first
    close(8)  # by then the rate has been divided often enough
    assert cost() < first


def test_no_epochs_at_all_are_refused():
    with pytest.raises(BadValueError, match="not both 0"):
        train(resnet(0, **SMALL), *pictures(), epochs=0, closing=0)
