"""What a page is about: a fit and its predictions, checked; which inputs it shows; its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.covariance.estimators import SPREADS
from deltabars.errors import BadValueError
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.prediction import Prediction

DIGITS = 5  # significant ones: a page shows three or four


def short(values: Any) -> Any:
    """Round numbers to five digits, as lists of floats; None if not finite: JSON has no NaN."""
    values = np.asarray(values, dtype=np.float64).tolist()
    if isinstance(values, list):
        return list(map(short, values))
    if not math.isfinite(values):
        return None
    rounded = float(f"{values:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def say(value: float, digits: int = 3) -> str:
    """Write a number for people: `1,297`, `0.0285`, `3.1e-06`."""
    if value == round(value) and abs(value) < 1e9:
        return f"{round(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-4:
        return np.format_float_positional(float(f"{value:.{digits}g}"), trim="-", unique=True)
    return f"{value:.{digits - 1}e}"


def percent(share: float) -> str:
    """Write a share as a percentage, `95.6 %`; halves go up, as they do in the page's program."""
    return f"{math.floor(1000 * share + 0.5) / 10:.1f} %"


@dataclass(frozen=True)
class Subject:
    """A fit and its predictions of B inputs, on the CPU."""

    fit: DeltaFit
    prediction: Prediction
    targets: Tensor | None  # class numbers (B,); Bernoulli: 0 or 1, Gaussian: numbers (B, C)
    classes: Sequence[str]  # the names of the C outputs
    names: Sequence[str]  # of the B inputs
    spread: str = SPREADS[0]  # that the error bars are of

    @property
    def kind(self) -> str:
        """`"categorical"`, `"bernoulli"` or `"gaussian"`."""
        return self.fit.likelihood.name

    @property
    def right(self) -> Tensor | None:
        """Whether each prediction is right (B,): all labels of it, where there are several."""
        label, targets = self.prediction.label, self.targets
        if label is None or targets is None:
            return None
        same = label == targets
        return same if same.ndim == 1 else same.all(1)

    def __len__(self) -> int:
        return len(self.prediction)


def check_subject(
    fit: DeltaFit,
    prediction: Prediction,
    asked: Mapping[str, Any],
    targets: Any,
    classes: Sequence[str] | None,
    names: Sequence[str] | None,
    count: int,
) -> Subject:
    """Return the subject of a page, or raise a BadValueError that says what does not fit."""
    got = len(prediction)
    if got != count:
        raise BadValueError(f"prediction: expected that of the {count} inputs, got one of {got}.")
    prediction = prediction.to("cpu")
    numbers = fit.likelihood.name == "gaussian"
    outside = (prediction.mean < -1e-6) | (prediction.mean > 1 + 1e-6)
    if not numbers and bool(outside.any()):
        raise BadValueError("prediction: expected probabilities, got numbers outside [0, 1].")
    if prediction.judgement is None:
        used = {"rank": fit.rank, "estimator": fit.estimator, "spread": SPREADS[0], **asked}
        evidence = fit.evidence(used["rank"], used["estimator"], used["spread"])
        prediction = prediction.judged_by(evidence)
    known = None if targets is None else _check_targets(fit, count, targets)
    outputs = _check_names("classes", classes, fit.num_outputs, "output " if numbers else "")
    inputs = _check_names("names", names, count, "input ")
    return Subject(fit, prediction, known, outputs, inputs, asked.get("spread", SPREADS[0]))


def _check_names(what: str, given: Sequence[str] | None, count: int, prefix: str) -> list[str]:
    names = [f"{prefix}{k}" for k in range(count)] if given is None else list(map(str, given))
    if len(names) != count:
        raise BadValueError(f"{what}: expected {count} names, got {len(names)}.")
    return names


def _check_targets(fit: DeltaFit, count: int, targets: Any) -> Tensor:
    given = torch.as_tensor(targets).detach().cpu()
    kind, outputs = fit.likelihood.name, fit.num_outputs
    shape = (count,) if kind == "categorical" else (count, outputs)
    if tuple(given.shape) != shape and (outputs > 1 or tuple(given.shape) != (count,)):
        raise BadValueError(
            f"targets: expected shape {shape}, one for each input, got {tuple(given.shape)}."
        )
    given = given.reshape(shape)
    if kind == "gaussian":
        return given.double()
    top = outputs if kind == "categorical" else 2
    whole = given.long()
    odd = (whole != given) | (whole < 0) | (whole >= top)
    if bool(odd.any()):
        got = f"others, such as {given[odd][0].item()}"
        raise BadValueError(f"targets: expected whole numbers from 0 to {top - 1}, got {got}.")
    return whole


_OF_A_CLASS = 4  # most certain inputs of a class in the gallery, and as many least certain ones
_MOST_CLASSES = 24


@dataclass(frozen=True)
class Shelf:
    """A class of the gallery: the indices of its most and its least certain inputs, in order."""

    label: int
    count: int  # inputs of this predicted class
    most: list[int]
    least: list[int]


def choose_shelves(subject: Subject, rows: int) -> list[Shelf]:
    """Choose the gallery, by predicted class: at most 24, and no more than fill the rows."""
    if subject.kind != "categorical" or subject.prediction.label is None:
        return []
    label = subject.prediction.label.numpy()
    score = subject.prediction.score.double().numpy()
    counts = np.bincount(label, minlength=len(subject.classes))
    room = max(1, min(_MOST_CLASSES, rows // (2 * _OF_A_CLASS)))
    chosen = np.argsort(-counts, kind="stable")[:room]
    shelves = []
    for c in sorted(int(c) for c in chosen if counts[c]):
        indices = np.flatnonzero(label == c)
        order = indices[np.argsort(score[indices], kind="stable")].tolist()
        few = min(_OF_A_CLASS, (len(order) + 1) // 2)  # an input is in one of the two lines
        least = order[few:][::-1][:_OF_A_CLASS]
        shelves.append(Shelf(c, len(order), order[:few], least))
    return shelves


def choose_rows(subject: Subject, rows: int, shelves: list[Shelf]) -> list[int]:
    """Choose the inputs in the page, ascending: all, if there are no more than `rows`.

    Else the gallery's, the highest scores up to half of the rows, and an even sample of the others.
    """
    if len(subject) <= rows:
        return list(range(len(subject)))
    order = np.argsort(-subject.prediction.score.double().numpy(), kind="stable").tolist()
    first = [index for shelf in shelves for index in (*shelf.most, *shelf.least)]
    kept = dict.fromkeys([*dict.fromkeys([*first, *order[: rows // 2]])][:rows])
    rest = [index for index in order if index not in kept]
    even = np.linspace(0, len(rest) - 1, rows - len(kept)).round().astype(int)
    return sorted({*kept, *(rest[i] for i in even)})
