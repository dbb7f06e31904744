"""The demonstration: train on handwritten digits, fit all four estimators, look at the result.

It ends with the check of the error bars that a fit gives without any option: networks are retrained
on bootstrap samples, and the scatter of their predictions is compared with the bars.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deltabars.fitting.checking import Check, compare_with_replicas
from deltabars.fitting.fit import fit
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.replicas import resample
from deltabars.prediction.metrics import regression
from deltabars.prediction.prediction import Prediction
from deltabars.prediction.ranking import least_certain, most_certain
from deltabars.recipes.digits import L2, Digits, digits_network, load_digits, train_to_convergence
from deltabars.report.page import save_report
from deltabars.report.uncertainty import Row, save_checks, save_gallery
from deltabars.runtime.progress import Progress

RANK = 150
REPLICAS = 6
_STEPS = 150  # of a retraining: a third of the time of 400, and the same slopes to one per cent
_SHOWN = 8
_SPREADS = ("sampling", "posterior")


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found."""

    gradient_norm: float
    train_accuracy: float
    test_accuracy: float
    fits: dict[str, DeltaFit]  # "sandwich" and "ggn"
    predictions: dict[str, Prediction]  # of the test scans, by estimator
    right: Tensor  # (n,), whether each test prediction is right
    seconds: dict[str, float]
    auto: DeltaFit  # without any option
    checks: list[Check]  # of its bars, against networks that were retrained


def check_picture(picture: Path) -> Path:
    """Return where the picture of the check goes: beside that of the digits."""
    return picture.with_name(f"{picture.stem}-check{picture.suffix}")


def run_demo(picture: Path, *, report: Path | None = None, progress: bool = True) -> DemoResult:
    """Train, fit, predict, and draw the most and least certain test digits into `picture`.

    Then retrain on bootstrap samples, and draw the scatter of predictions against the error bars
    into `check_picture(picture)`.

    With `report` also write a page about the ggn fit, whose bound is narrow and a theorem.
    """
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments, **options)
        seconds[name] = time.perf_counter() - started
        return result

    digits, model = load_digits(), digits_network()
    train, test = (digits.train_images, digits.train_labels), digits.test_images
    norm = timed("training", train_to_convergence, model, *train, L2)
    options: dict[str, Any] = {"l2": L2, "rank": RANK, "progress": progress}
    fits = {
        name: timed(f"fit {name}", fit, model, train, estimator=name, **options)
        for name in ("sandwich", "ggn")
    }
    predict, names = fits["sandwich"].predict, ["hessian", "opg", "sandwich"]
    predictions = timed("predict 3 estimators", predict, test, estimator=names)
    predictions["ggn"] = timed("predict ggn", fits["ggn"].predict, test)
    right = predictions["sandwich"].label == digits.test_labels
    train_right = model(digits.train_images).argmax(1) == digits.train_labels
    train_accuracy, accuracy = (float(each.double().mean()) for each in (train_right, right))
    auto = timed("fit without options", fit, model, train, progress=progress)
    replicas = timed(f"retraining {REPLICAS} times", _retrained, train, progress)
    checks = [compare_with_replicas(auto, replicas, test, spread=spread) for spread in _SPREADS]
    found = norm, train_accuracy, accuracy, fits, predictions, right, seconds, auto, checks
    result = DemoResult(*found)
    _draw(picture, digits, predictions["sandwich"])
    save_checks(check_picture(picture), checks)
    if report is not None:
        title = "Handwritten digits: which predictions to trust"
        known = {"targets": digits.test_labels, "prediction": predictions["ggn"]}
        words: dict[str, Any] = {"title": title, "data": "test scans", "progress": progress}
        save_report(report, fits["ggn"], test, **known, **words)
    return result


