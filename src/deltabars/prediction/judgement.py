"""What error bars can be read as: one judgement, which everything that shows a prediction shows.

A bar is the standard deviation of a probability that is linear in the weights. Two inequalities
show where none is. A number in [0, 1] of mean p has a standard deviation of √(p(1 − p)) at most.
And its mean square deviation from p̂ is at least that of its average p̄: over the classes
E‖p − p̂‖² ≥ ‖p̄ − p̂‖², so that a score far below that is too small. For one logit both mean that the
weights scatter it by a standard deviation above 2, farther than the softmax is straight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LEVELS = ("bars", "ranking only", "meaningless")

_VISIBLE = 0.01  # of a probability: contradictions of less matter to nobody
_BARS_OFF = 3.0
_SOME, _MOST = 0.05, 0.5  # shares of the inputs
_WIDE, _EMPTY = 0.25, 1.0  # relative bounds of the score


@dataclass(frozen=True)
class Evidence:
    """What a fit says of the bars of all its predictions.

    Attributes:
        rank: K of the prediction.
        opg: whether the estimator is the one whose bound narrows first.
        last_layer: whether no other parameters were fitted.
        off_optimum: how far the weights are from an optimum, in words; empty where they are near.
        at_chance: whether the network is no better on its training data than constant outputs.
    """

    rank: int
    opg: bool
    last_layer: bool
    off_optimum: str = ""
    at_chance: bool = False


@dataclass(frozen=True)
class Judgement:
    """What the error bars of a prediction can be read as.

    Attributes:
        level: `"bars"`: standard deviations, as far as can be seen; `"ranking only"`: their order
            says which inputs are less settled, their size is wrong; `"meaningless"`: not even that
            is backed by anything.
        reason: what was found, in words that Python and the command line share.
        remedy: what to do about it; empty for `"bars"`.
        evidence: what the fit contributed, so that parts of a prediction can be judged as one.
    """

    level: str
    reason: str
    remedy: str
    evidence: Evidence

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The level with its reason, and the remedy if there is one."""
        return [f"{self.level}: {self.reason}", *([self.remedy] if self.remedy else [])]

    @property
    def plain(self) -> dict[str, str]:
        """Level, reason and remedy, for JSON."""
        return {"level": self.level, "reason": self.reason, "remedy": self.remedy}

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Judgement:
        """Read a judgement from JSON, of `dataclasses.asdict`.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        found = cls(**{**raw, "evidence": Evidence(**raw["evidence"])})
        texts = (found.level, found.reason, found.remedy)
        if found.level not in LEVELS or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a judgement {found.level!r}")
        return found


def judge(evidence: Evidence, prediction: Any) -> Judgement:
    """Judge a prediction by its worst finding; the reasons and remedies are those of all."""
    found = []  # severity, reason, remedy
    if evidence.at_chance:
        reason = "On the training data the network is no better than chance."
        remedy = "Load the trained weights, and prepare inputs and targets as in training."
        found.append((2, reason, remedy))
    wide, flat = prediction.impossible, prediction.saturated
    if wide is not None and len(wide):
        share = _share(wide if flat is None else wide | flat)
        marks = {
            "above what a probability can have": wide,
            "that vanishes where the softmax saturates": flat,
        }
        parts = [
            f"{_share(mark):.0%} of the inputs have an error bar {text}"
            for text, mark in marks.items()
            if mark is not None and bool(mark.any())
        ]
        reason = f"The weights scatter too far for a first-order answer: {' and '.join(parts)}."
        few = "" if evidence.last_layer else ", or fewer parameters (those of the last layer)"
        if share > _SOME:
            found.append((2 if share > _MOST else 1, reason, f"Fit with a larger λ{few}."))
    if evidence.off_optimum:
        reason = f"The weights are at no optimum: {evidence.off_optimum}."
        remedy = "Train on with this cost, or give the λ that the network was trained with."
        found.append((1, reason, remedy))
    bound = mean_bound(prediction)
    if bound > _WIDE:
        reason = (
            f"With K = {evidence.rank:,} a score is known to ± {bound:.0%} of itself on average."
        )
        other = "" if evidence.opg else ", or with the estimator opg"
        remedy = f"Fit with a larger rank, or let it choose itself{other}."
        found.append((2 if bound > _EMPTY else 1, reason, remedy))
    if not found:
        reason = "Nothing speaks against reading the error bars as standard deviations."
        return Judgement(LEVELS[0], reason, "", evidence)
    found.sort(key=lambda finding: -finding[0])
    severities, reasons, remedies = zip(*found, strict=True)
    return Judgement(LEVELS[severities[0]], " ".join(reasons), " ".join(remedies), evidence)


def impossible(mean: Tensor, std: Tensor) -> Tensor:
    """Mark inputs (B,) with a bar above what a probability can have: std > √(p(1 − p))."""
    mean, std = mean.double(), std.double()
    most = (mean * (1 - mean)).clamp(min=0).sqrt()
    return ((std > most) & (std > _VISIBLE)).any(1)


def saturated(mean: Tensor, score: Tensor, moderated: Tensor) -> Tensor:
    """Mark inputs (B,) whose bars vanish although their probabilities move: ‖p̄ − p̂‖ > 3·score."""
    moved = (moderated.double() - mean.double()).norm(dim=1)
    return (moved > _BARS_OFF * score.double()) & (moved > _VISIBLE)


def mean_bound(prediction: Any) -> float:
    """Return the mean of score_error / score, over the inputs whose score is not zero."""
    score, error = prediction.score.double(), prediction.score_error.double()
    positive = score > 0
    return float((error[positive] / score[positive]).mean()) if bool(positive.any()) else 0.0


def _share(mark: Tensor) -> float:
    return float(mark.double().mean())
