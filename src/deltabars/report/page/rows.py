"""The inputs of a page as columns: what the table shows, and what the details add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltabars.report.page.inputs import Settling
from deltabars.report.page.subject import Subject, short

_ALL_CLASSES = 16  # up to so many are shown of each input; of more, the most probable ones
_MOST_PROBABLE = 10


def columns(subject: Subject) -> list[dict[str, str]]:
    """The columns of the table: where their values are, their titles, and what kind they are of."""
    prediction = subject.prediction
    table = [("name", "Input", "name")]
    if subject.kind == "gaussian":
        table += [("value", "Prediction", "number")]
        table += [("target", "Target", "number")] if subject.targets is not None else []
    else:
        kind = "class" if subject.kind == "categorical" else "text"
        table += [("label", "Predicted", kind)]
        if subject.targets is not None:
            table += [("target", "Target", kind), ("right", "Right?", "mark")]
        table += [("top", "Probability", "number")] if kind == "class" else []
    if subject.kind != "bernoulli":
        table += [("std", "± std", "number")]
    table += [("score", "Score", "number"), ("bound", "Its bound", "percent")]
    if prediction.mutual_information is not None:
        table += [("information", "Mutual info", "number")]
    return [{"key": key, "title": title, "kind": kind} for key, title, kind in table]


def rows_of(
    subject: Subject,
    places: list[int],
    settling: Settling,
    images: list[str],
    texts: list[str],
) -> dict[str, Any]:
    """The columns of the chosen inputs, and the detail of each: classes, bars, settling."""
    at = torch.as_tensor(places)
    p = subject.prediction[at]
    data: dict[str, Any] = {
        "index": places,
        "name": [subject.names[i] for i in places],
        "score": short(p.score),
        "low": short(p.score_low),
        "high": short(p.score_high),
        "bound": short((p.score_error / p.score).nan_to_num(0.0)),
        "settled": {
            "ranks": settling.ranks,
            "score": short(settling.score),
            "low": short(settling.low),
            "high": short(settling.high),
        },
    }
    if p.mutual_information is not None:
        data["information"] = short(p.mutual_information)
    if p.entropy is not None:
        data["entropy"] = short(p.entropy)
    if images:
        data["picture"] = images
    if texts:
        data["text"] = texts
    marks = {"saturated": p.saturated, "impossible": p.impossible}
    notes = [
        ", ".join(name for name, mark in marks.items() if mark is not None and mark[i])
        for i in range(len(p))
    ]
    if any(notes):
        data["note"] = notes
    right = subject.right
    if right is not None:
        data["right"] = right[at].int().tolist()
    targets = None if subject.targets is None else subject.targets[at]
    return {**data, **_labels(subject, at, targets), **_outputs(subject, at, targets)}


def _labels(subject: Subject, at: Tensor, targets: Tensor | None) -> dict[str, Any]:
    """What was predicted, and what it is: a class, the names of several, or a number."""
    p = subject.prediction[at]
    if subject.kind == "gaussian":
        data = {"value": short(p.mean[:, 0]), "std": short(p.std[:, 0])}
        if targets is not None:
            data["target"] = short(targets[:, 0])
        return data
    assert p.label is not None
    if subject.kind == "bernoulli":
        data = {"label": _several(subject, p.label)}
        if targets is not None:
            data["target"] = _several(subject, targets)
        return data
    top = p.mean.argmax(1, keepdim=True)
    data = {
        "label": p.label.tolist(),
        "top": short(p.mean.gather(1, top)[:, 0]),
        "std": short(p.std.gather(1, top)[:, 0]),
    }
    if targets is not None:
        data["target"] = targets.tolist()
    return data


def _several(subject: Subject, labels: Tensor) -> list[str]:
    return [
        ", ".join(subject.classes[c] for c in row.nonzero()[:, 0].tolist()) or "none"
        for row in labels
    ]


def _outputs(subject: Subject, at: Tensor, targets: Tensor | None) -> dict[str, Any]:
    """Means with their error bars and these ones' bounds, (n, k) each, and which outputs they are.

    All of up to 16; of more the ten that come first, the most probable one at the start.
    """
    p = subject.prediction[at]
    names = ("mean", "std", "std_low", "std_high")
    found = {name: getattr(p, name) for name in names}
    which = p.classes
    if which is None and subject.fit.num_outputs > _ALL_CLASSES:
        order = p.mean if subject.kind != "gaussian" else -p.std
        which = order.topk(_MOST_PROBABLE, 1).indices
        found = {name: value.gather(1, which) for name, value in found.items()}
    outputs: dict[str, Any] = {name: short(value) for name, value in found.items()}
    if which is not None:
        outputs["which"] = which.tolist()
    if targets is not None and subject.kind != "categorical":
        outputs["truth"] = short(targets if which is None else targets.gather(1, which))
    return {"outputs": outputs}
