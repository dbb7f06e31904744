"""The figures of a reproduction, and `reproduce`, which runs all stages and ends with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.prediction.metrics import regression
from deltabars.recipes.paper import L2, Recipe, Size
from deltabars.recipes.reproduction import INITIAL_WEIGHTS, SAMPLERS, Experiment, Options
from deltabars.recipes.stages import Arrays
from deltabars.recipes.summary import PAIRS, write_results
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

_NAMES = {"hessian": "Hessian", "opg": "OPG", "sandwich": "Sandwich"}
_SHOWN = 5  # images of each class


def reproduce(
    recipe: Recipe, size: Size, options: Options, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run all stages that are not there yet; write and return results.json; draw the figures."""
    with house_style(), same_bits(options.deterministic):  # a missing matplotlib is found first
        experiment = Experiment(recipe, size, options, say)
        path = options.out / "results.json"
        results = experiment.main_results()
        write_results(path, results)  # the paper's table, even if a further stage fails
        results |= experiment.further_results()
        write_results(path, results)
        for name, (save, content) in _FIGURES.items():
            path = options.out / f"{name}.png"
            found = content(experiment)
            if found is None:
                path.unlink(missing_ok=True)  # of a run that had more
                say(f"no figure {path}: there is nothing to draw")
            else:
                save(path, *found)
                say(f"figure: {path}")
    return results


# The arguments of a figure's function after its path, or None if there is nothing to draw.
Content = tuple[Any, ...] | None


def _spectra(experiment: Experiment) -> Content:
    found = experiment.initialisations()
    hessians = [_tensors(each) for each in found if "hessian" in each]
    size = sum(parameter.numel() for parameter in experiment.network.parameters())
    # Nothing of G is below λ, and what no example reaches is at λ: that much of its lower tail is
    # known without computing.
    known = min(experiment.size.rank, size - experiment.diagnostics["parameters_reached"])
    floor = [torch.full((known,), L2, dtype=torch.float64)] * len(found)
    left, right = ([each[name] for each in hessians] for name in ("hessian", "hessian_smallest"))
    opg = [torch.from_numpy(each["opg"]) for each in found]
    return [Spectrum("H", left, right), Spectrum("G", opg, floor)], L2, size


def _uncertainty(experiment: Experiment) -> Content:
    found = _tensors(experiment.predictions("test"))
    mean, label = found["mean"], found["label"]
    right = label == experiment.data["test"][1]
    stds = [(title, found[f"{name}_std"]) for name, title in _NAMES.items()]
    panels = [Panel(title, mean, std, label, right) for title, std in stds]
    return panels, _at_rank(experiment)


def _surfaces(experiment: Experiment) -> Content:
    found = _tensors(experiment.surfaces())
    parts = (found[name] for name in ("ranks", "grid", "std", "error"))
    return *parts, f"{experiment.recipe.title} test set, OPG"


def _foreign(experiment: Experiment) -> Content:
    found = _tensors(experiment.foreign())
    names = ("ranks", "full", "full_low", "full_high", "low_rank", "references")
    curves = {name: found[name] for name in names}
    return Foreign(_drawable(found["image"]), **curves), f"{experiment.recipe.title}, OPG"


def _rankings(experiment: Experiment) -> Content:
    names, blocks = experiment.recipe.class_names, []
    for end in ("lowest", "highest"):
        for part, title in (("train", "training"), ("test", "test")):
            images, labels = experiment.data[part]
            score = torch.from_numpy(experiment.predictions(part)["hessian_score"])
            order = score.sort(descending=end == "highest", stable=True).indices
            count = min(_SHOWN, int(labels.bincount(minlength=len(names)).min()))
            if count == 0:
                return None  # a small run may have no image of some class
            indices = [order[labels[order] == each][:count] for each in range(len(names))]
            chosen = _drawable(images[torch.stack(indices)])  # (C, k, …)
            blocks.append(Block(f"{end.capitalize()} {count}, {title} set", chosen, names))
    return blocks, f"{experiment.recipe.title} by the score of the Hessian estimator"


def _estimators(experiment: Experiment) -> Content:
    found = experiment.predictions("test")
    panels = []
    for x, y in PAIRS:
        one, other = _NAMES[x], _NAMES[y]
        stds = found[f"{x}_std"], found[f"{y}_std"]
        panels.append(_comparison(f"{one} → {other}", *stds, f"std, {one}", f"std, {other}"))
    return panels, _at_rank(experiment)


def _ensembles(experiment: Experiment) -> Content:
    own, size, panels = experiment.predictions("test"), experiment.size, []
    for initial in INITIAL_WEIGHTS if size.bootstrap else ():
        title = f"{size.bootstrap} bootstraps, {initial} start"
        stds = own["sandwich_std"], experiment.bootstrap(size.bootstrap, initial)["std"]
        panels.append(_comparison(title, *stds, "std, Delta (Sandwich)", "std, bootstrap"))
    for name, (words, *_) in SAMPLERS.items() if size.samples else ():
        stds = own["opg_std"], experiment.samples(size.samples, "opg", name)["std"]
        title = f"{size.samples} samples, {words}"
        panels.append(_comparison(title, *stds, "std, Delta (OPG)", "std, sampler"))
    return (panels, f"{experiment.recipe.title} test set") if panels else None


_FIGURES: dict[str, tuple[Callable[..., Any], Callable[[Experiment], Content]]] = {
    "spectra": (save_spectra, _spectra),
    "uncertainty": (save_uncertainty, _uncertainty),
    "surfaces": (save_surfaces, _surfaces),
    "foreign": (save_foreign, _foreign),
    "rankings": (save_rankings, _rankings),
    "estimators": (save_comparisons, _estimators),
    "ensembles": (save_comparisons, _ensembles),
}


def _comparison(title: str, x: np.ndarray, y: np.ndarray, x_label: str, y_label: str) -> Comparison:
    one, other = torch.from_numpy(x).flatten(), torch.from_numpy(y).flatten()
    line = regression(one, other)
    return Comparison(title, one, other, line.slope, line.intercept, line.r2, x_label, y_label)


def _drawable(images: Tensor) -> Tensor:
    """Drop the dimension of a single channel."""
    return images.squeeze(-3) if images.shape[-3] == 1 else images


def _at_rank(experiment: Experiment) -> str:
    return f"{experiment.recipe.title} test set, K = {experiment.size.rank:,}"


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}
