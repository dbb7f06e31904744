"""The demonstration: train on handwritten digits, fit all four estimators, look at the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deltabars.fitting.fit import fit
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.metrics import Regression, regression
from deltabars.prediction.prediction import Prediction
from deltabars.prediction.ranking import least_certain, most_certain
from deltabars.recipes.digits import L2, Digits, digits_network, load_digits, train_to_convergence
from deltabars.report.page import save_report
from deltabars.report.uncertainty import Row, save_gallery

RANK = 150
_SHOWN = 8


@dataclass(frozen=True)
class DemoResult:
    """Everything the demonstration found."""

    gradient_norm: float
    train_accuracy: float
    test_accuracy: float
    fits: dict[str, DeltaFit]  # "sandwich" and "ggn"
    predictions: dict[str, Prediction]  # of the test scans, by estimator
    right: Tensor  # (n,), whether each test prediction is right
    seconds: dict[str, float]

    def mean_scores(self, estimator: str) -> tuple[float, float]:
        """The mean score of right and of wrong test predictions."""
        score = self.predictions[estimator].score
        return float(score[self.right].mean()), float(score[~self.right].mean())

    def regressions(self) -> dict[tuple[str, str], Regression]:
        """Each of the paper's three estimators against the next, over all images and classes."""
        pairs = (("hessian", "opg"), ("hessian", "sandwich"), ("opg", "sandwich"))
        std = {name: prediction.std for name, prediction in self.predictions.items()}
        return {(x, y): regression(std[x], std[y]) for x, y in pairs}


def run_demo(picture: Path, *, report: Path | None = None, progress: bool = True) -> DemoResult:
    """Train, fit, predict, and draw the most and least certain test digits into `picture`.

    With `report` also write a page about the ggn fit, whose bound is narrow and a theorem.
    """
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = function()
        seconds[name] = time.perf_counter() - started
        return result

    digits = load_digits()
    model = digits_network()
    train = (digits.train_images, digits.train_labels)
    norm = timed("training", lambda: train_to_convergence(model, *train, L2))
    options: dict[str, Any] = {"l2": L2, "rank": RANK, "progress": progress}
    fits = {
        "sandwich": timed(
            "fit sandwich", lambda: fit(model, train, estimator="sandwich", **options)
        ),
        "ggn": timed("fit ggn", lambda: fit(model, train, estimator="ggn", **options)),
    }
    predictions = timed(
        "predict 3 estimators",
        lambda: fits["sandwich"].predict(
            digits.test_images, estimator=["hessian", "opg", "sandwich"]
        ),
    )
    predictions["ggn"] = timed("predict ggn", lambda: fits["ggn"].predict(digits.test_images))
    right = predictions["sandwich"].label == digits.test_labels
    train_right = model(digits.train_images).argmax(1) == digits.train_labels
    result = DemoResult(
        gradient_norm=norm,
        train_accuracy=float(train_right.double().mean()),
        test_accuracy=float(right.double().mean()),
        fits=fits,
        predictions=predictions,
        right=right,
        seconds=seconds,
    )
    _draw(picture, digits, predictions["sandwich"])
    if report is not None:
        save_report(
            report,
            fits["ggn"],
            digits.test_images,
            targets=digits.test_labels,
            prediction=predictions["ggn"],
            title="Handwritten digits: which predictions to trust",
            data="test scans",
            progress=progress,
        )
    return result


def describe(result: DemoResult) -> str:
    """The result in words and tables."""
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
    spectra = {**sandwich.spectra, **ggn.spectra}
    for name, pairs in spectra.items():
        lines.append(
            f"{'λ_K of ' + name:<18}{float(pairs.values[-1]):.5f} "
            f"(largest {float(pairs.values[0]):.3f}, residuals up to "
            f"{float(pairs.residuals.max()):.0e})"
        )
    lines += ["", "mean score of test predictions   right    wrong    its own error (mean)"]
    for name, prediction in result.predictions.items():
        right, wrong = result.mean_scores(name)
        error = float((prediction.score_error / prediction.score).mean())
        lines.append(f"  {name:<30}{right:>8.4f} {wrong:>8.4f}    {error:.1%}")
    lines += ["", "std of one estimator on another  R²       intercept   slope"]
    for (x, y), line in result.regressions().items():
        lines.append(
            f"  {x + ' → ' + y:<30}{line.r2:>8.4f} {line.intercept:>10.5f} {line.slope:>9.4f}"
        )
    lines += ["", "seconds"]
    lines += [f"  {name:<30}{value:>8.2f}" for name, value in result.seconds.items()]
    return "\n".join(lines)


def _draw(path: Path, digits: Digits, prediction: Prediction) -> None:
    rows = []
    for title, places in (
        ("Least certain (highest scores)", least_certain(prediction, _SHOWN)),
        ("Most certain (lowest scores)", most_certain(prediction, _SHOWN)),
    ):
        chosen = prediction[places]
        assert chosen.label is not None
        captions = [
            f"{int(label)}{'' if label == truth else f' (is {int(truth)})'}\n"
            f"{float(mean[label]):.2f} ± {float(std[label]):.2f}\nscore {float(score):.3g}"
            for label, truth, mean, std, score in zip(
                chosen.label,
                digits.test_labels[places],
                chosen.mean,
                chosen.std,
                chosen.score,
                strict=True,
            )
        ]
        rows.append(Row(title, digits.test_images[places, 0], captions))
    save_gallery(path, "Test digits by the score of the sandwich estimator", rows)
