"""The fit at a glance: its numbers, what they mean in a sentence, and what to do about them."""

from __future__ import annotations

from deltabars.prediction.judgement import LEVELS, mean_bound
from deltabars.report.page.subject import Subject, percent, say

_ESTIMATORS = {
    "hessian": "inverse Hessian",
    "opg": "outer products of gradients",
    "sandwich": "Hessian and outer products of gradients",
    "ggn": "generalised Gauss-Newton",
}


Notice = tuple[str, str, str]  # title, text, and its kind: grave, mild or fine


def facts(subject: Subject) -> list[tuple[str, str, str]]:
    """Return the numbers of the fit and of its predictions: name, value, and what it is."""
    fit, prediction, right = subject.fit, subject.prediction, subject.right
    matrix = next(iter(fit.spectra))
    last = float(fit.pairs_of(matrix).values[-1])
    low, high = fit.effective_parameters_interval
    found = [
        ("Training examples N", say(fit.num_examples), "that the error bars come from"),
        ("Parameters P", say(fit.num_parameters), "that were fitted"),
        ("Eigenpairs K", say(fit.rank), f"{percent(fit.rank / fit.num_parameters)} of P"),
        ("Estimator", fit.estimator, _ESTIMATORS[fit.estimator]),
        (
            "λₖ against λ",
            f"{say(last)} / {say(fit.level)}",
            f"last eigenvalue of the {matrix} over λ: {say(last / fit.level, 2)} times",
        ),
        (
            "Effective parameters",
            say(fit.effective_parameters),
            f"in the K pairs; between {say(low)} and {say(high)} of all P",
        ),
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


def ratio(subject: Subject) -> str | None:
    """Return the mean score of wrong predictions over that of right ones, where there are both."""
    right, score = subject.right, subject.prediction.score.double()
    if right is None or bool(right.all()) or not bool(right.any()):
        return None
    return say(float(score[~right].mean() / score[right].mean()), 2)


def notices(subject: Subject) -> list[Notice]:
    """Return the judgement, then notes on the fit and on its predictions, the grave ones first."""
    fit, prediction = subject.fit, subject.prediction
    found: list[Notice] = []
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
                f"tolerance {known.get('tolerance', 0):.1g}. Fit again with a smaller rank or with "
                "more products."
            )
            found.append(("Eigenpairs have not converged.", text, "grave"))
        below = float(known.get("tail_below_l2", 0.0))
        if below > 0 and name == "hessian":
            text = (
                f"It was seen to reach {say(below)} below λ, as trained Hessians do. The bounds "
                "are about the spectrum corrected to λ. For bounds that are theorems fit with "
                "the estimator opg or ggn."
            )
            found.append(("The Hessian's spectrum reaches below λ.", text, "mild"))
    for title, mark, text in (
        (
            "Some error bars vanish.",
            prediction.saturated,
            "where the softmax saturates: the weights scatter the logits widely, but its slope is "
            "nearly 0. Read the moderated probability or the mutual information there.",
        ),
        (
            "Some error bars are impossible.",
            prediction.impossible,
            "above √(p(1 − p)), the most that a probability can scatter. Read it as “not known”.",
        ),
    ):
        if mark is not None and bool(mark.any()):
            count = f"{int(mark.sum()):,} of {len(subject):,} inputs have an error bar "
            found.append((title, count + text, "mild"))
    judged = prediction.judgement
    assert judged is not None
    kind = "fine" if judged.level == LEVELS[0] else "grave"
    first = f"{judged.level.capitalize()}.", f"{judged.reason} {judged.remedy}", kind
    return [first, *sorted(found, key=lambda notice: notice[2])]
