"""Predictions with error bars, and one judgement of what these can be read as.

A bar is the standard deviation of a probability that is linear in the weights. Two inequalities
show where none is. A number in [0, 1] of mean p has a standard deviation of √(p(1 − p)) at most.
And its mean square deviation from p̂ is at least that of its average p̄: over the classes
E‖p − p̂‖² ≥ ‖p̄ − p̂‖², so that a score far below that is too small. For one logit both mean that the
weights scatter it by a standard deviation above 2, farther than the softmax is straight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.covariance.base import Spread
from deltabars.errors import BadValueError, library
from deltabars.prediction import display
from deltabars.prediction.averaging import Moderated

# The columns of a table: those of an input, and those of each of its outputs.
ONE_AN_INPUT = (
    "score", "score_error", "score_low", "score_high", "mutual_information", "entropy",
    "saturated", "impossible",
)  # fmt: skip
ONE_AN_OUTPUT = ("mean", "std", "std_error", "std_low", "std_high", "total_std", "moderated")


class Arrays(dict[str, Any]):
    """A Prediction's fields as NumPy arrays, by key (`["std"]`) or by attribute (`.std`)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for B inputs, their error bars, and the error bars' own bounds.

    The exact value, with every eigenpair computed, lies in `std ± std_error` and in
    `[std_low, std_high]` (see the documentation of the bound), and the score likewise.

    Attributes:
        mean: class probabilities (or logits, in logit space), (B, C); of k classes alone where
            only these were asked for, and the same for all that follows.
        std, variance: their standard deviations and variances, (B, C).
        std_error, std_low, std_high: how far the exact standard deviation can be, (B, C).
        score: √(Σ over classes of the variance), one number an input, (B,).
        score_error, score_low, score_high: how far the exact score can be, (B,).
        covariance: of the classes, (B, C, C), or None.
        label: the predicted class among all, (B,) (Bernoulli: (B, C); Gaussian: None).
        noise: σ of the targets around the mean, (B, C); None unless Gaussian.
        total_std: √(std² + σ²), that of a target to come, (B, C); None unless Gaussian.
        classes: the numbers of the k classes that were asked for, (B, k); None for all of them.
        moderated: class probabilities averaged over the scatter of the weights, (B, C), or None.
        entropy: of the moderated probabilities, in nats, (B,), or None.
        mutual_information: between label and weights, in nats, (B,), or None. The rest of the
            entropy is ambiguity that no further data would remove.
        saturated: where the error bars vanish because the softmax saturates: `moderated` is more
            than three scores, and a hundredth, from `mean`, (B,); None without `moderated`.
        impossible: where an error bar is above √(p(1 − p)), the most that a probability can
            scatter, (B,); None where the mean is no probability.
        tail_share: how much of the variance is of directions outside the computed eigenvectors,
            from 0 to 1, (B,), or None.
        judgement: what the error bars can be read as, with the reason and the remedy; None if it
            is not known. That of a part of a prediction is that of all of it.
    """

    mean: Tensor
    std: Tensor
    variance: Tensor
    std_error: Tensor
    std_low: Tensor
    std_high: Tensor
    score: Tensor
    score_error: Tensor
    score_low: Tensor
    score_high: Tensor
    covariance: Tensor | None
    label: Tensor | None
    noise: Tensor | None = None
    total_std: Tensor | None = None
    classes: Tensor | None = None
    moderated: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    saturated: Tensor | None = None
    impossible: Tensor | None = None
    tail_share: Tensor | None = None
    judgement: Judgement | None = None

    @classmethod
    def compute(
        cls,
        mean: Tensor,
        spread: Spread,
        label: Tensor | None,
        noise: float | None = None,
        *,
        bound: str = "rigorous",
        with_covariance: bool = False,
        classes: Tensor | None = None,
        moderated: Moderated | None = None,
        tempered: Tensor | None = None,
        of_probabilities: bool = False,
    ) -> Prediction:
        """Put error bars on one batch of means; everything is float64 until the end.

        `tempered` are the means at the temperature that they were averaged at, if it is not 1.
        """
        values: dict[str, Tensor | None] = {"variance": spread.variance}
        values["covariance"] = spread.covariance if with_covariance else None
        std, score = spread.std(bound), spread.score(bound)
        for name, interval in (("std", std), ("score", score)):
            values[name], values[f"{name}_error"] = interval.value, interval.error
            values[f"{name}_low"], values[f"{name}_high"] = interval.low, interval.high
        if noise is not None:
            values["noise"] = torch.full_like(mean, noise)
            values["total_std"] = (spread.variance + noise**2).sqrt()
        if spread.beyond is not None:
            total = spread.variance.sum(-1)
            part = (spread.beyond.sum(-1) / total).where(total > 0, torch.zeros_like(total))
            values["tail_share"] = part.clamp(max=1)
        if moderated is not None:
            values |= zip(("moderated", "entropy", "mutual_information"), moderated, strict=True)
        found: dict[str, Any] = {
            name: None if value is None else value.to(mean.dtype) for name, value in values.items()
        }
        if of_probabilities:
            found["impossible"] = impossible(mean, std.value)
            if moderated is not None:
                plain = mean if tempered is None else tempered
                found["saturated"] = saturated(plain, score.value, moderated.mean)
        return cls(mean=mean, label=label, classes=classes, **found)

    @classmethod
    def concatenate(cls, parts: Sequence[Prediction]) -> Prediction:
        """Join several batches; judge them as one where they are of one fit."""
        first = parts[0]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in first._tensors()
        }
        whole = replace(first, **joined, judgement=None)
        found = {None if part.judgement is None else part.judgement.evidence for part in parts}
        evidence = found.pop()
        return whole if found or evidence is None else whole.judged_by(evidence)

    def judged_by(self, evidence: Evidence) -> Prediction:
        """Judge the prediction by the evidence of its fit."""
        return replace(self, judgement=judge(evidence, self))

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __getitem__(self, index: Any) -> Prediction:
        """Select inputs; one number selects one input and keeps the batch."""
        if isinstance(index, Integral) or (isinstance(index, Tensor) and index.ndim == 0):
            index = operator.index(index)
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is out of range for {len(self)} predictions")
            index = slice(index, index + 1 or None)
        return self._map(lambda value: value[index])

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the ends (B, C) of the intervals of a regression's targets: mean ∓ z·total_std."""
        if isinstance(level, bool) or not isinstance(level, Real) or not 0 < float(level) < 1:
            raise BadValueError(f"level: expected a number between 0 and 1, got {level!r}.")
        if self.total_std is None:
            raise BadValueError("interval: expected a Gaussian likelihood, got one of classes.")
        half = torch.special.ndtri(torch.tensor((1 + float(level)) / 2, dtype=torch.float64))
        reach = float(half) * self.total_std
        return self.mean - reach, self.mean + reach

    def to(self, device: torch.device | str) -> Prediction:
        """Return the same prediction on a device."""
        return self._map(lambda value: value.to(device))

    def numpy(self) -> Arrays:
        """Return all tensors that are known as NumPy arrays."""
        return Arrays({name: value.cpu().numpy() for name, value in self._tensors().items()})

    def columns(
        self, endings: Sequence[str] | None = None, *, interval_ends: bool = True
    ) -> dict[str, np.ndarray]:
        """Return the columns of a table: label, score, information, then those of each output.

        The `endings` of an output's columns are its number by default, or its index among the
        classes asked for (`class_0`, …). Without `interval_ends` there is no `score_low` etc.
        """
        arrays = self.numpy()
        known = [k for k in arrays if interval_ends or not k.endswith(("_low", "_high"))]
        of_inputs = [k for k in ("label", *ONE_AN_INPUT) if k in known and arrays[k].ndim == 1]
        found = {name: arrays[name] for name in of_inputs}
        ends = endings or [str(k) for k in range(self.mean.shape[1])]
        for name in ("classes", *ONE_AN_OUTPUT):
            title = "class" if name == "classes" else name
            if name in known:
                found |= {f"{title}_{end}": arrays[name][:, k] for k, end in enumerate(ends)}
        return found

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with the columns of `columns`, one row an input."""
        return library("pandas", "pandas").DataFrame(self.columns())

    def plot(self, ax: Any = None, *, targets: Tensor | None = None) -> Any:
        """Draw up to six inputs' means with their error bars; of more, std against mean.

        Return the matplotlib Axes, `ax` or new ones. With `targets`, the true classes (B,), right
        and wrong predictions have colours of their own.
        """
        return display.draw(self, ax, targets)

    def __repr__(self) -> str:
        return display.describe(self)

    def _repr_html_(self) -> str:
        return display.describe_in_html(self)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Prediction:
        mapped: dict[str, Any] = {k: function(value) for k, value in self._tensors().items()}
        return replace(self, **mapped)


LEVELS = ("bars", "ranking only", "meaningless")

_VISIBLE = 0.01  # of a probability: contradictions of less matter to nobody
_BARS_OFF = 3.0
_SOME, _MOST = 0.05, 0.5  # shares of the inputs
_WIDE, _EMPTY = 0.25, 1.0  # relative bounds of the score
_BEYOND = 0.6  # of the variance
_UNSETTLED = 2.0  # times the sampling noise of the gradient


@dataclass(frozen=True)
class Evidence:
    """What a fit says of the bars of all its predictions."""

    rank: int  # K of the prediction
    opg: bool  # whether the estimator is the one whose bound narrows first
    last_layer: bool  # whether no other parameters were fitted
    off_optimum: str = ""  # how far the weights are from an optimum, in words; empty where near
    at_chance: bool = False  # no better on the training data than constant outputs
    spread: str = "posterior"
    l2: float | None = None  # λ, where one number is known of each
    l2_evidence: float | None = None  # that of the evidence
    is_given: bool = True  # whether λ was given
    is_contradicted: bool = False  # whether the evidence has another λ by more than ten times
    gradient_to_noise: float | None = None  # t: the gradient in units of its sampling noise
    calibrated: int = 0  # by how many retrained networks


@dataclass(frozen=True)
class Judgement:
    """What the error bars of a prediction can be read as.

    `"bars"`: standard deviations; `"ranking only"`: their order says which inputs are less settled,
    their size is wrong; `"meaningless"`: not even their order is backed.
    """

    level: str
    reason: str  # what was found, in words that Python and the command line share
    remedy: str  # what to do about it; empty for "bars"
    evidence: Evidence  # of the fit, so that parts of a prediction can be judged as one
    facts: str = ""  # the numbers that the level rests on, in one line

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The level with its reason, and the remedy if there is one."""
        return [f"{self.level}: {self.reason}", *filter(None, (self.remedy, self.facts))]

    @property
    def plain(self) -> dict[str, str]:
        """The level, reason, remedy and facts, for JSON."""
        return {name: getattr(self, name) for name in ("level", "reason", "remedy", "facts")}

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Judgement:
        """Read JSON of `dataclasses.asdict`; ValueError, KeyError or TypeError if it is other."""
        found = cls(**{**raw, "evidence": Evidence(**raw["evidence"])})
        texts = (found.level, found.reason, found.remedy, found.facts)
        if found.level not in LEVELS or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a judgement {found.level!r}")
        return found


