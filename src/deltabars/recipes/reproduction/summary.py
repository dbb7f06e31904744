"""results.json: every number of a reproduction."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from deltabars.prediction.metrics import Regression, regression
from deltabars.recipes.paper import BATCH, L2
from deltabars.recipes.reproduction.experiment import ESTIMATORS, PARTS, Experiment
from deltabars.recipes.reproduction.settings import FURTHER, PAIRS
from deltabars.recipes.reproduction.stages import SECONDS, Arrays
from deltabars.recipes.reproduction.variations import (
    INITIAL_WEIGHTS,
    bootstrap,
    foreign,
    initialisations,
    sampled,
)

_OF_TRAINING = ("sigma", "schedule", "steps")
_DIGITS = 7  # that float32 has


def main_results(experiment: Experiment) -> dict[str, Any]:
    """What the paper prints, and how it was computed."""
    network, told, spectra = experiment.network, experiment.diagnostics, experiment.spectra
    size = asdict(experiment.size)
    given = experiment.options.weights is not None
    # Further parts say themselves what they are of, and given weights were trained elsewhere.
    for other in FURTHER + (_OF_TRAINING if given else ()):
        del size[other]
    return {
        "recipe": experiment.recipe.name,
        "size": size.pop("name"),
        "seed": experiment.options.seed,
        "weights": "given" if given else "trained",
        "deterministic": experiment.options.deterministic,
        "versions": {key: told[key] for key in ("deltabars", "torch", "python", "device")},
        "settings": {
            **size,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "parameters_reached": told["parameters_reached"],
            "l2": L2,
            **({} if given else {"batch": BATCH}),
        },
        "training": {
            **{f"{part}_accuracy": _accuracy(experiment, part) for part in PARTS},
            "cost": told["cost"],
            "gradient_norm": told["gradient_norm"],
        },
        "eigenvalues": {
            name: _numbers(spectra[name]) for name in ("hessian", "opg", "hessian_smallest")
        },
        "solvers": {  # residuals are ‖Aq − λq‖: by the solver's recurrence, and measured
            name: {
                "products": told[name]["products"],
                "largest_residual_by_recurrence": float(spectra[f"{name}_residuals"].max()),
                "measured_residual_rms": told[name]["residual_rms"],
            }
            for name in ("hessian", "opg")
        },
        "effective_parameters": {
            name: _effective_parameters(spectra[name]) for name in ("hessian", "opg")
        },
        "regressions": {part: _regressions(experiment.predictions(part)) for part in PARTS},
        "scores": {
            part: {name: _scores(experiment, part, name) for name in ESTIMATORS} for part in PARTS
        },
        "times": _times(experiment),
    }


def foreign_results(experiment: Experiment) -> dict[str, Any]:
    """The foreign image's scores over K, beside the highest ones of training."""
    found = foreign(experiment)
    return {
        "ranks": found["ranks"].tolist(),
        **{name: _numbers(found[name]) for name in ("full", "low_rank")},
        "highest_training_scores": _numbers(found["references"][:, -1]),
    }


def spread_results(experiment: Experiment) -> dict[str, Any]:
    """The eigenvalues of each initialisation, and how well each was trained."""
    found = initialisations(experiment)
    return {
        "networks": len(found),
        "hessians": sum("hessian" in each for each in found),
        "cost": [float(each["cost"]) for each in found],
        "gradient_norm": [float(each["gradient_norm"]) for each in found],
        "opg": [_numbers(each["opg"], 5) for each in found],
        "hessian": [_numbers(each["hessian"], 5) for each in found if "hessian" in each],
        "hessian_smallest": [
            _numbers(each["hessian_smallest"], 5) for each in found if "hessian" in each
        ],
    }


def ensemble_results(experiment: Experiment) -> dict[str, Any]:
    """Bootstraps and samples against the Delta method: how alike the stds of the test set are.

    Each line regresses the other way's std on the Delta method's, over all images and classes.
    """
    results: dict[str, Any] = {}
    if experiment.size.bootstrap:
        results["bootstrap"] = {
            initial: _against_all(experiment, bootstrap(experiment, initial))
            | {"networks": experiment.size.bootstrap}
            for initial in INITIAL_WEIGHTS
        }
    if experiment.size.samples:
        results["samples"] = {
            name: {
                sampler: _line(experiment, arrays, name)
                | _of_ensemble(arrays)
                | {"networks": experiment.size.samples}
                for sampler, arrays in sampled(experiment, name).items()
            }
            for name in ESTIMATORS
        }
    return results


def _against_all(experiment: Experiment, arrays: Arrays) -> dict[str, Any]:
    lines = {name: _line(experiment, arrays, name) for name in ESTIMATORS}
    return {"against": lines, **_of_ensemble(arrays)}


def _line(experiment: Experiment, arrays: Arrays, estimator: str) -> dict[str, float | None]:
    own = experiment.predictions("test")[f"{estimator}_std"]
    line = regression(torch.from_numpy(own), torch.from_numpy(arrays["std"]))
    correlation = math.copysign(math.sqrt(line.r2), line.slope)
    return {"correlation": _known(correlation), **_of_line(line)}


def _of_ensemble(arrays: Arrays) -> dict[str, float]:
    return {
        "mean_accuracy": float(arrays["accuracy"].mean()),
        "least_accuracy": float(arrays["accuracy"].min()),
        "seconds": float(arrays[SECONDS]),
    }


def _of_line(line: Regression) -> dict[str, float | None]:
    return {name: _known(value) for name, value in asdict(line).items()}


def _known(value: float) -> float | None:
    """None for a number that there is not: JSON has no NaN."""
    return None if math.isnan(value) else value


def _regressions(predictions: Arrays) -> dict[str, dict[str, float | None]]:
    std = {name: torch.from_numpy(predictions[f"{name}_std"]) for name in ESTIMATORS}
    return {f"{x}_{y}": _of_line(regression(std[x], std[y])) for x, y in PAIRS}


def _scores(experiment: Experiment, part: str, estimator: str) -> dict[str, float | None]:
    found = experiment.predictions(part)
    score = found[f"{estimator}_score"].astype(np.float64)
    right = found["label"] == experiment.labels(part)
    groups = {"mean": score, "true_positives": score[right], "false_positives": score[~right]}
    some = score > 0  # a saturated softmax has no derivative, and no score
    error = found[f"{estimator}_score_error"].astype(np.float64)[some] / score[some]
    groups["mean_relative_error"] = error
    return {name: float(group.mean()) if len(group) else None for name, group in groups.items()}


def _accuracy(experiment: Experiment, part: str) -> float:
    return float((experiment.predictions(part)["label"] == experiment.labels(part)).mean())


def _effective_parameters(values: np.ndarray) -> float:
    positive = values[values > 0]
    return float(((positive - L2) / positive).sum())


def _times(experiment: Experiment) -> dict[str, float]:
    """Seconds of each step; of weights that were given, none for the training."""
    told = experiment.diagnostics
    times: dict[str, float] = {}
    if experiment.options.weights is None:
        times["training"] = float(experiment.weights[SECONDS])
    times |= {matrix: told[matrix]["seconds"] for matrix in ("hessian", "opg")}
    for part in PARTS:
        times[f"predicting_{part}"] = float(experiment.predictions(part)[SECONDS])
    return times


def _numbers(values: np.ndarray, digits: int = _DIGITS) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
