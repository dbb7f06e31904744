"""Predictions with error bars, and how they are computed from F and a covariance."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.low_rank import Spread
from deltabars.errors import BadValueError, MissingDependencyError
from deltabars.prediction.averaging import Moderated
from deltabars.prediction.display import (
    describe_prediction,
    describe_prediction_in_html,
    draw_prediction,
)
from deltabars.prediction.judgement import Evidence, Judgement, impossible, judge, saturated

# The columns of a table: those of an input, and those of its outputs by their titles.
_ONE_AN_INPUT = (
    "score", "score_error", "score_low", "score_high", "mutual_information", "entropy",
    "saturated", "impossible",
)  # fmt: skip
_SEVERAL_AN_INPUT = {"class": "classes"} | {
    name: name
    for name in ("mean", "std", "std_error", "std_low", "std_high", "total_std", "moderated")
}


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
    judged: InitVar[Judgement | None] = None  # all fields are arrays, and this is none

    def __post_init__(self, judged: Judgement | None) -> None:
        object.__setattr__(self, "judged", judged)

    @property
    def judgement(self) -> Judgement | None:
        """What the error bars can be read as."""
        found: Judgement | None = self.__dict__["judged"]
        return found

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
        """Error bars of one batch; everything is float64 until the end.

        Args:
            of_probabilities: whether the mean is one of probabilities.
        """
        std, score = spread.std(bound), spread.score(bound)
        kind = mean.dtype
        whole = spread.covariance if with_covariance else None
        total = None if noise is None else (spread.variance + noise**2).sqrt()
        average, entropy, information = None, None, None
        if moderated is not None:
            average, entropy = moderated.mean.to(kind), moderated.entropy.to(kind)
            information = moderated.mutual_information
        flat = wide = None
        if of_probabilities:
            wide = impossible(mean, std.value)
            flat = None if moderated is None else saturated(mean, score.value, moderated.mean)
        return cls(
            mean=mean,
            std=std.value.to(kind),
            variance=spread.variance.to(kind),
            std_error=std.error.to(kind),
            std_low=std.low.to(kind),
            std_high=std.high.to(kind),
            score=score.value.to(kind),
            score_error=score.error.to(kind),
            score_low=score.low.to(kind),
            score_high=score.high.to(kind),
            covariance=None if whole is None else whole.to(kind),
            label=label,
            noise=None if noise is None else torch.full_like(mean, noise),
            total_std=None if total is None else total.to(kind),
            classes=classes,
            moderated=average,
            entropy=entropy,
            mutual_information=None if information is None else information.to(kind),
            saturated=flat,
            impossible=wide,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Prediction]) -> Prediction:
        """Several batches as one."""
        columns = {
            field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)
        }
        joined: dict[str, Any] = {
            name: None if column[0] is None else torch.cat(column)
            for name, column in columns.items()
        }
        whole = cls(**joined)
        judgements = {part.judgement for part in parts}
        first = parts[0].judgement
        if first is None or len({found.evidence for found in judgements if found}) != 1:
            return whole
        return whole if None in judgements else whole.judged_by(first.evidence)

    def judged_by(self, evidence: Evidence) -> Prediction:
        """The same prediction with its judgement."""
        return replace(self, judged=judge(evidence, self))

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __getitem__(self, index: Any) -> Prediction:
        """The inputs that `index` selects; one number selects one input and keeps the batch."""
        if isinstance(index, Integral) or (isinstance(index, Tensor) and index.ndim == 0):
            index = operator.index(index)
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is out of range for {len(self)} predictions")
            index = slice(index, index + 1 or None)
        return self._map(lambda value: value[index])

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The lower and upper ends (B, C) of the intervals that targets to come lie in.

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
        """The same prediction on a device."""
        return self._map(lambda value: value.to(device))

    def numpy(self) -> Arrays:
        """All fields as NumPy arrays."""
        return Arrays({name: value.cpu().numpy() for name, value in self._present().items()})

    def to_pandas(self) -> Any:
        """One row an input: label, score, information and entropy, then all classes' columns.

        The columns of a class end in its number; where only some classes were asked for, in its
        place among them, and `class_0`, … have the numbers.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingDependencyError(
                "to_pandas() needs pandas: pip install 'deltabars[pandas]'."
            ) from error
        arrays = self.numpy()
        columns: dict[str, Any] = {}
        if self.label is not None and self.label.ndim == 1:
            columns["label"] = arrays["label"]
        for name in _ONE_AN_INPUT:
            if name in arrays:
                columns[name] = arrays[name]
        for title, name in _SEVERAL_AN_INPUT.items():
            if name in arrays:
                for k in range(self.mean.shape[1]):
                    columns[f"{title}_{k}"] = arrays[name][:, k]
        return pandas.DataFrame(columns)

    def plot(
        self, ax: Any = None, *, targets: Tensor | None = None, names: Sequence[str] | None = None
    ) -> Any:
        """Draw up to six inputs' means with their error bars; of more, std against mean.

        Args:
            ax: matplotlib Axes to draw into; a new figure by default.
            targets: the true classes (B,), to tell right from wrong predictions by colour.
            names: of the C outputs.

        Returns:
            The Axes.
        """
        return draw_prediction(self, ax, targets, names)

    def __repr__(self) -> str:
        return describe_prediction(self)

    def _repr_html_(self) -> str:
        return describe_prediction_in_html(self)

    def _present(self) -> Mapping[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def _map(self, function: Any) -> Prediction:
        present: dict[str, Any] = {name: function(value) for name, value in self._present().items()}
        values: dict[str, Any] = {field.name: present.get(field.name) for field in fields(self)}
        return Prediction(**values, judged=self.judgement)
