"""The numbers of a reproduction, from the arrays of its stages, and those that the paper prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltabars.prediction.metrics import regression
from deltabars.recipes.paper import L2
from deltabars.recipes.stages import SECONDS, Arrays
from deltabars.storage.writing import write_text

ESTIMATORS = ("hessian", "opg", "sandwich")
MATRICES = ("hessian", "opg")
PAIRS = (("hessian", "opg"), ("hessian", "sandwich"), ("opg", "sandwich"))

_DIGITS = 7  # that float32 has
_ROW_OF_NUMBERS = re.compile(r"\[[\d\s.,e+-]+\]")

# What the paper prints: of the end of training, and the line of each of PAIRS (its Table 1).
PUBLISHED: dict[str, dict[str, Any]] = {
    "mnist": {
        "train_accuracy": 0.979, "test_accuracy": 0.981, "cost": 0.257, "gradient_norm": 0.016,
        "train": ((0.997, 0.0, 1.206), (0.998, 0.0, 0.923), (0.990, 0.0, 0.761)),
        "test": ((0.998, 0.0, 1.219), (0.999, 0.0, 0.915), (0.995, 0.0, 0.748)),
    },
    "cifar10": {
        "train_accuracy": 0.701, "test_accuracy": 0.687, "cost": 1.284, "gradient_norm": 0.030,
        "train": ((0.999, 0.0, 1.062), (0.999, 0.0, 1.017), (0.997, 0.0, 0.956)),
        "test": ((1.000, 0.0, 1.066), (1.000, 0.0, 1.014), (0.998, 0.0, 0.950)),
    },
}  # fmt: skip


def published_regressions(name: str) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield the paper's lines of an experiment: part of the data, pair, and numbers."""
    for part in ("train", "test"):
        for (x, y), line in zip(PAIRS, PUBLISHED[name][part], strict=True):
            yield part, f"{x}_{y}", dict(zip(("r2", "intercept", "slope"), line, strict=True))


def beside_published(name: str, results: Mapping[str, Any]) -> str:
    """Return a table of our numbers beside the paper's."""
    rows = [f"{'':<38}{'ours':>8}{'paper':>10}{'difference':>12}"]
    for key, ours in results["training"].items():
        rows.append(_row(key.replace("_", " "), ours, PUBLISHED[name][key]))
    for part, pair, line in published_regressions(name):
        title = f"{part}: {pair.replace('_', ' → ')}"
        ours = results["regressions"][part][pair]
        rows += [_row(f"{title}, {key}", ours[key], paper) for key, paper in line.items()]
    return "\n".join(rows)


def _row(title: str, ours: float | None, paper: float) -> str:
    if ours is None:
        return f"{title:<38}{'–':>8}{paper:>10.3f}{'–':>12}"
    ours, difference = round(ours, 4) + 0.0, round(ours - paper, 4) + 0.0  # not −0.0000
    return f"{title:<38}{ours:>8.4f}{paper:>10.3f} {difference:>+11.4f}"


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write results.json, with each list of numbers on one line."""
    text = json.dumps(results, indent=1, allow_nan=False)
    write_text(path, _ROW_OF_NUMBERS.sub(lambda found: " ".join(found.group().split()), text))


def of_spectra(spectra: Arrays, diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the eigenvalues of the main network, and how they were computed."""
    solvers, effective = {}, {}
    for name in MATRICES:
        solvers[name] = {  # residuals are ‖Aq − λq‖: by the solver's recurrence, and measured
            "products": diagnostics[name]["products"],
            "largest_residual_by_recurrence": float(spectra[f"{name}_residuals"].max()),
            "measured_residual_rms": diagnostics[name]["residual_rms"],
        }
        positive = spectra[name][spectra[name] > 0]
        effective[name] = float(((positive - L2) / positive).sum())
    values = {name: _numbers(spectra[name]) for name in (*MATRICES, "hessian_smallest")}
    return {"eigenvalues": values, "solvers": solvers, "effective_parameters": effective}


Numbers = dict[str, Any]


def of_predictions(predictions: Arrays, labels: np.ndarray) -> tuple[Numbers, Numbers]:
    """Return the line of each of PAIRS, and mean scores of all, right and wrong predictions."""
    right, lines, scores = predictions["label"] == labels, {}, {}
    for x, y in PAIRS:
        lines[f"{x}_{y}"] = line(predictions[f"{x}_std"], predictions[f"{y}_std"])
        del lines[f"{x}_{y}"]["correlation"]
    for name in ESTIMATORS:
        score = predictions[f"{name}_score"].astype(np.float64)
        some = score > 0  # a saturated softmax has no derivative, and no score
        errors = predictions[f"{name}_score_error"][some] / score[some]
        keys = "mean", "true_positives", "false_positives", "mean_relative_error"
        groups = zip(keys, (score, score[right], score[~right], errors), strict=True)
        scores[name] = {key: float(each.mean()) if len(each) else None for key, each in groups}
    return lines, scores


def of_foreign(found: Arrays) -> dict[str, Any]:
    """Return the foreign image's scores over K, beside the highest ones of training."""
    scores = {name: _numbers(found[name]) for name in ("full", "low_rank")}
    highest = _numbers(found["references"][:, -1])
    return {"ranks": found["ranks"].tolist(), **scores, "highest_training_scores": highest}


def of_initialisations(found: Sequence[Arrays]) -> dict[str, Any]:
    """Return the eigenvalues of each initialisation, and how well each was trained."""
    hessians = [each for each in found if "hessian" in each]
    results: dict[str, Any] = {"networks": len(found), "hessians": len(hessians)}
    for name in ("cost", "gradient_norm"):
        results[name] = [float(each[name]) for each in found]
    for name, some in (("opg", found), ("hessian", hessians), ("hessian_smallest", hessians)):
        results[name] = [_numbers(each[name], 5) for each in some]
    return results


def of_ensemble(found: Arrays) -> dict[str, float]:
    """Return how well the networks of an ensemble do, and what they took."""
    each, seconds = found["accuracy"], float(found[SECONDS])
    rates = {"mean_accuracy": float(each.mean()), "least_accuracy": float(each.min())}
    return rates | {"seconds": seconds, "networks": len(each)}


def line(own: np.ndarray, other: np.ndarray) -> dict[str, float | None]:
    """Return the regression of one std on another, over all images and classes."""
    found = regression(torch.from_numpy(own), torch.from_numpy(other))
    numbers = {"correlation": math.copysign(math.sqrt(found.r2), found.slope), **asdict(found)}
    return {name: None if math.isnan(value) else value for name, value in numbers.items()}


def _numbers(values: np.ndarray, digits: int = _DIGITS) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
