"""How the spectra vary over networks that differ in their initial weights alone."""

from __future__ import annotations

import numpy as np
import torch

from deltabars.recipes.stack import Stack
from deltabars.reproduction.experiment import Experiment
from deltabars.reproduction.stages import Arrays


def initialisations(experiment: Experiment) -> list[Arrays]:
    """The spectra of several networks, the main one first: `opg`, and `hessian` with its
    `hessian_smallest` for the first few; with each its `cost` and `gradient_norm`.

    All but the main one are trained at once, as a stack; each spectrum is a stage.
    """
    count = experiment.size.initialisations
    seeds = [experiment.options.seed + place for place in range(1, count)]
    own, main = experiment.diagnostics, experiment.spectra
    first = {name: main[name] for name in ("opg", "hessian", "hessian_smallest")}
    first |= {name: np.array(own[name]) for name in ("cost", "gradient_norm")}
    if not seeds:
        return [first]

    def train_all() -> Arrays:
        start = [experiment.initial(seed) for seed in seeds]
        return {"weights": experiment.trained(start).weights.cpu().numpy()}

    stack = experiment.stages.arrays(f"initialisations-{count}", train_all)
    networks = Stack(experiment.recipe, torch.from_numpy(stack["weights"]))
    found = [first]
    size = experiment.size
    ranks = (("opg", size.rank), ("hessian", size.hessian_rank or size.rank))
    for place, seed in enumerate(seeds):
        for matrix, rank in ranks[: 1 + (place + 1 < experiment.size.hessians)]:

            def compute(place: int = place, matrix: str = matrix, rank: int = rank) -> Arrays:
                fit = experiment.fit_of(networks.network(place), matrix, rank)
                pairs = fit.spectra[matrix]
                arrays = {matrix: pairs.values.cpu().numpy()}
                if matrix == "hessian":
                    arrays["hessian_smallest"] = pairs.smallest.cpu().numpy()
                told = fit.diagnostics
                return arrays | {name: np.array(told[name]) for name in ("cost", "gradient_norm")}

            name = f"initialisations-{count}-seed-{seed}-{matrix}-{rank}"
            arrays = experiment.stages.arrays(name, compute)
            if matrix == "opg":
                found.append({})
            found[-1].update(arrays)
    return found
