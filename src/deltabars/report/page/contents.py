"""The contents of a page: the fit at a glance, what to know of it, and the rows of its inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.prediction.display import marks_of
from deltabars.prediction.prediction import LEVELS, Prediction, mean_bound
from deltabars.report.page.subject import Subject, percent, say, short

_ESTIMATORS = {
    "hessian": "inverse Hessian",
    "opg": "outer products of gradients",
    "sandwich": "Hessian and outer products of gradients",
    "ggn": "generalised Gauss-Newton",
}
_SPREADS = {
    "posterior": "what data and prior leave open",
    "sampling": "how far retraining on other data would move a prediction",
}
_MARKS = {
    "saturated": "that vanishes where the softmax is flat, though the weights scatter the logits. "
    "Read the moderated probability or the mutual information there.",
    "impossible": "above √(p(1 − p)), the most that a probability can scatter. Read it as “not "
    "known”.",
}


def facts(subject: Subject) -> list[tuple[str, str, str]]:
    """Return the numbers of the fit and of its predictions: name, value, and what it is."""
    fit, prediction, right = subject.fit, subject.prediction, subject.right
    matrix = next(iter(fit.spectra))
    last = float(fit.pairs_of(matrix).values[-1])
    over = f"last eigenvalue of the {matrix} over λ: {say(last / fit.level, 2)} times"
    low, high = fit.effective_parameters_interval
    between = f"in the K pairs; between {say(low)} and {say(high)} of all P"
    level, value, how = fit.described_level
    found = [
        ("Error bars", subject.spread, _SPREADS[subject.spread]),
        *_calibration(subject),
        (level.replace("factor", "Factor"), value, how),
        ("Training examples N", say(fit.num_examples), "that the error bars come from"),
        ("Parameters P", say(fit.num_parameters), "that were fitted"),
        ("Eigenpairs K", say(fit.rank), f"{percent(fit.rank / fit.num_parameters)} of P"),
        ("Estimator", fit.estimator, _ESTIMATORS[fit.estimator]),
        ("λₖ against λ", f"{say(last)} / {say(fit.level)}", over),
        ("Effective parameters", say(fit.effective_parameters), between),
        ("Mean bound of the score", percent(mean_bound(prediction)), "how far a score can be off"),
    ]
    if fit.noise is not None:
        found.append(("Noise σ", say(fit.noise), "of the targets around the mean"))
    if right is not None:
        count = f"{int(right.sum()):,} of {len(right):,} right"
        found.append(("Accuracy", percent(float(right.double().mean())), count))
    elif subject.targets is not None:
        error = (prediction.mean.double() - subject.targets).square().mean().sqrt()
        found.append(("Root mean squared error", say(float(error)), "over all outputs"))
    else:
        found.append(("Inputs", say(len(subject)), "without known targets"))
    return found


def _calibration(subject: Subject) -> list[tuple[str, str, str]]:
    """Return the factor that the error bars were multiplied by, if they were."""
    found = subject.fit.calibration.get(subject.spread)
    if found is None:
        return []
    note = f"± {say(found.standard_error, 2)}, by {found.replicas} retrained networks"
    return [("Calibrated by", say(found.factor), f"{note}; R² {say(found.r_squared, 2)}")]


def ratio(subject: Subject) -> str | None:
    """Return the mean score of wrong predictions over that of right ones, where there are both."""
    right, score = subject.right, subject.prediction.score.double()
    if right is None or bool(right.all()) or not bool(right.any()):
        return None
    return say(float(score[~right].mean() / score[right].mean()), 2)


def notices(subject: Subject) -> list[tuple[str, str, str]]:
    """Return the judgement, then notes on the fit and on its predictions, the grave ones first."""
    fit, prediction = subject.fit, subject.prediction
    found: list[tuple[str, str, str]] = []  # title, text, and its kind: grave, mild or fine
    fitted = fit.diagnostics.get("fitted_l2")
    if fitted is not None and fitted != fit.l2:
        text = f"The eigenpairs were computed at l2 = {fitted} and moved to {fit.l2}."
        found.append(("λ is not that of the fit.", text, "mild"))
    for name, pairs in fit.spectra.items():
        known = fit.diagnostics.get(name, {})
        missing = len(pairs) - int(known.get("converged", len(pairs)))
        if missing > 0:
            text = (
                f"{missing:,} of {len(pairs):,} eigenpairs of the {name} did not reach the "
                "tolerance. Fit again with a smaller rank or with more products."
            )
            found.append(("Eigenpairs have not converged.", text, "grave"))
        below = float(known.get("tail_below_l2", 0.0))
        if below > 0 and name == "hessian":
            text = (
                f"It was seen to reach {say(below)} below λ, as trained Hessians do. The bounds "
                "are about the spectrum corrected to λ. Those of opg and ggn are theorems."
            )
            found.append(("The Hessian's spectrum reaches below λ.", text, "mild"))
    for name, text in _MARKS.items():
        mark = getattr(prediction, name)
        if mark is not None and bool(mark.any()):
            title = f"Some error bars are {name}."
            count = f"{int(mark.sum()):,} of {len(subject):,} inputs have an error bar "
            found.append((title, count + text, "mild"))
    judged = prediction.judgement
    assert judged is not None
    kind = "fine" if judged.level == LEVELS[0] else "grave"
    first = f"{judged.level.capitalize()}.", f"{judged.reason} {judged.remedy}", kind
    return [first, *sorted(found, key=lambda notice: notice[2])]


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
    settling: dict[str, Any],
    images: list[str],
    texts: list[str],
) -> dict[str, Any]:
    """Return the columns of some inputs, and the detail of each: classes, bars, settling."""
    at = torch.as_tensor(indices)
    p, right = subject.prediction[at], subject.right
    targets = None if subject.targets is None else subject.targets[at]
    notes = marks_of(p)
    bound = (p.score_error / p.score).nan_to_num(0.0)
    numbers = {
        "score": p.score, "low": p.score_low, "high": p.score_high, "bound": bound,
        "information": p.mutual_information, "entropy": p.entropy,
    }  # fmt: skip
    data: dict[str, Any] = {
        "index": indices,
        "name": [subject.names[i] for i in indices],
        **{key: short(value) for key, value in numbers.items() if value is not None},
        "settled": settling,
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
        names, found = np.array(subject.classes, dtype=object), {}
        for key, rows in (("label", p.label), ("target", targets)):
            if rows is not None:
                found[key] = [", ".join(names[row]) or "none" for row in rows.bool().numpy()]
        return found
    target = None if targets is None else short(targets[:, 0])
    return {"value": short(p.mean[:, 0]), "std": short(p.std[:, 0]), "target": target}


def _outputs(subject: Subject, p: Prediction, targets: Tensor | None) -> dict[str, Any]:
    """Return means, error bars and their ends, (n, k), of 16 outputs or the ten leading ones."""
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
