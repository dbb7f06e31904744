"""List the files that a fit and a prediction pass through, in the order in which they are entered.

python tools/walk.py             # of an OPG fit of a small network by Krylov, and of its predict()
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deltabars

PACKAGE = Path(deltabars.__file__).parent
L2 = 0.1


def walk(call: Callable[[], object]) -> list[str]:
    """Return the files of the package whose functions a call enters."""
    found: dict[str, None] = {}

    def enter(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found[str(path.relative_to(PACKAGE))] = None

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def walks() -> dict[str, list[str]]:
    """Return the files that `fit` and `predict` pass through, where there is nothing to warn of."""
    torch.set_num_threads(1)  # the network is tiny
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )
    images = torch.randn(20, 1, 8, 8).repeat(2, 1, 1, 1)  # with two labels each: not all are right
    labels = torch.randint(10, (40,))
    train(model, images, labels)
    data = DataLoader(TensorDataset(images, labels), batch_size=16)

    def fit() -> deltabars.DeltaFit:
        return deltabars.fit(model, data, l2=L2, rank=8, solver="krylov", progress=False)

    fitted = fit()  # imports what a fit needs, too
    return {"fit": walk(fit), "predict": walk(lambda: fitted.predict(images))}


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Bring the weights near an optimum of their cost."""
    weights = list(model.parameters())
    optimiser = torch.optim.LBFGS(weights, max_iter=40, line_search_fn="strong_wolfe")

    def cost() -> torch.Tensor:
        optimiser.zero_grad()
        penalty = sum((weight.square().sum() for weight in weights), torch.zeros(()))
        total = nn.functional.cross_entropy(model(images), labels) + 0.5 * L2 * penalty
        total.backward()
        return total

    optimiser.step(cost)


if __name__ == "__main__":
    for name, files in walks().items():
        print(f"{name}: {len(files)} files")
        print("\n".join(f"  {file}" for file in files))
