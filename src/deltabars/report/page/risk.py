"""Risk against coverage: how often a network errs if it may decline to answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RiskCoverage:
    """The share of wrong answers among the most certain inputs, at every coverage."""

    coverage: Tensor  # (n,): 1/n, 2/n, …, 1
    risk: Tensor  # (n,)
    area: float  # the mean of the risk


def risk_coverage(score: Tensor, wrong: Tensor) -> RiskCoverage:
    """The risk at every coverage, answering in the order of the score (n,), the lowest first.

    Inputs of the same score are answered in any order; the risk is the mean over these orders.
    """
    _, group, sizes = score.double().unique(return_inverse=True, return_counts=True)
    share = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, group, wrong.double()) / sizes
    answered = torch.arange(1, len(score) + 1, dtype=torch.float64)
    risk = share.repeat_interleave(sizes).cumsum(0) / answered
    return RiskCoverage(answered / len(score), risk, float(risk.mean()))
