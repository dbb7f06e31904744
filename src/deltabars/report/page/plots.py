"""The numbers of a page's plots, and each plot in words for those who cannot see it."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.covariance.tail import Tail
from deltabars.prediction.metrics import RiskCoverage, expected_calibration_error, risk_coverage
from deltabars.report.page.subject import Subject, percent, say, short
from deltabars.report.style import smooth_curve

_MOST_POINTS = 1500
_MOST_STEPS = 200
_BINS = 30
_BANDWIDTH = 0.05  # of a curve, as a share of the axis: that of probabilities is 1 long


def spectrum_plot(subject: Subject) -> dict[str, Any]:
    """Eigenvalues against their index for each matrix, and what stands in for the rest."""
    fit = subject.fit
    level, size = fit.level, fit.num_parameters
    matrices, words = [], []
    for name in fit.spectra:
        pairs = fit.pairs_of(name)
        values = pairs.values.double()
        entry: dict[str, Any] = {"name": name, "values": short(values)}
        text = f"The {name}'s eigenvalues fall from {say(float(values[0]))} to "
        text += f"{say(float(values[-1]))} at K = {len(values):,}"
        if len(values) < size and bool((values > 0).any()):
            tail = Tail.after(values, len(values), level, size)
            entry["tail"] = short([tail.floor, tail.harmonic_mean, tail.ceiling])
            text += f", {say(float(values[-1]) / level)} times λ"
            text += f"; the other {size - len(values):,} count as {say(tail.harmonic_mean)}"
        smallest = pairs.smallest[:_MOST_STEPS].double().abs()
        if name == "hessian" and len(smallest):  # those of the others are λ
            entry["smallest"] = short(smallest)
        matrices.append(entry)
        words.append(text + ".")
    return {
        "matrices": matrices,
        "level": short(level),
        "parameters": size,
        "summary": f"λ is {say(level)}. " + " ".join(words),
    }


def uncertainty_plot(subject: Subject, rows: list[int]) -> dict[str, Any]:
    """Std against probability (or against the predicted number), with smoothed curves.

    Points are those of the predicted class of an input; of several answers, all of them. All wrong
    ones come first where there are too many, and a sample of the others, the same each time.
    """
    x, y, right, place = _pairs(subject)
    index = {place: row for row, place in enumerate(rows)}
    shown = _thinned(right, len(x))
    plot: dict[str, Any] = {
        "x": short(x[shown]),
        "y": short(y[shown]),
        "row": [index.get(int(place[i]), -1) for i in shown.tolist()],
        "total": len(x),
        "axis": "predicted number" if subject.kind == "gaussian" else "probability",
    }
    if right is None:
        reach = float(x.max() - x.min()) or 1.0
        plot["curves"] = [{"name": "smoothed", "kind": "all", **_curve(x, y, reach)}]
        plot["summary"] = (
            f"Error bars of {len(x):,} predictions: half of them are below "
            f"{say(float(y.median()))}, the largest is {say(float(y.max()))}."
        )
        return plot
    plot["right"] = right[shown].int().tolist()
    plot["curves"] = [
        {"name": name, "kind": name, **_curve(x[these], y[these])}
        for name, these in (("right", right), ("wrong", ~right))
        if bool(these.any())
    ]
    parts = [
        f"{int(these.sum()):,} {name} ones have a mean error bar of {say(float(y[these].mean()))}"
        for name, these in (("right", right), ("wrong", ~right))
        if bool(these.any())
    ]
    plot["summary"] = f"Of {len(x):,} predictions, {' and '.join(parts)}."
    return plot


def risk_plot(subject: Subject) -> dict[str, Any] | None:
    """Risk against coverage by each number that can order the inputs; None without targets."""
    if subject.right is None:
        return None
    wrong = ~subject.right
    prediction = subject.prediction
    orders: dict[str, tuple[str, Tensor]] = {"score": ("score", prediction.score)}
    if subject.kind == "categorical":
        orders["probability"] = ("1 − probability", 1 - prediction.mean.double().max(1)[0])
    if prediction.mutual_information is not None:
        orders["information"] = ("mutual information", prediction.mutual_information)
    orders["ideal"] = ("best possible", wrong.double())
    curves = []
    for key, (name, score) in orders.items():
        found = risk_coverage(score, wrong)
        entry = {"key": key, "name": name, "area": short(found.area)}
        entry["at"] = short([_risk_at(found, share) for share in (0.8, 0.9, 1.0)])
        curves.append({**entry, **_steps(found)})
    rate, area = float(wrong.double().mean()), curves[0]["area"]
    summary = (
        f"Answering all inputs, {percent(rate)} are wrong. Answering the "
        f"80 % with the lowest scores, {percent(curves[0]['at'][0])} are. "
        f"The area under the curve of the score is {say(area)}; without any order it is "
        f"{say(rate)}, and at best {say(curves[-1]['area'])}."
    )
    return {"curves": curves, "rate": short(rate), "summary": summary}


def score_histogram(subject: Subject) -> dict[str, Any]:
    """How many inputs have which score, in bins that are even on a logarithmic scale."""
    score = subject.prediction.score.double().numpy()
    positive = score[score > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    edges = np.geomspace(low, high if high > low else 2 * low, _BINS + 1)
    edges[0], edges[-1] = low, max(high, edges[-1])  # not a rounding error inside
    counts, _ = np.histogram(positive, edges)
    middle, high_end = np.quantile(score, [0.5, 0.9]).tolist()
    return {
        "edges": short(edges),
        "counts": counts.tolist(),
        "zero": int((score <= 0).sum()),
        "summary": (
            f"Half of the {len(score):,} scores are below {say(middle)}; the highest is "
            f"{say(float(score.max()))}, and a tenth are above {say(high_end)}."
        ),
    }


def _pairs(subject: Subject) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x, y, whether they are right, and the input's place, of all points there could be."""
    prediction, places = subject.prediction, torch.arange(len(subject))
    mean, std = prediction.mean.double(), prediction.std.double()
    if subject.kind == "categorical":
        top = mean.argmax(1, keepdim=True)
        return mean.gather(1, top)[:, 0], std.gather(1, top)[:, 0], subject.right, places
    right = None
    if subject.kind == "bernoulli" and subject.targets is not None and prediction.classes is None:
        assert prediction.label is not None
        right = (prediction.label == subject.targets).flatten()
    return mean.flatten(), std.flatten(), right, places.repeat_interleave(mean.shape[1])


