"""Numbers as they stand in a page: short, and never NaN, which JSON does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.fitting.describe import evidence_of
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.judgement import impossible, saturated
from deltabars.prediction.prediction import Prediction

DIGITS = 5  # significant ones: a page shows three or four


def short(values: Any) -> Any:
    """Numbers (an array, a tensor, or one number) rounded to five digits, as lists of floats.

    What is not finite becomes None.
    """
    return _rounded(np.asarray(values, dtype=np.float64).tolist())


def say(value: float, digits: int = 3) -> str:
    """A number for people: `1,297`, `0.0285`, `3.1e-06`."""
    if value == round(value) and abs(value) < 1e9:
        return f"{round(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 1e-4:
        return np.format_float_positional(float(f"{value:.{digits}g}"), trim="-", unique=True)
    return f"{value:.{digits - 1}e}"


def percent(share: float) -> str:
    """A share as a percentage, `95.6 %`; halves go up, as they do in the page's program."""
    return f"{math.floor(1000 * share + 0.5) / 10:.1f} %"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) else rounded


@dataclass(frozen=True)
class Subject:
    """A fit and its predictions of B inputs, on the CPU.

    Attributes:
        targets: class numbers (B,); of Bernoulli 0 or 1 (B, C); of Gaussian numbers (B, C).
        classes: the names of the C outputs.
        names: the names of the B inputs.
    """

    fit: DeltaFit
    prediction: Prediction
    targets: Tensor | None
    classes: Sequence[str]
    names: Sequence[str]

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
    """The subject of a page, or a BadValueError that says what does not fit."""
    if len(prediction) != count:
        raise BadValueError(
            f"prediction: expected that of the {count} inputs, got one of {len(prediction)}."
        )
    prediction = prediction.to("cpu")
    kind = fit.likelihood.name
    outside = (prediction.mean < -1e-6) | (prediction.mean > 1 + 1e-6)
    if kind != "gaussian" and bool(outside.any()):
        raise BadValueError(
            "prediction: expected probabilities, got numbers outside [0, 1]. Predict with "
            "space='probability'."
        )
    if kind != "gaussian" and prediction.impossible is None:  # it was kept by an older version
        average = prediction.moderated
        flat = None if average is None else saturated(prediction.mean, prediction.score, average)
        wide = impossible(prediction.mean, prediction.std)
        prediction = replace(prediction, impossible=wide, saturated=flat)
    if prediction.judgement is None:
        prediction = prediction.judged_by(
            evidence_of(fit, asked.get("rank", fit.rank), asked.get("estimator", fit.estimator))
        )
    known = None if targets is None else _check_targets(fit, prediction, targets)
    return Subject(
        fit,
        prediction,
        known,
        _check_names("classes", classes, fit.num_outputs, _output_names(kind, fit.num_outputs)),
        _check_names("names", names, count, [f"input {i}" for i in range(count)]),
    )


def _check_targets(fit: DeltaFit, prediction: Prediction, targets: Any) -> Tensor:
    given = torch.as_tensor(targets).detach().cpu()
    kind, count = fit.likelihood.name, len(prediction)
    shapes: list[tuple[int, ...]] = (
        [(count,)] if kind == "categorical" else [(count, fit.num_outputs)]
    )
    if kind != "categorical" and fit.num_outputs == 1:
        shapes.append((count,))
    if tuple(given.shape) not in shapes:
        raise BadValueError(
            f"targets: expected shape {shapes[0]}, one for each input, got {tuple(given.shape)}."
        )
    given = given.reshape(shapes[0])
    if kind == "gaussian":
        return given.double()
    top = fit.num_outputs if kind == "categorical" else 2
    whole = given.long()
    if bool((whole != given).any()) or bool(((whole < 0) | (whole >= top)).any()):
        raise BadValueError(
            f"targets: expected whole numbers from 0 to {top - 1}, got others, such as "
            f"{given[(whole != given) | (whole < 0) | (whole >= top)][0].item()}."
        )
    return whole


def _check_names(
    what: str, given: Sequence[str] | None, count: int, default: list[str]
) -> list[str]:
    if given is None:
        return default
    names = [str(name) for name in given]
    if len(names) != count:
        raise BadValueError(f"{what}: expected {count} names, got {len(names)}.")
    return names


def _output_names(kind: str, count: int) -> list[str]:
    return [f"output {c}" if kind == "gaussian" else f"{c}" for c in range(count)]


_OF_A_CLASS = 4  # most certain inputs of a class in the gallery, and as many least certain ones
_MOST_CLASSES = 24


@dataclass(frozen=True)
class Shelf:
    """A class of the gallery: the places of its most and of its least certain inputs."""

    label: int
    count: int  # inputs of this predicted class
    most: list[int]  # the most certain one first
    least: list[int]  # the least certain one first


def choose_shelves(subject: Subject, rows: int) -> list[Shelf]:
    """The gallery: by predicted class, in the order of the classes; empty but for categories.

    Of more than 24 classes, those that were predicted most often. There are fewer classes where the
    page has fewer rows than they would fill.
    """
    if subject.kind != "categorical" or subject.prediction.label is None:
        return []
    label = subject.prediction.label.numpy()
    score = subject.prediction.score.double().numpy()
    counts = np.bincount(label, minlength=len(subject.classes))
    room = max(1, min(_MOST_CLASSES, rows // (2 * _OF_A_CLASS)))
    chosen = np.argsort(-counts, kind="stable")[:room]
    shelves = []
    for c in sorted(int(c) for c in chosen if counts[c]):
        places = np.flatnonzero(label == c)
        order = places[np.argsort(score[places], kind="stable")]
        few = min(_OF_A_CLASS, (len(order) + 1) // 2)  # an input is in one of the two rows
        most, least = order[:few], order[::-1][: min(_OF_A_CLASS, len(order) - few)]
        shelves.append(Shelf(c, len(order), most.tolist(), least.tolist()))
    return shelves


def choose_rows(subject: Subject, rows: int, shelves: list[Shelf]) -> list[int]:
    """The places of the inputs in the page, ascending: all, if there are no more than `rows`.

    Else the gallery's, then the highest scores up to half of the rows, then an even sample of the
    others over the order of their scores.
    """
    total = len(subject)
    if total <= rows:
        return list(range(total))
    order = np.argsort(-subject.prediction.score.double().numpy(), kind="stable")
    first = [place for shelf in shelves for place in (*shelf.most, *shelf.least)]
    chosen = dict.fromkeys([*first, *order.tolist()[: rows // 2]])
    kept = list(chosen)[:rows]
    rest = [place for place in order.tolist() if place not in chosen]
    even = np.linspace(0, len(rest) - 1, max(0, rows - len(kept))).round().astype(int)
    return sorted([*kept, *(rest[i] for i in dict.fromkeys(even.tolist()))])
