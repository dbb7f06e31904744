"""Which outputs of each input are asked for, where there are too many for all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.likelihoods import Likelihood


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
        """The numbers (B, k) of the outputs asked for, given all of them (B, C)."""
        if self.listed is not None:
            listed = torch.tensor(self.listed, device=outputs.device)
            return listed.expand(outputs.shape[0], -1)
        # The mean rises with the output, which has more digits; of equal ones the first goes first.
        return outputs.sort(dim=-1, descending=True, stable=True).indices[:, : self.count]


def choose_classes(asked: Any, num_outputs: int, likelihood: Likelihood) -> Classes | None:
    """The outputs that `"topN"` or a list of their numbers stands for; None for all of them."""
    if asked is None:
        return None
    if isinstance(asked, str):
        return _highest(asked, num_outputs, likelihood)
    numbers = asked.tolist() if hasattr(asked, "tolist") else asked
    if not isinstance(numbers, Iterable) or isinstance(numbers, dict | set | bytes):
        raise BadValueError(
            f"classes: expected None, 'top5' or the like, or a list of class numbers, got "
            f"{asked!r}. One class goes in a list too, such as [3]."
        )
    return _listed(list(numbers), num_outputs)


def _highest(asked: str, num_outputs: int, likelihood: Likelihood) -> Classes:
    found = re.fullmatch(r"top([1-9][0-9]*)", asked)
    if found is None:
        raise BadValueError(
            f"classes: expected 'top' and a whole number from 1 on, such as 'top5', got {asked!r}. "
            "A list of class numbers names them one by one."
        )
    if not likelihood.discrete:
        raise BadValueError(
            f"classes: expected a list of numbers of outputs, such as [0, 1], for the "
            f"{likelihood.name} likelihood, got {asked!r}: its outputs are no probabilities."
        )
    count = int(found[1])
    if count > num_outputs:
        raise BadValueError(
            f"classes: expected at most 'top{num_outputs}', for the network has {num_outputs} "
            f"outputs, got {asked!r}. classes=None gives all of them."
        )
    return Classes(count, None)


def _listed(numbers: list[Any], num_outputs: int) -> Classes:
    if not numbers:
        raise BadValueError(
            "classes: expected at least one class number, got none. classes=None gives all classes."
        )
    for number in numbers:
        if not is_whole(number):
            raise BadValueError(
                f"classes: expected whole numbers, got {number!r}. Classes are named by their "
                f"numbers, from 0 to {num_outputs - 1}."
            )
        if not 0 <= number < num_outputs:
            raise BadValueError(
                f"classes: expected numbers from 0 to {num_outputs - 1}, for the network has "
                f"{num_outputs} outputs, got {number}. Classes count from 0; the last one is "
                f"{num_outputs - 1}."
            )
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise BadValueError(
            f"classes: expected each class once, got {twice} more than once: the score would count "
            "it so often. Name it once."
        )
    return Classes(len(numbers), tuple(int(number) for number in numbers))