def describe(result: DemoResult) -> str:
    """Return the result in words and tables."""
    sandwich, ggn = result.fits["sandwich"], result.fits["ggn"]
    lines = [
        "",
        f"accuracy          train {result.train_accuracy:.4f}, test {result.test_accuracy:.4f}",
        f"gradient norm     {result.gradient_norm:.2g} (of the cost, at the trained weights)",
        f"parameters P      {sandwich.num_parameters:,}",
        f"examples N        {sandwich.num_examples:,}",
        f"eigenpairs K      {sandwich.rank:,}",
        f"λ                 {sandwich.l2:g}",
    ]
    for name, pairs in {**sandwich.spectra, **ggn.spectra}.items():
        first, last, worst = (float(x) for x in (*pairs.values[[0, -1]], pairs.residuals.max()))
        ends = f"{last:.5f} (largest {first:.3f}, residuals up to {worst:.0e})"
        lines.append(f"{'λ_K of ' + name:<18}{ends}")
    lines += ["", "mean score of test predictions   right    wrong    its own error (mean)"]
    for name, prediction in result.predictions.items():
        scores = prediction.score
        right, wrong = (float(scores[part].mean()) for part in (result.right, ~result.right))
        error = float((prediction.score_error / prediction.score).mean())
        lines.append(f"  {name:<30}{right:>8.4f} {wrong:>8.4f}    {error:.1%}")
    lines += ["", "std of one estimator on another  R²       intercept   slope"]
    for x, y in (("hessian", "opg"), ("hessian", "sandwich"), ("opg", "sandwich")):
        line = regression(result.predictions[x].std, result.predictions[y].std)
        numbers = f"{line.r2:>8.4f} {line.intercept:>10.5f} {line.slope:>9.4f}"
        lines.append(f"  {x + ' → ' + y:<30}{numbers}")
    noted = result.auto.diagnostics["l2"]
    ends = "{evidence:.2g} by the evidence ({evidence_low:.2g} to {evidence_high:.2g})"
    lines += [
        "",
        f"deltabars.fit(model, train)     {result.auto.estimator}, λ = {ends.format(**noted)}",
        f"  bars beside {REPLICAS} retrainings      slope     R²      Spearman",
    ]
    for check in result.checks:
        found = check.agreement
        numbers = f"{found.slope:>9.2f} {found.r_squared:>8.2f} {found.spearman:>9.2f}"
        lines.append(f"  {f'std, spread={check.spread!r}':<28}{numbers}")
    lines += ["", "seconds"]
    lines += [f"  {name:<30}{value:>8.2f}" for name, value in result.seconds.items()]
    return "\n".join(lines)


def _retrained(train: tuple[Tensor, Tensor], progress: bool) -> list[nn.Module]:
    """Train networks from the same initial weights on bootstrap samples."""
    found = []
    with Progress("Retraining", REPLICAS, "network", progress) as bar:
        for seed in range(REPLICAS):
            network, (images, labels) = digits_network(), resample(train, seed)
            train_to_convergence(network, images, labels, L2, _STEPS)
            found.append(network)
            bar.show(seed + 1)
    return found


def _draw(path: Path, digits: Digits, prediction: Prediction) -> None:
    rows = []
    for title, indices in (
        ("Least certain (highest scores)", least_certain(prediction, _SHOWN)),
        ("Most certain (lowest scores)", most_certain(prediction, _SHOWN)),
    ):
        captions = []
        for index in indices.tolist():
            assert prediction.label is not None
            label, truth = int(prediction.label[index]), int(digits.test_labels[index])
            mean, std = (float(part[index, label]) for part in (prediction.mean, prediction.std))
            name = f"{label}{'' if label == truth else f' (is {truth})'}"
            score = f"score {float(prediction.score[index]):.3g}"
            captions.append(f"{name}\n{mean:.2f} ± {std:.2f}\n{score}")
        rows.append(Row(title, digits.test_images[indices, 0], captions))
    save_gallery(path, "Test digits by the score of the sandwich estimator", rows)
