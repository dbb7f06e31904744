"""The fit at a glance: its numbers, what they mean in a sentence, and what to do about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltabars.prediction.judgement import LEVELS, mean_bound
from deltabars.report.page.subject import Subject, percent, say
from deltabars.runtime import VERSION

_VERDICTS = {
    "bars": "Bars",
    "ranking only": "Ranking only",
    "meaningless": "Meaningless",
}
_ESTIMATORS = {
    "hessian": "inverse Hessian",
    "opg": "outer products of gradients",
    "sandwich": "Hessian and outer products of gradients",
    "ggn": "generalised Gauss-Newton",
}


@dataclass(frozen=True)
class Fact:
    """A number with its name, and a note on what it is."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Notice:
    """Something to know before trusting the numbers, and what to do about it."""

    title: str
    text: str
    grave: bool


def facts(subject: Subject) -> list[Fact]:
    """The numbers of the fit and of its predictions."""
    fit, prediction = subject.fit, subject.prediction
    main = fit.pairs_of(next(iter(fit.spectra)))
    last = float(main.values[-1])
    found = [
        Fact("Training examples N", say(fit.num_examples), "that the error bars come from"),
        Fact("Parameters P", say(fit.num_parameters), "that were fitted"),
        Fact("Eigenpairs K", say(fit.rank), f"{percent(fit.rank / fit.num_parameters)} of P"),
        Fact("Estimator", fit.estimator, _ESTIMATORS[fit.estimator]),
        Fact(
            "λ_K against λ",
            f"{say(last)} / {say(fit.level)}",
            f"last eigenvalue of the {next(iter(fit.spectra))} over the L2 penalty: "
            f"{say(last / fit.level, 2)} times",
        ),
        Fact("Effective parameters", *_effective(subject)),
        Fact(
            "Mean bound of the score", percent(mean_bound(prediction)), "how far a score can be off"
        ),
    ]
    if fit.noise is not None:
        found.append(Fact("Noise σ", say(fit.noise), "of the targets around the mean"))
    right = subject.right
    if right is not None:
        count = f"{int(right.sum()):,} of {len(right):,} right"
        found.append(Fact("Accuracy", percent(float(right.double().mean())), count))
    elif subject.kind == "gaussian" and subject.targets is not None:
        error = (prediction.mean.double() - subject.targets).square().mean().sqrt()
        found.append(Fact("Root mean squared error", say(float(error)), "over all outputs"))
    else:
        found.append(Fact("Inputs", say(len(subject)), "without known targets"))
    return found


def meaning(subject: Subject) -> str:
    """What the numbers say, in plain sentences."""
    prediction, right = subject.prediction, subject.right
    if subject.kind == "gaussian":
        return (
            "An error bar says how far a predicted number would move had the network been trained "
            "on other examples of the same kind; the noise of the targets comes on top of it. "
            "The score of an input joins the error bars of its outputs in one number."
        )
    text = (
        "An error bar says how far a predicted probability would move had the network been "
        "trained on other examples of the same kind. The score of an input joins the error bars of "
        "its classes in one number: look at the highest scores first."
    )
    if right is not None and bool(right.any()) and bool((~right).any()):
        score = prediction.score.double()
        ratio = float(score[~right].mean() / score[right].mean())
        text += f" Here wrong predictions have {say(ratio, 2)} times the mean score of right ones."
    return text


def verdict(subject: Subject) -> Notice:
    """The judgement of the prediction, which comes before all else."""
    found = subject.prediction.judgement
    assert found is not None
    return Notice(
        f"{_VERDICTS[found.level]}.", f"{found.reason} {found.remedy}", found.level != LEVELS[0]
    )


def notices(subject: Subject) -> list[Notice]:
    """Notes on the fit and on its predictions, the grave ones first."""
    found = [*_of_the_weights(subject), *_of_the_spectra(subject), *_of_the_bars(subject)]
    return sorted(found, key=lambda notice: not notice.grave)


def versions(subject: Subject, plotly: str) -> str:
    """What the page was made with."""
    made = f"deltabars {VERSION}, plotly {plotly}"
    torch_version = subject.fit.diagnostics.get("torch")
    return made + (f"; fitted with torch {torch_version}" if torch_version else "")


def _effective(subject: Subject) -> tuple[str, str]:
    value = say(subject.fit.effective_parameters)
    low, high = subject.fit.effective_parameters_interval
    return value, f"in the K pairs; between {say(low)} and {say(high)} of all P"


def _of_the_weights(subject: Subject) -> list[Notice]:
    told = subject.fit.diagnostics
    found = []
    fitted = told.get("fitted_l2")
    if fitted is not None and fitted != subject.fit.l2:
        text = f"The eigenpairs were computed at l2 = {fitted} and moved to {subject.fit.l2}."
        found.append(Notice("λ is not that of the fit.", text, False))
    return found


def _of_the_spectra(subject: Subject) -> list[Notice]:
    found = []
    for name, pairs in subject.fit.spectra.items():
        told: Mapping[str, Any] = subject.fit.diagnostics.get(name, {})
        converged = int(told.get("converged", len(pairs)))
        if converged < len(pairs):
            text = (
                f"{len(pairs) - converged:,} of {len(pairs):,} eigenpairs of the {name} did not "
                f"reach the tolerance {told.get('tolerance', 0):.1g}. Fit again with a smaller "
                "rank or with more products."
            )
            found.append(Notice("Eigenpairs have not converged.", text, True))
        below = float(told.get("tail_below_l2", 0.0))
        if below > 0 and name == "hessian":
            text = (
                f"It was seen to reach {say(below)} below λ, as trained Hessians do. The bounds "
                "are about the spectrum corrected to λ. For bounds that are theorems fit with "
                "the estimator opg or ggn."
            )
            found.append(Notice("The Hessian's spectrum reaches below λ.", text, False))
    return found


def _of_the_bars(subject: Subject) -> list[Notice]:
    found = []
    for title, mark, text in (
        (
            "Some error bars vanish.",
            subject.prediction.saturated,
            "where the softmax saturates: the weights scatter the logits widely, but its slope is "
            "nearly 0. Read the moderated probability or the mutual information there.",
        ),
        (
            "Some error bars are impossible.",
            subject.prediction.impossible,
            "above √(p(1 − p)), the most that a probability can scatter. Read it as “not known”.",
        ),
    ):
        if mark is not None and bool(mark.any()):
            count = f"{int(mark.sum()):,} of {len(subject):,} inputs have an error bar "
            found.append(Notice(title, count + text, False))
    return found
