"""The fit at a glance: its numbers, what they mean in a sentence, and what to do about them."""

from __future__ import annotations

from dataclasses import dataclass

from deltabars.prediction.judgement import LEVELS, mean_bound
from deltabars.report.page.subject import Subject, percent, say

_ESTIMATORS = {
    "hessian": "inverse Hessian",
    "opg": "outer products of gradients",
    "sandwich": "Hessian and outer products of gradients",
    "ggn": "generalised Gauss-Newton",
}


@dataclass(frozen=True)
class Notice:
    """Something to know before trusting the numbers, and what to do about it."""

    title: str
    text: str
    grave: bool


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
            "λ_K against λ",
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


def meaning(subject: Subject) -> str:
    """Say what the numbers mean, in plain sentences."""
    right, is_number = subject.right, subject.kind == "gaussian"
    text = (
        f"An error bar says how far a predicted {'number' if is_number else 'probability'} would "
        "move had the network been trained on other examples of the same kind. The score of an "
        f"input joins the error bars of its {'outputs' if is_number else 'classes'} in one number: "
        "look at the highest scores first."
    )
    if is_number:
        return f"{text} The noise of the targets comes on top of it."
    if right is not None and bool(right.any()) and bool((~right).any()):
        score = subject.prediction.score.double()
        ratio = float(score[~right].mean() / score[right].mean())
        text += f" Here wrong predictions have {say(ratio, 2)} times the mean score of right ones."
    return text


def verdict(subject: Subject) -> Notice:
    """Return the judgement of the prediction, which comes before all else."""
    found = subject.prediction.judgement
    assert found is not None
    title = f"{found.level.capitalize()}."
    return Notice(title, f"{found.reason} {found.remedy}", found.level != LEVELS[0])


def notices(subject: Subject) -> list[Notice]:
    """Return notes on the fit and on its predictions, the grave ones first."""
    fit, prediction, found = subject.fit, subject.prediction, []
    fitted = fit.diagnostics.get("fitted_l2")
    if fitted is not None and fitted != fit.l2:
        text = f"The eigenpairs were computed at l2 = {fitted} and moved to {fit.l2}."
        found.append(Notice("λ is not that of the fit.", text, False))
    for name, pairs in fit.spectra.items():
        known = fit.diagnostics.get(name, {})
        missing = len(pairs) - int(known.get("converged", len(pairs)))
        if missing > 0:
            text = (
                f"{missing:,} of {len(pairs):,} eigenpairs of the {name} did not reach the "
                f"tolerance {known.get('tolerance', 0):.1g}. Fit again with a smaller rank or with "
                "more products."
            )
            found.append(Notice("Eigenpairs have not converged.", text, True))
        below = float(known.get("tail_below_l2", 0.0))
        if below > 0 and name == "hessian":
            text = (
                f"It was seen to reach {say(below)} below λ, as trained Hessians do. The bounds "
                "are about the spectrum corrected to λ. For bounds that are theorems fit with "
                "the estimator opg or ggn."
            )
            found.append(Notice("The Hessian's spectrum reaches below λ.", text, False))
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
            found.append(Notice(title, count + text, False))
    return sorted(found, key=lambda notice: not notice.grave)
