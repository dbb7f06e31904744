"""What every work is given."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.sizes import Size
from benchmarks.sources import Sources, Spectra
from benchmarks.subject import Subject, make_subject
from deltabars.problem.problem import Problem
from deltabars.recipes.paper import L2


@dataclass(frozen=True, eq=False)
class Bench:
    """The size, the files, the network and its images, and what earlier works found.

    Attributes:
        say: called with a line on what is being done.
    """

    size: Size
    sources: Sources
    spectra: Spectra
    say: Callable[[str], None]

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        return torch.device(self.size.device)

    @cached_property
    def subject(self) -> Subject:
        """The network and its images, made when first asked for."""
        self.say("making the network and its images")
        return make_subject(self.size, self.sources)

    def problem(self, count: int, dtype: torch.dtype | None = None) -> Problem:
        """Return the paper's network on the first `count` images."""
        return Problem(self.subject.model, self.subject.train(count), l2=L2, dtype=dtype)


def release(device: torch.device) -> None:
    """Give back the memory of what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
