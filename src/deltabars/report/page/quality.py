"""How good the predictions are where targets are known: calibration, and each class by itself."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.metrics import expected_calibration_error
from deltabars.report.page.numbers import percent, say, short
from deltabars.report.page.subject import Subject

_BINS = 15
_LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_MOST_CLASSES = 20  # in the table; of more, those that are right least often
_WHOLE_MATRIX = 12  # classes whose confusion is shown as a matrix; of more, its worst pairs
_WORST_PAIRS = 15


def calibration_plot(subject: Subject) -> dict[str, Any] | None:
    """What happened against what was predicted; None where that is not known.

    Of classes the share of right predictions against the highest probability, in 15 bins; of
    numbers the share of targets inside of intervals against the intervals' level.
    """
    if subject.targets is None or subject.prediction.classes is not None:
        return None
    if subject.kind == "gaussian":
        return _coverage(subject)
    return _reliability(subject) if subject.kind == "categorical" else None


def _coverage(subject: Subject) -> dict[str, Any]:
    prediction, targets = subject.prediction, subject.targets
    assert targets is not None
    shares = []
    for level in _LEVELS:
        low, high = prediction.interval(level)
        inside = (low.double() <= targets) & (targets <= high.double())
        shares.append(float(inside.double().mean()))
    nine = shares[_LEVELS.index(0.9)]
    return {
        "x": list(_LEVELS),
        "y": short(shares),
        "counts": [targets.numel()] * len(_LEVELS),
        "axes": ["level of the interval", "targets inside"],
        "title": "Coverage of intervals",
        "about": "Of good intervals, mean ± z·total_std, as many targets lie inside as they say.",
        "summary": f"Of {targets.numel():,} targets {percent(nine)} lie in their 90 % intervals.",
    }


def _reliability(subject: Subject) -> dict[str, Any]:
    targets = subject.targets
    assert targets is not None
    mean = subject.prediction.mean.double().clamp(0, 1)  # off by rounding, as was checked
    highest, label = mean.max(1)
    place = (highest * _BINS).long().clamp(max=_BINS - 1)
    right = (label == targets).double()
    zero = torch.zeros(_BINS, dtype=torch.float64)
    counts = zero.index_add(0, place, torch.ones_like(highest))
    used = counts > 0
    x = (zero.index_add(0, place, highest) / counts)[used]
    y = (zero.index_add(0, place, right) / counts)[used]
    error = expected_calibration_error(mean, targets, _BINS)
    return {
        "x": short(x),
        "y": short(y),
        "counts": counts[used].long().tolist(),
        "axes": ["highest probability", "share of right predictions"],
        "title": "Reliability",
        "about": "Of predictions with a probability of 80 % four fifths should be right: points "
        f"below the line are too confident. In {_BINS} bins.",
        "summary": f"The expected calibration error (ECE) is {percent(error)}: the mean highest "
        f"probability is {percent(float(highest.mean()))}, and {percent(float(right.mean()))} of "
        "the predictions are right.",
    }


def class_tables(subject: Subject) -> str:
    """The HTML of the table by class and of the confusions; empty where there are no classes."""
    if subject.kind != "categorical" or subject.targets is None:
        return ""
    label, targets = subject.prediction.label, subject.targets
    assert label is not None
    count = len(subject.classes)
    right = torch.bincount(targets[label == targets], minlength=count)
    real, said = (torch.bincount(these, minlength=count) for these in (targets, label))
    score = subject.prediction.score.double()
    scores = torch.zeros(count, dtype=torch.float64).index_add(0, targets, score)
    seen = (real > 0).nonzero()[:, 0]
    order = seen[(right[seen] / real[seen]).argsort(stable=True)]
    which = (
        "" if len(seen) <= _MOST_CLASSES else f", the {_MOST_CLASSES} that are right least often"
    )
    rows = [
        [
            subject.classes[c],
            f"{int(real[c]):,}",
            percent(float(right[c] / real[c])),
            percent(float(right[c] / said[c])) if said[c] else "–",
            say(float(scores[c] / real[c])),
        ]
        for c in order[:_MOST_CLASSES].tolist()
    ]
    head = ["Class", "Inputs", "Found (recall)", "Right of predicted (precision)", "Mean score"]
    table = _table(f"By class{which}", head, rows)
    if count <= _WHOLE_MATRIX:
        pairs = torch.bincount(targets * count + label, minlength=count**2)
        return table + _matrix(subject, pairs.view(count, count))
    return table + _worst_pairs(subject, targets, label)


def _matrix(subject: Subject, pairs: Tensor) -> str:
    names = list(subject.classes)
    rows = [
        [name, *(f"{n:,}" if n else "·" for n in row)]
        for name, row in zip(names, pairs.tolist(), strict=True)
    ]
    caption = "Confusion: targets in rows, predictions in columns"
    return _table(caption, ["", *names], rows, diagonal=True)


def _worst_pairs(subject: Subject, targets: Tensor, label: Tensor) -> str:
    wrong = torch.stack([targets, label], 1)[targets != label].numpy()
    if not len(wrong):
        return ""
    pairs, counts = np.unique(wrong, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_WORST_PAIRS]
    rows = [
        [subject.classes[pairs[i, 0]], subject.classes[pairs[i, 1]], f"{counts[i]:,}"]
        for i in order
    ]
    return _table("The most frequent confusions", ["Target", "Predicted", "Inputs"], rows, texts=2)


def _table(
    caption: str, head: list[str], rows: list[list[str]], texts: int = 1, diagonal: bool = False
) -> str:
    def cell(place: int, text: str, row: int) -> str:
        if place == 0:
            return f'<th scope="row">{escape(text)}</th>'
        kinds = [] if place < texts else ["number"]
        kinds += ["same"] if diagonal and place == row + 1 else []
        return f'<td class="{" ".join(kinds)}">{escape(text)}</td>'

    titles = "".join(
        f'<th scope="col"{"" if j < texts else " class=number"}>{escape(title)}</th>'
        for j, title in enumerate(head)
    )
    body = "".join(
        f"<tr>{''.join(cell(j, text, i) for j, text in enumerate(row))}</tr>"
        for i, row in enumerate(rows)
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )
