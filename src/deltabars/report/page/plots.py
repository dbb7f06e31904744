"""The numbers of a page's plots and tables by class, and each plot in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.covariance.base import Tail
from deltabars.prediction.metrics import expected_calibration_error, risk_coverage
from deltabars.report.page.subject import Subject, percent, say, short
from deltabars.report.style import smooth_curve

_MOST_POINTS = 1500
_MOST_STEPS = 200
_BANDWIDTH = 0.05  # of a curve, as a share of the axis: that of probabilities is 1 long
_HISTOGRAM_BINS, _RELIABILITY_BINS = 30, 15
_LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_MOST_CLASSES = 20  # in the table; of more, those that are right least often
_WHOLE_MATRIX = 12  # classes whose confusion is shown as a matrix; of more, its worst pairs
_WORST_PAIRS = 15

Plot = dict[str, Any]


def plots_of(subject: Subject, rows: list[int]) -> dict[str, Plot]:
    """Return the plots of a page by name, those that there are, given the indices of its rows."""
    plots = {
        "spectrum": _spectrum(subject),
        "uncertainty": _uncertainty(subject, rows),
        "scores": _scores(subject),
        "risk": _risk(subject),
        "calibration": _calibration(subject),
    }
    return {name: plot for name, plot in plots.items() if plot is not None}


def _spectrum(subject: Subject) -> Plot:
    """Return the eigenvalues of each matrix, and what stands in for the rest."""
    fit = subject.fit
    level, size = fit.level, fit.num_parameters
    matrices, words = [], [f"λ is {say(level)}."]
    for name in fit.spectra:
        pairs = fit.pairs_of(name)
        values = pairs.values.double()
        first, last, count = float(values[0]), float(values[-1]), len(values)
        entry: Plot = {"name": name, "values": short(values)}
        text = f"The {name}'s eigenvalues fall from {say(first)} to {say(last)} at K = {count:,}"
        if count < size and first > 0:
            tail = Tail.after(values, count, level, size)
            entry["tail"] = short([tail.floor, tail.harmonic_mean, tail.ceiling])
            text += f", {say(last / level)} times λ; the other {size - count:,} count as "
            text += say(tail.harmonic_mean)
        if name == "hessian" and len(pairs.smallest):  # those of the others are λ
            entry["smallest"] = short(pairs.smallest[:_MOST_STEPS].double().abs())
        matrices.append(entry)
        words.append(text + ".")
    summary = " ".join(words)
    return {"matrices": matrices, "level": short(level), "parameters": size, "summary": summary}


def _uncertainty(subject: Subject, rows: list[int]) -> Plot:
    """Return std against probability (or the predicted number), with smoothed curves.

    Points are those of the predicted class, or of all answers: the wrong ones, a sample of others.
    """
    prediction, right = subject.prediction, None
    x, y = prediction.mean.double(), prediction.std.double()
    owner = torch.arange(len(subject)).repeat_interleave(x.shape[1])
    if subject.kind == "categorical":
        top = x.argmax(1, keepdim=True)
        x, y, owner = x.gather(1, top), y.gather(1, top), torch.arange(len(subject))
        right = subject.right
    elif subject.kind == "bernoulli" and prediction.classes is None:
        label, targets = prediction.label, subject.targets
        right = None if label is None or targets is None else (label == targets).flatten()
    x, y = x.flatten(), y.flatten()
    shown = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    if right is not None:
        shown = torch.cat([shown[~right[shown]][: _MOST_POINTS // 3], shown[right[shown]]])
    shown = shown[:_MOST_POINTS].sort().values
    index = {place: row for row, place in enumerate(rows)}
    is_number = subject.kind == "gaussian"
    plot: Plot = {
        "x": short(x[shown]),
        "y": short(y[shown]),
        "row": [index.get(place, -1) for place in owner[shown].tolist()],
        "total": len(x),
        "axis": "predicted number" if is_number else "probability",
    }
    every = torch.ones(len(x), dtype=torch.bool)
    groups = {"all": every} if right is None else {"right": right, "wrong": ~right}
    reach = ((float(x.max() - x.min()) or 1.0) if is_number else 1.0) * _BANDWIDTH
    plot["curves"], words = [], []
    for kind, these in groups.items():
        if bool(these.any()):
            grid, curve = smooth_curve(x[these], y[these], reach)
            plot["curves"].append({"kind": kind, "x": short(grid), "y": short(curve)})
            mean = say(float(y[these].mean()))
            words.append(f"{int(these.sum()):,} {kind} ones have a mean error bar of {mean}")
    plot["summary"] = f"Of {len(x):,} predictions, {' and '.join(words)}."
    if right is not None:
        return plot | {"right": right[shown].int().tolist()}
    half, most = say(float(y.median())), say(float(y.max()))
    ends = f"half of them are below {half}, the largest is {most}"
    return plot | {"summary": f"Error bars of {len(x):,} predictions: {ends}."}


def _risk(subject: Subject) -> Plot | None:
    """Return risk against coverage by each number that orders the inputs; None without targets."""
    if subject.right is None:
        return None
    wrong, prediction = ~subject.right, subject.prediction
    orders: dict[str, tuple[str, Tensor | None]] = {"score": ("score", prediction.score)}
    if subject.kind == "categorical":
        orders["probability"] = ("1 − probability", 1 - prediction.mean.double().amax(1))
    orders["information"] = ("mutual information", prediction.mutual_information)
    orders["ideal"] = ("best possible", wrong.double())
    curves, shares = [], (0.8, 0.9, 1.0)
    kept = np.linspace(0, len(wrong) - 1, min(len(wrong), _MOST_STEPS)).round().astype(int)
    for key, (name, score) in orders.items():
        if score is not None:
            found = risk_coverage(score, wrong)
            at = [found.risk[max(0, round(share * len(wrong)) - 1)] for share in shares]
            curve = {"coverage": short(found.coverage[kept]), "risk": short(found.risk[kept])}
            area = short(found.area)
            curves.append({"key": key, "name": name, "area": area, "at": short(at), **curve})
    rate, by_score = float(wrong.double().mean()), curves[0]
    summary = (
        f"Answering all inputs, {percent(rate)} are wrong. Answering the "
        f"80 % with the lowest scores, {percent(by_score['at'][0])} are. "
        f"The area under the curve of the score is {say(by_score['area'])}; without any order it "
        f"is {say(rate)}, and at best {say(curves[-1]['area'])}."
    )
    return {"curves": curves, "rate": short(rate), "summary": summary}


def _scores(subject: Subject) -> Plot:
    """Count how many inputs have which score, in bins that are even on a logarithmic scale."""
    score = subject.prediction.score.double().numpy()
    positive = score[score > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (0.1, 1.0)
    edges = np.geomspace(low, high if high > low else 2 * low, _HISTOGRAM_BINS + 1)
    edges[0], edges[-1] = low, max(high, edges[-1])  # not a rounding error inside
    middle, high_end = np.quantile(score, [0.5, 0.9]).tolist()
    return {
        "edges": short(edges),
        "counts": np.histogram(positive, edges)[0].tolist(),
        "zero": int((score <= 0).sum()),
        "summary": f"Half of the {len(score):,} scores are below {say(middle)}; the highest is "
        f"{say(float(score.max()))}, and a tenth are above {say(high_end)}.",
    }


def _calibration(subject: Subject) -> Plot | None:
    """Return what happened against what was predicted; None where that is not known.

    Of classes the share of right predictions against the highest probability, in 15 bins; of
    numbers the share of targets inside of intervals against the intervals' level.
    """
    prediction, targets = subject.prediction, subject.targets
    if targets is None or prediction.classes is not None or subject.kind == "bernoulli":
        return None
    if subject.kind == "gaussian":
        ends = [prediction.interval(level) for level in _LEVELS]
        inside = [(low.double() <= targets) & (targets <= high.double()) for low, high in ends]
        shares = [float(each.double().mean()) for each in inside]
        nine = percent(shares[_LEVELS.index(0.9)])
        return {
            "x": list(_LEVELS),
            "y": short(shares),
            "counts": [targets.numel()] * len(_LEVELS),
            "axes": ["level of the interval", "targets inside"],
            "summary": f"Of {targets.numel():,} targets {nine} lie in their 90 % intervals.",
        }
    mean = prediction.mean.double().clamp(0, 1)  # off by rounding, as was checked
    highest, label = mean.max(1)
    right, count = (label == targets).double(), _RELIABILITY_BINS
    each = (highest * count).long().clamp(max=count - 1)
    counts, probabilities, rights = (torch.bincount(each, w, count) for w in (None, highest, right))
    used = counts > 0
    error = expected_calibration_error(mean, targets, count)
    return {
        "x": short((probabilities / counts)[used]),
        "y": short((rights / counts)[used]),
        "counts": counts[used].tolist(),
        "axes": ["highest probability", "share of right predictions"],
        "summary": f"The expected calibration error (ECE) is {percent(error)}: the mean highest "
        f"probability is {percent(float(highest.mean()))}, and {percent(float(right.mean()))} of "
        "the predictions are right.",
    }


def class_tables(subject: Subject) -> list[Plot]:
    """Return how often each class is found and right, its mean score, and the confusions."""
    targets, label = subject.targets, subject.prediction.label
    if subject.kind != "categorical" or targets is None or label is None:
        return []
    names, count = subject.classes, len(subject.classes)
    real, said = (torch.bincount(each, minlength=count) for each in (targets, label))
    right = torch.bincount(targets[label == targets], minlength=count)
    scores = torch.bincount(targets, subject.prediction.score.double(), count)
    known = real.nonzero()[:, 0]
    order = known[(right / real)[known].argsort(stable=True)]
    by_class = []
    for c in order[:_MOST_CLASSES].tolist():
        precision = percent(float(right[c] / said[c])) if said[c] else "–"
        recall, score = percent(float(right[c] / real[c])), say(float(scores[c] / real[c]))
        by_class.append([names[c], f"{int(real[c]):,}", recall, precision, score])
    which = "" if len(order) <= _MOST_CLASSES else f": the {_MOST_CLASSES} least often right"
    head = ["Class", "Inputs", "Found (recall)", "Right of predicted (precision)", "Mean score"]
    tables: list[Plot] = [{"caption": f"By class{which}", "head": head, "rows": by_class}]
    if count <= _WHOLE_MATRIX:
        pairs = torch.bincount(targets * count + label, minlength=count**2).view(count, count)
        rows = [
            [name, *(f"{n:,}" if n else "·" for n in row)]
            for name, row in zip(names, pairs.tolist(), strict=True)
        ]
        caption = "Confusion: targets in rows, predictions in columns"
        return [*tables, {"caption": caption, "head": ["", *names], "rows": rows, "same": True}]
    wrong = label != targets
    found, counts = (targets * count + label)[wrong].unique(return_counts=True)
    rows = [
        [names[pair // count], names[pair % count], f"{-number:,}"]
        for number, pair in sorted(zip((-counts).tolist(), found.tolist(), strict=True))
    ][:_WORST_PAIRS]
    head = ["Target", "Predicted", "Inputs"]
    worst = {"caption": "The most frequent confusions", "head": head, "rows": rows, "texts": 2}
    return [*tables, worst] if rows else tables
