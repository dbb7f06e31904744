"""What the networks of a subject say: outputs of the network and of its replicas, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from benchmarks.true_bars.material import Material
from benchmarks.true_bars.replicas import State

if TYPE_CHECKING:
    from benchmarks.true_bars.subjects import Subject

PARTS = ("test", "validation", "foreign")

_AT_ONCE = 500  # inputs


@torch.no_grad()
def outputs_of(
    subject: Subject, material: Material, states: list[State], device: torch.device | str
) -> dict[str, Tensor]:
    """Return the outputs z of every network by part of the data, (R + 1, n, C), float64."""
    found: dict[str, list[Tensor]] = {part: [] for part in PARTS}
    network = subject.make().to(device).eval()
    for state in states:
        network.load_state_dict(state)
        for part in PARTS:
            inputs: Tensor = getattr(material, f"{part}_inputs")
            rows = [network(few.to(device)).double().cpu() for few in inputs.split(_AT_ONCE)]
            found[part].append(torch.cat(rows))
    return {part: torch.stack(each) for part, each in found.items()}


def save_outputs(path: Path, outputs: dict[str, Tensor]) -> None:
    """Write outputs in float32."""
    np.savez_compressed(path, **{part: each.float().numpy() for part, each in outputs.items()})


def load_outputs(path: Path) -> dict[str, Tensor]:
    """Read them again, as float64."""
    with np.load(path) as file:
        return {part: torch.from_numpy(file[part]).double() for part in PARTS}
