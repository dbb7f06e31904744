"""Predictions with error bars, and how they are computed from F and a covariance."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.covariance.estimators import Spread
from deltabars.errors import BadValueError, MissingDependencyError
from deltabars.prediction.averaging import Moderated
from deltabars.prediction.display import (
    describe_prediction,
    describe_prediction_in_html,
    draw_prediction,
)
from deltabars.prediction.judgement import Evidence, Judgement, impossible, judge, saturated

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
        of_probabilities: bool = False,
    ) -> Prediction:
        """Put error bars on one batch; everything is float64 until the end.

        Args:
            of_probabilities: whether the mean is one of probabilities.
        """
        values: dict[str, Tensor | None] = {
            "variance": spread.variance,
            "covariance": spread.covariance if with_covariance else None,
        }
        std, score = spread.std(bound), spread.score(bound)
        for name, interval in (("std", std), ("score", score)):
            values[name], values[f"{name}_error"] = interval.value, interval.error
            values[f"{name}_low"], values[f"{name}_high"] = interval.low, interval.high
        if noise is not None:
            values["noise"] = torch.full_like(mean, noise)
            values["total_std"] = (spread.variance + noise**2).sqrt()
        if moderated is not None:
            average, values["entropy"], values["mutual_information"] = moderated
            values["moderated"] = average
        found: dict[str, Any] = {
            name: None if value is None else value.to(mean.dtype) for name, value in values.items()
        }
        if of_probabilities:
            found["impossible"] = impossible(mean, std.value)
            if moderated is not None:
                found["saturated"] = saturated(mean, score.value, moderated.mean)
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
        """Return the ends (B, C) of the intervals that targets to come lie in.

        mean ∓ z·total_std, with z the normal quantile of (1 + level)/2: of each output by itself.

        Raises:
            BadValueError: the level is not between 0 and 1, or the prediction is of a class.
        """
        if isinstance(level, bool) or not isinstance(level, Real) or not 0 < float(level) < 1:
            raise BadValueError(f"level: expected a number between 0 and 1, got {level!r}.")
        if self.total_std is None:
            raise BadValueError(
                "interval: expected a prediction of real numbers (a Gaussian likelihood), got one "
                "of classes, whose targets have no interval. The mean has: mean ± z·std."
            )
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

        Args:
            endings: of the columns of an output, such as names of classes; by default its number,
                or its index among the classes that were asked for (`class_0`, … are their numbers).
            interval_ends: whether to have `score_low`, `std_high_0` and the like.
        """
        arrays = self.numpy()
        if not interval_ends:
            arrays = Arrays({k: v for k, v in arrays.items() if not k.endswith(("_low", "_high"))})
        ends = endings or [str(k) for k in range(self.mean.shape[1])]
        found = {
            name: arrays[name]
            for name in ("label", *ONE_AN_INPUT)
            if name in arrays and arrays[name].ndim == 1
        }
        for name in ("classes", *ONE_AN_OUTPUT):
            title = "class" if name == "classes" else name
            if name in arrays:
                found |= {f"{title}_{end}": arrays[name][:, k] for k, end in enumerate(ends)}
        return found

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with the columns of `columns`, one row an input."""
        try:
            import pandas
        except ImportError as error:
            raise MissingDependencyError(
                "to_pandas() needs pandas: pip install 'deltabars[pandas]'."
            ) from error
        return pandas.DataFrame(self.columns())

    def plot(self, ax: Any = None, *, targets: Tensor | None = None) -> Any:
        """Draw up to six inputs' means with their error bars; of more, std against mean.

        Args:
            ax: matplotlib Axes to draw into; a new figure by default.
            targets: the true classes (B,), to tell right from wrong predictions by colour.

        Returns:
            The Axes.
        """
        return draw_prediction(self, ax, targets)

    def __repr__(self) -> str:
        return describe_prediction(self)

    def _repr_html_(self) -> str:
        return describe_prediction_in_html(self)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Prediction:
        mapped: dict[str, Any] = {k: function(value) for k, value in self._tensors().items()}
        return replace(self, **mapped)
