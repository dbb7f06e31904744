"""List the files that a fit and a prediction pass through, in the order in which they are entered.

python tools/walk.py             # of an OPG fit of a small network by Krylov, and of its predict()
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deltabars

PACKAGE = Path(deltabars.__file__).parent


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
    """Return the files that `fit` and `predict` pass through."""
    warnings.simplefilter("ignore")  # the network is not trained
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )
    images = torch.randn(64, 1, 8, 8)
    data = DataLoader(TensorDataset(images, torch.randint(10, (64,))), batch_size=16)
    fitted = deltabars.fit(
        model, data, l2=0.01, rank=20, solver="krylov"
    )  # imports what a fit needs, too
    return {
        "fit": walk(lambda: deltabars.fit(model, data, l2=0.01, rank=20, solver="krylov")),
        "predict": walk(lambda: fitted.predict(images)),
    }


if __name__ == "__main__":
    for name, files in walks().items():
        print(f"{name}: {len(files)} files")
        print("\n".join(f"  {file}" for file in files))