def judge(evidence: Evidence, prediction: Prediction) -> Judgement:
    """Judge a prediction by its worst finding; the reasons and remedies are those of all."""
    found = []  # severity, reason, remedy
    if evidence.at_chance:
        reason = "On the training data the network is no better than chance."
        remedy = "Load the trained weights, and prepare inputs and targets as in training."
        found.append((2, reason, remedy))
    wide, flat = prediction.impossible, prediction.saturated
    marked = [mark for mark in (wide, flat) if mark is not None]
    share = float(torch.stack(marked).any(0).double().mean()) if marked and len(prediction) else 0.0
    if share > _SOME:
        texts = "above what a probability can have", "that vanishes where the softmax saturates"
        parts = [
            f"{float(mark.double().mean()):.0%} of the inputs have an error bar {text}"
            for mark, text in zip((wide, flat), texts, strict=True)
            if mark is not None and bool(mark.any())
        ]
        reason = f"The weights scatter too far for a first-order answer: {' and '.join(parts)}."
        few = "" if evidence.last_layer else ", or fewer parameters (those of the last layer)"
        found.append((2 if share > _MOST else 1, reason, f"Fit with a larger λ{few}."))
    found += _of_the_point(evidence)
    if evidence.off_optimum and not evidence.calibrated:
        reason = f"The weights are at no optimum: {evidence.off_optimum}."
        remedy = "Train on with this cost, or give the λ that the network was trained with."
        found.append((1, reason, remedy))
    bound, beyond = mean_bound(prediction), tail_share(prediction)
    if evidence.spread == "sampling":
        if beyond > _BEYOND and not evidence.calibrated:
            reason = (
                f"{beyond:.0%} of the variance is of directions that were not computed, where it "
                "is an estimate."
            )
            remedy = "Fit with a larger rank, or calibrate with two retrained networks."
            found.append((1, reason, remedy))
    elif bound > _WIDE:
        known = f"a score is known to ± {bound:.0%} of itself on average."
        other = "" if evidence.opg else ", or with the estimator opg"
        remedy = f"Fit with a larger rank, or let it choose itself{other}."
        found.append((1 + (bound > _EMPTY), f"With K = {evidence.rank:,} {known}", remedy))
    facts = _facts(evidence, None if prediction.tail_share is None else beyond, bound)
    if not found:
        reason = "Nothing speaks against reading the error bars as standard deviations."
        return Judgement(LEVELS[0], reason, "", evidence, facts)
    found.sort(key=lambda finding: -finding[0])
    severities, reasons, remedies = zip(*found, strict=True)
    said = " ".join(reasons), " ".join(remedies)
    return Judgement(LEVELS[severities[0]], *said, evidence, facts)


