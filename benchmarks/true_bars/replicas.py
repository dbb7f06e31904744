"""Training of a subject and its bootstrap replicas into a folder, and how good they are."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.true_bars.material import Material
from deltabars.errors import DataError

if TYPE_CHECKING:
    from benchmarks.true_bars.subjects import Subject

State = dict[str, Tensor]

_AT_ONCE = 500  # examples to predict
_MOST = 5_000  # of them
_SEEDS = 1_000  # of replicas, for a seed of all


@dataclass(frozen=True, eq=False)
class Trained:
    """State dicts, of the network itself first; how many were trained just now, in which time."""

    states: list[State]
    trained: int
    seconds: float


def bootstrap_sample(count: int, seed: int, number: int) -> Tensor:
    """Draw the indices (N,) of a replica's examples, with replacement."""
    generator = torch.Generator().manual_seed(_SEEDS * seed + number)
    return torch.randint(0, count, (count,), generator=generator)


def train_all(
    subject: Subject,
    material: Material,
    count: int,
    seed: int,
    folder: Path,
    device: torch.device | str,
    on_progress: Callable[[str], object] = lambda line: None,
    *,
    scale: float = 1.0,
) -> Trained:
    """Train the network itself and `count` replicas, or those whose files are not there.

    Files are `network.pt`, `replica-00.pt` and so on in `folder/NAME`, state dicts on the CPU.

    Args:
        subject: what to train.
        material: its data.
        count: replicas.
        seed: of the bootstrap samples.
        folder: where the folder of this subject is, or will be.
        device: where to train.
        on_progress: called with lines on how far it is.
        scale: multiplies the epochs.

    Raises:
        DataError: the files that are there are of another seed or scale.
    """
    own = Path(folder) / subject.name
    own.mkdir(parents=True, exist_ok=True)
    _check(own / "run.json", {"seed": seed, "scale": scale, "examples": len(material)})
    everything = torch.arange(len(material))
    samples = {own / "network.pt": everything}
    for number in range(count):
        path = own / f"replica-{number:02d}.pt"
        samples[path] = bootstrap_sample(len(material), seed, number)
    missing = [path for path in samples if not path.is_file()]
    if len(missing) < len(samples):
        on_progress(f"{len(samples) - len(missing)} networks are in {own} already")
    started = time.perf_counter()
    if missing:
        subject.train(
            material,
            [samples[path] for path in missing],
            device,
            scale=scale,
            keep=lambda number, state: _save(missing[number], state),
            say=on_progress,
        )
    seconds = time.perf_counter() - started
    return Trained(load_states(own, count), len(missing), seconds)


def load_states(folder: Path, count: int) -> list[State]:
    """Load the network's state dict and those of `count` replicas from a subject's folder."""
    names = ["network", *(f"replica-{number:02d}" for number in range(count))]
    return [torch.load(folder / f"{name}.pt", weights_only=True) for name in names]


@torch.no_grad()
def quality(
    subject: Subject, material: Material, part: str, state: State, device: torch.device | str
) -> float:
    """Return the accuracy, or R², of the first 5,000 `"train"`, `"test"` or `"validation"` ones."""
    inputs: Tensor = getattr(material, f"{part}_inputs")[:_MOST]
    targets: Tensor = getattr(material, f"{part}_targets")[:_MOST]
    network = subject.make()
    network.load_state_dict(state)
    network.to(device).eval()
    outputs = torch.cat([network(rows.to(device)).cpu() for rows in inputs.split(_AT_ONCE)])
    if targets.is_floating_point():
        left = (targets - outputs).square().sum()
        return float(1 - left / (targets - targets.mean(0)).square().sum())
    return float((outputs.argmax(-1) == targets).float().mean())


def _check(path: Path, run: dict[str, float]) -> None:
    """Note how the files of a folder are trained, or check that it was the same."""
    if path.is_file():
        before = json.loads(path.read_text())
        if before != run:
            raise DataError(f"{path}: expected {run}, got {before}. Use another folder.")
    else:
        path.write_text(json.dumps(run) + "\n")


def _save(path: Path, state: State) -> None:
    unfinished = path.with_suffix(".part")
    torch.save(state, unfinished)
    os.replace(unfinished, path)
