"""What polishing does to a digits network: `python -m benchmarks.true_bars.polish`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import deltabars
from deltabars.fitting.checking import bootstrap_check
from deltabars.recipes.digits import digits_network, load_digits

_RATES, _LEVELS = (1e-3, 1e-2), (1e-2, 1e-3, 1e-4)
_REPLICAS = 16

Tensors = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Train with Adam without decay, polish at several λ, and print what has changed."""
    torch.set_num_threads(1)
    digits = load_digits()
    train = digits.train_images, digits.train_labels
    for rate in _RATES:
        model = digits_network()
        torch.manual_seed(0)
        optimiser = torch.optim.Adam(model.parameters(), lr=rate)
        for _ in range(30):
            for part in torch.randperm(len(train[1])).split(64):
                optimiser.zero_grad()
                cross_entropy(model(train[0][part]), train[1][part]).backward()
                optimiser.step()
        for level in _LEVELS:
            polished = deltabars.polish(model, train, level, progress=False)
            for name, each in (("before", model), ("after", polished)):
                outputs = each(digits.test_images).detach()
                right = float((outputs.argmax(1) == digits.test_labels).float().mean())
                loss = float(cross_entropy(outputs, digits.test_labels))
                slope = _slope(each, model, train, digits.test_images, level)
                print(f"rate {rate:g}, λ {level:g}, {name}: {_gradient(each, train, level):.1e}, "
                      f"test accuracy {right:.3f}, log loss {loss:.3f}, slope {slope:.2f}",
                      flush=True)  # fmt: skip


def _slope(
    network: nn.Module, model: nn.Module, train: Tensors, inputs: torch.Tensor, level: float
) -> float:
    """Return the slope of the scatter of last layers, optimised on bootstrap samples, on the bars.

    The bars are the sampling spread of a fit of the last layer.
    """
    last = deltabars.last_layer()
    fit = deltabars.fit(
        network, train, l2=level, estimator="hessian", params=last, solver="dense", rank=650,
        progress=False,
    )  # fmt: skip
    check = bootstrap_check(
        fit,
        lambda sample: deltabars.polish(model, sample, level, progress=False),
        train,
        inputs,
        replicas=_REPLICAS,
        progress=False,
    )
    return check.agreement.slope


def _gradient(model: nn.Module, train: Tensors, level: float) -> float:
    """Return the relative gradient of the last layer's cost."""
    chosen = deltabars.last_layer()
    return deltabars.Problem(model, train, parameters=chosen, l2=level).relative_gradient


if __name__ == "__main__":
    main()
