"""The outputs that are wanted of each input, where there are too many for all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.likelihoods.base import Likelihood


@dataclass(frozen=True)
class Classes:
    """k of the C outputs: the same ones for all inputs, or those with each input's highest mean.

    Attributes:
        count: k.
        listed: the numbers of the outputs; None for the k highest.
    """

    count: int
    listed: tuple[int, ...] | None

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the numbers (B, k) of the wanted outputs, given all of them (B, C)."""
        if self.listed is not None:
            return torch.tensor(self.listed, device=outputs.device).expand(len(outputs), -1)
        # The mean rises with the output, which has more digits; of equal ones the first goes first.
        return outputs.sort(dim=-1, descending=True, stable=True).indices[:, : self.count]


def choose_classes(asked: Any, num_outputs: int, likelihood: Likelihood) -> Classes | None:
    """Return the outputs that `"topN"` or a list of their numbers stands for; None for all.

    Raises:
        BadValueError: it is neither, or there are no such outputs.
    """
    if asked is None:
        return None
    top = re.fullmatch(r"top([1-9][0-9]*)", asked) if isinstance(asked, str) else None
    if top is not None and likelihood.discrete and int(top[1]) <= num_outputs:
        return Classes(int(top[1]), None)
    numbers = asked.tolist() if hasattr(asked, "tolist") else asked
    if isinstance(numbers, list | tuple | range) and 0 < len(numbers) <= num_outputs:
        known = [int(k) for k in numbers if is_whole(k) and 0 <= k < num_outputs]
        if len(set(known)) == len(numbers):
            return Classes(len(known), tuple(known))
    tops = f"'top1' to 'top{num_outputs}', or " if likelihood.discrete else ""
    raise BadValueError(
        f"classes: expected None for all {num_outputs} outputs, {tops}a list of different whole "
        f"numbers from 0 to {num_outputs - 1}, got {asked!r:.200}."
    )
