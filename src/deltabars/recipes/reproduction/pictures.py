"""The figures of a reproduction, from its stages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.prediction.metrics import regression
from deltabars.recipes.paper import L2, Recipe
from deltabars.recipes.reproduction.experiment import ESTIMATORS, PARTS, Experiment, Options
from deltabars.recipes.reproduction.settings import PAIRS, Size
from deltabars.recipes.reproduction.summary import (
    ensemble_results,
    foreign_results,
    main_results,
    spread_results,
)
from deltabars.recipes.reproduction.variations import (
    INITIAL_WEIGHTS,
    SAMPLERS,
    bootstrap,
    foreign,
    initialisations,
    sampled,
    surfaces,
)
from deltabars.report.spectra import Spectrum, save_spectra
from deltabars.report.style import house_style
from deltabars.report.uncertainty import (
    Block,
    Comparison,
    Foreign,
    Panel,
    save_comparisons,
    save_foreign,
    save_rankings,
    save_surfaces,
    save_uncertainty,
)
from deltabars.runtime.precision import same_bits
from deltabars.storage.writing import write_text

_RANKED = "hessian"  # whose scores rank the images, as in the paper
_NAMES = {"hessian": "Hessian", "opg": "OPG", "sandwich": "Sandwich"}
_SHOWN = 5  # images a class


def draw(experiment: Experiment, say: Callable[[str], None]) -> None:
    """Draw every figure into the folder of the results."""
    figures = {
        "spectra": _spectra,
        "uncertainty": _uncertainty,
        "surfaces": _surfaces,
        "foreign": _foreign,
        "rankings": _rankings,
        "estimators": _estimators,
        "ensembles": _ensembles,
    }
    for name, figure in figures.items():
        path = experiment.options.out / f"{name}.png"
        if figure(experiment, path):
            say(f"figure: {path}")
        else:
            path.unlink(missing_ok=True)  # of a run that had more
            say(f"no figure {path}: there is nothing to draw")


def _spectra(experiment: Experiment, path: Path) -> bool:
    found = initialisations(experiment)
    hessians = [each for each in found if "hessian" in each]
    size = sum(parameter.numel() for parameter in experiment.network.parameters())
    # Nothing of G is below λ, and what no example reaches is at λ: that much of its right tail is
    # known without computing.
    known = min(experiment.size.rank, size - experiment.diagnostics["parameters_reached"])
    floor = [torch.full((known,), L2, dtype=torch.float64)] * len(found)
    save_spectra(
        path,
        [
            Spectrum(
                "H",
                [torch.from_numpy(each["hessian"]) for each in hessians],
                [torch.from_numpy(each["hessian_smallest"]) for each in hessians],
            ),
            Spectrum("G", [torch.from_numpy(each["opg"]) for each in found], floor),
        ],
        L2,
        size,
    )
    return True


def _uncertainty(experiment: Experiment, path: Path) -> bool:
    found = experiment.predictions("test")
    label = torch.from_numpy(found["label"])
    panels = [
        Panel(
            _NAMES[name],
            torch.from_numpy(found["mean"]),
            torch.from_numpy(found[f"{name}_std"]),
            label,
            label == experiment.test[1],
        )
        for name in ESTIMATORS
    ]
    save_uncertainty(path, panels, f"{experiment.recipe.title} test set, {_rank(experiment)}")
    return True


def _surfaces(experiment: Experiment, path: Path) -> bool:
    arrays = {name: torch.from_numpy(value) for name, value in surfaces(experiment).items()}
    title = f"{experiment.recipe.title} test set, OPG"
    ranks, grid = arrays["ranks"], arrays["grid"]
    save_surfaces(path, ranks, grid, arrays["std"], arrays["error"], title)
    return True


def _foreign(experiment: Experiment, path: Path) -> bool:
    arrays = {name: torch.from_numpy(value) for name, value in foreign(experiment).items()}
    image = arrays.pop("image")
    names = ("ranks", "full", "full_low", "full_high", "low_rank", "references")
    curves = {name: arrays[name] for name in names}
    shown = Foreign(image[0] if len(image) == 1 else image, **curves)
    save_foreign(path, shown, f"{experiment.recipe.title}, OPG")
    return True


def _rankings(experiment: Experiment, path: Path) -> bool:
    names = experiment.recipe.class_names
    blocks = []
    for end in ("lowest", "highest"):
        for part in PARTS:
            images, labels = experiment.train if part == "train" else experiment.test
            score = torch.from_numpy(experiment.predictions(part)[f"{_RANKED}_score"])
            order = score.sort(descending=end == "highest", stable=True).indices
            count = min(_SHOWN, int(labels.bincount(minlength=len(names)).min()))
            if count == 0:
                return False  # a small run may have no image of some class
            places = [order[labels[order] == each][:count] for each in range(len(names))]
            chosen = images[torch.stack(places)]  # (C, k, channels, side, side)
            title = f"{end.capitalize()} {count}, {'training' if part == 'train' else 'test'} set"
            blocks.append(Block(title, _drawable(chosen), names))
    title = f"{experiment.recipe.title} by the score of the Hessian estimator"
    save_rankings(path, blocks, title)
    return True


def _estimators(experiment: Experiment, path: Path) -> bool:
    found = experiment.predictions("test")
    panels = [
        _comparison(
            f"{_NAMES[x]} → {_NAMES[y]}",
            found[f"{x}_std"],
            found[f"{y}_std"],
            f"std, {_NAMES[x]}",
            f"std, {_NAMES[y]}",
        )
        for x, y in PAIRS
    ]
    save_comparisons(path, panels, f"{experiment.recipe.title} test set, {_rank(experiment)}")
    return True


def _ensembles(experiment: Experiment, path: Path) -> bool:
    own, panels = experiment.predictions("test"), []
    if experiment.size.bootstrap:
        for initial in INITIAL_WEIGHTS:
            std = bootstrap(experiment, initial)["std"]
            title = f"{experiment.size.bootstrap} bootstraps, {initial} start"
            label = "std, Delta (Sandwich)"
            panels.append(_comparison(title, own["sandwich_std"], std, label, "std, bootstrap"))
    if experiment.size.samples:
        found = sampled(experiment, "opg")
        for sampler in SAMPLERS:
            title = f"{experiment.size.samples} samples, {sampler.title}"
            label = "std, Delta (OPG)"
            std = found[sampler.name]["std"]
            panels.append(_comparison(title, own["opg_std"], std, label, "std, sampler"))
    if panels:
        save_comparisons(path, panels, f"{experiment.recipe.title} test set")
    return bool(panels)


def _comparison(title: str, x: np.ndarray, y: np.ndarray, x_label: str, y_label: str) -> Comparison:
    one, other = torch.from_numpy(x).flatten(), torch.from_numpy(y).flatten()
    line = regression(one, other)
    return Comparison(title, one, other, line.slope, line.intercept, line.r2, x_label, y_label)


def _drawable(images: Tensor) -> Tensor:
    """Without the dimension of a single channel."""
    return images[:, :, 0] if images.shape[2] == 1 else images


def _rank(experiment: Experiment) -> str:
    return f"K = {experiment.size.rank:,}"


_ROW_OF_NUMBERS = re.compile(r"\[[\d\s.,e+-]+\]")


def reproduce(
    recipe: Recipe, size: Size, options: Options, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run all stages that are not there yet; write results.json and the figures.

    Returns:
        What is in results.json.
    """
    # A library that is missing for the figures is better known now than after all stages.
    with house_style(), same_bits(options.deterministic):
        experiment = Experiment(recipe, size, options, say)
        results = main_results(experiment)
        _write(options, results)  # the paper's table stands, whatever happens to the rest
        surfaces(experiment)
        results["foreign"] = foreign_results(experiment)
        results["initialisations"] = spread_results(experiment)
        results |= ensemble_results(experiment)
        _write(options, results)
        draw(experiment, say)
    return results


def _write(options: Options, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=1, allow_nan=False)
    write_text(options.out / "results.json", _ROW_OF_NUMBERS.sub(_on_one_line, text))


def _on_one_line(numbers: re.Match[str]) -> str:
    return " ".join(numbers.group().split())