def _thinned(right: Tensor | None, count: int) -> Tensor:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    if right is not None:
        order = torch.cat([order[~right[order]][: _MOST_POINTS // 3], order[right[order]]])
    return order[:_MOST_POINTS].sort().values


def _curve(x: Tensor, y: Tensor, reach: float = 1.0) -> dict[str, Any]:
    grid, curve = smooth_curve(x, y, _BANDWIDTH * reach)
    return {"x": short(grid), "y": short(curve)}


def _risk_at(found: RiskCoverage, share: float) -> float:
    return float(found.risk[max(0, round(share * len(found.risk)) - 1)])


def _steps(found: RiskCoverage) -> dict[str, Any]:
    count = len(found.risk)
    kept = np.unique(np.linspace(0, count - 1, min(count, _MOST_STEPS)).round().astype(int))
    return {"coverage": short(found.coverage[kept]), "risk": short(found.risk[kept])}


_BINS_quality = 15
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
    place = (highest * _BINS_quality).long().clamp(max=_BINS_quality - 1)
    right = (label == targets).double()
    zero = torch.zeros(_BINS_quality, dtype=torch.float64)
    counts = zero.index_add(0, place, torch.ones_like(highest))
    used = counts > 0
    x = (zero.index_add(0, place, highest) / counts)[used]
    y = (zero.index_add(0, place, right) / counts)[used]
    error = expected_calibration_error(mean, targets, _BINS_quality)
    return {
        "x": short(x),
        "y": short(y),
        "counts": counts[used].long().tolist(),
        "axes": ["highest probability", "share of right predictions"],
        "title": "Reliability",
        "about": "Of predictions with a probability of 80 % four fifths should be right: points "
        f"below the line are too confident. In {_BINS_quality} bins.",
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
