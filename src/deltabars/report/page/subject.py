"""What a page is about: a fit, its predictions, and what is known of the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.fitted import DeltaFit
from deltabars.judging import Evidence, impossible, saturated
from deltabars.prediction import Prediction


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
            Evidence.of(fit, asked.get("rank", fit.rank), asked.get("estimator", fit.estimator))
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
