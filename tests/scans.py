"""scikit-learn's digits as files of MNIST's format, and the command that reproduces from them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.subject import upscaled_digits
from deltabars.cli.entry import main

TRAIN, TEST = 600, 200
STEPS = 20
FEW = {"train_images": 120, "test_images": 100}
# A small run made smaller: the training does not converge, and no number means anything.
SMALLER = ("--small", "--train-images", FEW["train_images"], "--test-images", FEW["test_images"])
QUICK = (
    *SMALLER, "--steps", STEPS, "--rank", 5,
    "--initialisations", 2, "--hessians", 2, "--hessian-rank", 2, "--samples", 4,
)  # fmt: skip


def idx_bytes(array: np.ndarray, magic: bytes = b"\x00\x00\x08") -> bytes:
    """An array as an idx file has it."""
    return magic + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + bytes(array)


@dataclass(frozen=True)
class Run:
    """A reproduction that has been run to its end."""

    data: Path
    out: Path
    done: subprocess.CompletedProcess[str]

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())

    def stage(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.out / "stages" / f"{name}.npz") as arrays:
            return dict(arrays)


def write_scans(folder: Path) -> Path:
    """The four idx files, with as many images."""
    images, labels, test_images, test_labels = upscaled_digits(TRAIN, TEST)
    for name, items in (
        ("train-images-idx3", images[:, 0]),
        ("train-labels-idx1", labels),
        ("t10k-images-idx3", test_images[:, 0]),
        ("t10k-labels-idx1", test_labels),
    ):
        bytes_ = items.mul(255).round() if items.is_floating_point() else items
        (folder / f"{name}-ubyte").write_bytes(idx_bytes(bytes_.to(torch.uint8).numpy()))
    return folder


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "deltabars", *map(str, arguments)]


def environment() -> dict[str, str]:
    """One thread: the same order of sums in every process."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def deltabars(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment())


def run(*arguments: object) -> int:
    """The command in this process; its exit code."""
    return main(["reproduce", *map(str, arguments)])


def only_line(capsys: Any) -> str:
    """What a failed command said: one line of error and nothing else."""
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[-1:]) == ("", 1, "\n")
    assert err.startswith("deltabars: ")
    return err
