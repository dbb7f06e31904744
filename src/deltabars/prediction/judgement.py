"""What error bars can be read as: one judgement, which everything that shows a prediction shows.

A bar is the standard deviation of a probability that is linear in the weights. Two inequalities
tell where none is. A number in [0, 1] of mean p has a standard deviation of √(p(1 − p)) at most.
And its deviation from p̂ is at least that of its average p̄, E(p − p̂)² ≥ (p̄ − p̂)², summed over the
classes E‖p − p̂‖² ≥ ‖p̄ − p̂‖², so that a score far below that is too small. With one logit of
standard deviation s the first needs s > 2, at p = ½; the second, at p → 1 and by three bars,
(exp(s²/2) − 1)/s > 3, which is s > 2 as well. Both say that the weights scatter the logits farther
than the softmax is straight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deltabars.problem.problem import TRAIN_ON, how_far, is_far

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
        relative_gradient: ‖∇cost‖ over the norms of its two parts.
        distance: from the optimum, in error bars (`deltabars.effective`); None in a fit
            of an older version.
        at_chance: whether the network is no better on its training data than constant outputs.
    """

    rank: int
    opg: bool
    last_layer: bool
    relative_gradient: float
    distance: float | None
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
        """A judgement from JSON, of `dataclasses.asdict`.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        found = cls(**{**raw, "evidence": Evidence(**raw["evidence"])})
        texts = (found.level, found.reason, found.remedy)
        if found.level not in LEVELS or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a judgement {found.level!r}")
        return found


def judge(evidence: Evidence, prediction: Any) -> Judgement:
    """The judgement of a prediction: that of its worst finding, with the reasons of all."""
    found = [
        finding
        for finding in (
            _of_training(evidence),
            _of_linearity(evidence, prediction),
            _of_optimum(evidence),
            _of_bound(evidence, prediction),
        )
        if finding is not None
    ]
    if not found:
        reason = "Nothing speaks against reading the error bars as standard deviations."
        return Judgement(LEVELS[0], reason, "", evidence)
    found.sort(key=lambda finding: -LEVELS.index(finding[0]))
    levels, reasons, remedies = zip(*found, strict=True)
    return Judgement(levels[0], " ".join(reasons), " ".join(remedies), evidence)


def impossible(mean: Tensor, std: Tensor) -> Tensor:
    """Where a bar is above what a probability can have: std > √(p(1 − p)) of some class, (B,)."""
    mean, std = mean.double(), std.double()
    most = (mean * (1 - mean)).clamp(min=0).sqrt()
    return ((std > most) & (std > _VISIBLE)).any(1)


def saturated(mean: Tensor, score: Tensor, moderated: Tensor) -> Tensor:
    """Where bars vanish although the probabilities move, ‖p̄ − p̂‖ > 3·score, (B,)."""
    moved = (moderated.double() - mean.double()).norm(dim=1)
    return (moved > _BARS_OFF * score.double()) & (moved > _VISIBLE)


_Finding = tuple[str, str, str]  # level, reason, remedy


def _of_training(evidence: Evidence) -> _Finding | None:
    if not evidence.at_chance:
        return None
    return (
        LEVELS[2],
        "On the training data the network is no better than chance.",
        "Load the trained weights, and prepare inputs and targets as in training.",
    )


def _of_linearity(evidence: Evidence, prediction: Any) -> _Finding | None:
    wide, flat = prediction.impossible, prediction.saturated
    if wide is None or not len(wide):
        return None
    fails = wide if flat is None else wide | flat
    share = float(fails.double().mean())
    if share <= _SOME:
        return None
    few = "" if evidence.last_layer else ", or fewer parameters (those of the last layer)"
    said = {
        "above what a probability can have": wide,
        "that vanishes where the softmax saturates": flat,
    }
    parts = [
        f"{_percent(these)} of the inputs have an error bar {text}"
        for text, these in said.items()
        if these is not None and bool(these.any())
    ]
    return (
        LEVELS[2] if share > _MOST else LEVELS[1],
        f"The weights scatter too far for a first-order answer: {' and '.join(parts)}.",
        f"Fit with a larger λ{few}.",
    )


def _of_optimum(evidence: Evidence) -> _Finding | None:
    if not is_far(evidence.relative_gradient, evidence.distance):
        return None
    said = how_far(evidence.relative_gradient, evidence.distance)
    return LEVELS[1], f"The weights are at no optimum: {said}.", TRAIN_ON


def _of_bound(evidence: Evidence, prediction: Any) -> _Finding | None:
    bound = mean_bound(prediction)
    if bound <= _WIDE:
        return None
    other = "" if evidence.opg else ", or with the estimator opg"
    return (
        LEVELS[2] if bound > _EMPTY else LEVELS[1],
        f"With K = {evidence.rank:,} a score is known to ± {bound:.0%} of itself on average.",
        f"Fit with a larger rank, or let it choose itself{other}.",
    )


def mean_bound(prediction: Any) -> float:
    """The mean of score_error / score, over the inputs whose score is not zero."""
    score, error = prediction.score.double(), prediction.score_error.double()
    positive = score > 0
    return float((error[positive] / score[positive]).mean()) if bool(positive.any()) else 0.0


def _percent(these: Tensor) -> str:
    return f"{float(these.double().mean()):.0%}"
