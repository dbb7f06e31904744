"""The inputs of a page as columns: what the table shows, and what the details add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltabars.prediction.display import marks_of
from deltabars.prediction.prediction import Prediction
from deltabars.report.page.inputs import Settling
from deltabars.report.page.subject import Subject, short

_ALL_CLASSES = 16  # up to so many are shown of each input; of more, the most probable ones
_MOST_PROBABLE = 10


def columns(subject: Subject) -> list[dict[str, str]]:
    """Return the columns of the table: where their values are, their titles, and their kinds."""
    kind = {"categorical": "class", "bernoulli": "text", "gaussian": "number"}[subject.kind]
    known, is_number = subject.targets is not None, kind == "number"
    has_information = subject.prediction.mutual_information is not None
    table = (
        ("name", "Input", "name", True),
        ("value", "Prediction", kind, is_number),
        ("label", "Predicted", kind, not is_number),
        ("target", "Target", kind, known),
        ("right", "Right?", "mark", known and not is_number),
        ("top", "Probability", "number", kind == "class"),
        ("std", "± std", "number", kind != "text"),
        ("score", "Score", "number", True),
        ("bound", "Its bound", "percent", True),
        ("information", "Mutual info", "number", has_information),
    )
    return [{"key": key, "title": title, "kind": sort} for key, title, sort, here in table if here]


def rows_of(
    subject: Subject,
    indices: list[int],
    settling: Settling,
    images: list[str],
    texts: list[str],
) -> dict[str, Any]:
    """Return the columns of some inputs, and the detail of each: classes, bars, settling."""
    at = torch.as_tensor(indices)
    p, right = subject.prediction[at], subject.right
    targets = None if subject.targets is None else subject.targets[at]
    notes = marks_of(p)
    data: dict[str, Any] = {
        "index": indices,
        "name": [subject.names[i] for i in indices],
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
        "information": None if p.mutual_information is None else short(p.mutual_information),
        "entropy": None if p.entropy is None else short(p.entropy),
        "picture": images,
        "text": texts,
        "note": notes if any(notes) else None,
        "right": None if right is None else right[at].int().tolist(),
        **_labels(subject, p, targets),
        "outputs": _outputs(subject, p, targets),
    }
    return {key: value for key, value in data.items() if value is not None and value != []}


def _labels(subject: Subject, p: Prediction, targets: Tensor | None) -> dict[str, Any]:
    """Return what was predicted, and what it is: a class, the names of several, or a number."""
    if subject.kind == "categorical":
        assert p.label is not None
        top = p.mean.argmax(1, keepdim=True)
        return {
            "label": p.label.tolist(),
            "top": short(p.mean.gather(1, top)[:, 0]),
            "std": short(p.std.gather(1, top)[:, 0]),
            "target": None if targets is None else targets.tolist(),
        }
    if subject.kind == "bernoulli":
        assert p.label is not None
        label, target = (
            None
            if rows is None
            else [
                ", ".join(subject.classes[c] for c in row.nonzero()[:, 0].tolist()) or "none"
                for row in rows
            ]
            for rows in (p.label, targets)
        )
        return {"label": label, "target": target}
    target = None if targets is None else short(targets[:, 0])
    return {"value": short(p.mean[:, 0]), "std": short(p.std[:, 0]), "target": target}


def _outputs(subject: Subject, p: Prediction, targets: Tensor | None) -> dict[str, Any]:
    """Return means with their error bars and these ones' bounds, (n, k) each, and which outputs.

    All of up to 16; of more the ten that come first, the most probable one at the start.
    """
    found = {name: getattr(p, name) for name in ("mean", "std", "std_low", "std_high")}
    which = p.classes
    if which is None and subject.fit.num_outputs > _ALL_CLASSES:
        order = -p.std if subject.kind == "gaussian" else p.mean
        which = order.topk(_MOST_PROBABLE, 1).indices
        found = {name: value.gather(1, which) for name, value in found.items()}
    outputs: dict[str, Any] = {name: short(value) for name, value in found.items()}
    if which is not None:
        outputs["which"] = which.tolist()
    if targets is not None and subject.kind != "categorical":
        outputs["truth"] = short(targets if which is None else targets.gather(1, which))
    return outputs