def _of_the_point(evidence: Evidence) -> list[tuple[int, str, str]]:
    """Return what speaks against the trained point and its λ: severity, reason, remedy."""
    found = []
    ratio = evidence.gradient_to_noise
    if ratio is not None and ratio > _UNSETTLED and not evidence.calibrated:
        reason = (
            "The weights are at no optimum: in the computed directions the gradient is "
            f"{ratio:.1f} times its sampling noise (1 or less is converged), so that retraining "
            "moves more than the data account for."
        )
        remedy = "Train on, calibrate with two retrained networks, or polish the last layer."
        if not evidence.off_optimum:  # which says the same of a given λ
            found.append((1, reason, remedy))
    if evidence.is_contradicted and not evidence.calibrated:
        reason = (
            f"λ = {evidence.l2:.3g} was given, where the evidence says {evidence.l2_evidence:.3g}."
        )
        found.append((1, reason, "Fit with the λ of the evidence (auto)."))
    return found


def _facts(evidence: Evidence, beyond: float | None, bound: float) -> str:
    """Return the numbers behind a judgement in one line; empty where none is known."""
    parts = []
    if evidence.gradient_to_noise is not None:
        parts.append(f"gradient {evidence.gradient_to_noise:.2g} of its sampling noise")
    if beyond is not None:
        parts.append(f"{beyond:.0%} of the variance beyond the eigenpairs")
    parts.append(f"guaranteed to ± {bound:.0%}")
    if evidence.l2 is not None:
        how = "given" if evidence.is_given else "by the evidence"
        parts.append(f"λ = {evidence.l2:.2g} {how}")
    if evidence.calibrated:
        parts.append(f"calibrated by {evidence.calibrated} retrained networks")
    return f"({evidence.spread}: {', '.join(parts)})"


def tail_share(prediction: Prediction) -> float:
    """Return how much of the variance is outside the eigenvectors, on average over the inputs."""
    share = prediction.tail_share
    return float(share.double().mean()) if share is not None and len(share) else 0.0


def impossible(mean: Tensor, std: Tensor) -> Tensor:
    """Mark inputs (B,) with a bar above what a probability can have: std > √(p(1 − p))."""
    mean, std = mean.double(), std.double()
    most = (mean * (1 - mean)).clamp(min=0).sqrt()
    return ((std > most) & (std > _VISIBLE)).any(1)


def saturated(mean: Tensor, score: Tensor, moderated: Tensor) -> Tensor:
    """Mark inputs (B,) whose bars vanish although their probabilities move: ‖p̄ − p̂‖ > 3·score."""
    moved = (moderated.double() - mean.double()).norm(dim=1)
    return (moved > _BARS_OFF * score.double()) & (moved > _VISIBLE)


def mean_bound(prediction: Prediction) -> float:
    """Return the mean of score_error / score, over the inputs whose score is not zero."""
    score, error = prediction.score.double(), prediction.score_error.double()
    positive = score > 0
    return float((error[positive] / score[positive]).mean()) if bool(positive.any()) else 0.0
