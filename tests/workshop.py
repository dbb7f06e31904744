"""A user's folder: digits as PNG files, a model in a file of its own, and trained weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import deltabars
from deltabars.cli.entry import main
from deltabars.recipes.digits import load_digits, train_to_convergence

L2 = 0.01
RANK = 30
TRAIN, TEST = 200, 60
NET = """\
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*make())

ready = make()
"""


@dataclass(frozen=True)
class Workshop:
    """What a user has: folders `train` and `test`, `net.py`, `net.safetensors`, and a RUN."""

    folder: Path
    model: nn.Module
    train: tuple[Tensor, Tensor]  # in the order of the files
    test: tuple[Tensor, Tensor]

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `deltabars fit` but for --out."""
        return (
            "--model", f"{self.folder / 'net.py'}:make",
            "--weights", str(self.folder / "net.safetensors"),
            "--data", str(self.folder / "train"), "--gray",
            "--l2", str(L2), "--rank", str(RANK), "--device", "cpu",
        )  # fmt: skip

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def fit(self, **options: Any) -> deltabars.DeltaFit:
        """The same fit by the Python interface."""
        arguments: dict[str, Any] = {"l2": L2, "rank": RANK, "progress": False, **options}
        return deltabars.fit(self.model, self.train, **arguments)


def write_pictures(folder: Path, images: Tensor, labels: Tensor | None) -> None:
    """PNG files of images (N, 1, H, W) in 0 … 1; labels give sub-folders."""
    for number, image in enumerate(images):
        place = folder if labels is None else folder / f"digit {int(labels[number])}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = (image[0] * 255).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).save(place / f"{number:04d}.png")


def make_workshop(folder: Path) -> Workshop:
    """Write the files, train, and fit."""
    digits = load_digits()
    train = digits.train_images[:TRAIN], digits.train_labels[:TRAIN]
    test = digits.test_images[:TEST], digits.test_labels[:TEST]

    def in_order(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Examples in the order of their files, with the pixels that the files have."""
        order = labels.sort(stable=True).indices
        return (images[order] * 255).round() / 255, labels[order]

    for name, images, labels in (("train", *train), ("test", *test), ("flat", test[0], None)):
        write_pictures(folder / name, images, labels)
    (folder / "net.py").write_text(NET)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))
    train_to_convergence(model, *in_order(*train), L2, steps=150)
    save_file(model.state_dict(), folder / "net.safetensors")
    torch.save({"epoch": 7, "state_dict": model.state_dict()}, folder / "net.pt")
    pixels = (test[0][:, 0] * 255).round().to(torch.uint8).numpy()
    np.savez(folder / "test.npz", images=pixels, labels=test[1].numpy())
    found = Workshop(folder, model, in_order(*train), in_order(*test))
    assert main(["fit", *found.options, "--out", str(found.run), "--quiet"]) == 0
    return found


def contents(folder: Path) -> set[str]:
    """All files and folders below, but for Python's own."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in paths}
