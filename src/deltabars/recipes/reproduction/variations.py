"""What changes as K grows: error bars of the test set, and the score of a foreign image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.fitting.fitted import DeltaFit
from deltabars.recipes.paper import Recipe, with_weights
from deltabars.recipes.reproduction.experiment import Experiment
from deltabars.recipes.reproduction.stages import Arrays
from deltabars.recipes.training import Stack
from deltabars.report.style import smooth

_GRID = torch.linspace(0, 1, 51, dtype=torch.float64)
_BANDWIDTH = 0.03
_REFERENCES = 10


def surfaces(experiment: Experiment) -> Arrays:
    """The smoothed std and its error (the paper's bound) of the OPG estimator, over K and
    probability, for all classes of all test images.

    Returns:
        `ranks` (R,), `grid` (g,), `std` and `error` (R, g).
    """

    def compute() -> Arrays:
        fit, ranks = experiment.fit, experiment.size.ranks
        images = experiment.test[0].to(experiment.device)
        options: dict[str, Any] = {"estimator": "opg", "bound": "paper", "moderation": None}
        found = [fit.predict(images, rank=rank, **options) for rank in ranks]
        probability = found[-1].mean.flatten().cpu()
        curves = {
            name: smooth(
                probability,
                torch.stack([getattr(each, field).flatten().cpu() for each in found]),
                _GRID,
                _BANDWIDTH,
            ).numpy()
            for name, field in (("std", "std"), ("error", "std_error"))
        }
        return {"ranks": np.array(ranks), "grid": _GRID.numpy(), **curves}

    return experiment.stages.arrays("surfaces", compute)


def foreign(experiment: Experiment) -> Arrays:
    """Scores of the OPG estimator over K: a foreign image at full and at low rank, and the training
    images of the highest scores.

    Returns:
        `image`; `ranks`, `full`, `full_low`, `full_high` and `low_rank` (R,); `references` (n, R)
        of the training images at `places` (n,).
    """

    def compute() -> Arrays:
        fit, ranks = experiment.fit, experiment.size.ranks
        image = chessboard(experiment.recipe)
        score = torch.from_numpy(experiment.predictions("train")["opg_score"])
        places = score.sort(descending=True, stable=True).indices[:_REFERENCES]
        images = torch.cat([image[None], experiment.train[0][places]]).to(experiment.device)
        options: dict[str, Any] = {"estimator": "opg", "moderation": None}
        full = [fit.predict(images, rank=rank, bound="paper", **options) for rank in ranks]
        low = [fit.predict(images, rank=rank, full_rank=False, **options) for rank in ranks]
        scores = torch.stack([each.score for each in full], dim=1).cpu().numpy()  # (1 + n, R)
        return {
            "image": image.numpy(),
            "ranks": np.array(ranks),
            "full": scores[0],
            "full_low": np.array([float(each.score_low[0]) for each in full]),
            "full_high": np.array([float(each.score_high[0]) for each in full]),
            "low_rank": np.array([float(each.score[0]) for each in low]),
            "references": scores[1:],
            "places": places.numpy(),
        }

    return experiment.stages.arrays("foreign", compute)


def chessboard(recipe: Recipe) -> Tensor:
    """Four by four squares, black and white: neither a digit nor anything of CIFAR-10."""
    square = torch.arange(recipe.side) // (recipe.side // 4)
    board = (square[:, None] + square[None, :]) % 2
    return board.float().expand(recipe.channels, -1, -1).clone()


INITIAL_WEIGHTS = ("fixed", "varying")
_AT_ONCE = 10  # sampled networks


@dataclass(frozen=True)
class Sampler:
    """A way to draw networks.

    Attributes:
        name: of it.
        title: what is said of it in a figure.
        full_rank: whether all weights scatter, or the K computed directions alone.
        scatter: how far draws are from the trained weights, 1 for N(ω̂, Σ). The std is divided by
            it: where it is small, a network is nearly linear in its weights, and the sampler must
            agree with the Delta method up to chance.
    """

    name: str
    title: str
    full_rank: bool
    scatter: float = 1.0


SAMPLERS = (
    Sampler("low_rank", "low rank", False),
    Sampler("full_rank", "full rank", True),
    Sampler("full_rank_tenth", "a tenth as far", True, 0.1),
)


def bootstrap(experiment: Experiment, initial: str) -> Arrays:
    """Networks trained on N examples drawn with replacement, from one or from several starts.

    Args:
        initial: `"fixed"`, all start from the weights that the main network started from;
            `"varying"`, each from its own.

    Returns:
        `std` and `mean` (n, C) over the networks, and the test `accuracy` of each.
    """
    count, seed = experiment.size.bootstrap, experiment.options.seed

    def compute() -> Arrays:
        varying = initial == "varying"
        start = [experiment.initial(seed + place * varying) for place in range(count)]
        examples = len(experiment.train[1])
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(examples, (count, examples), generator=generator)
        stack = experiment.trained(start, rows)
        found = stack.probabilities(experiment.test[0].to(experiment.device))
        return _summary([found], experiment)

    return experiment.stages.arrays(f"bootstrap-{count}-{initial}", compute)


def sampled(experiment: Experiment, estimator: str) -> dict[str, Arrays]:
    """Networks with weights from N(ω̂, Σ), Σ of the fitted eigenpairs, in each of SAMPLERS.

    Returns:
        By the sampler's name, `std` and `mean` (n, C) over the networks, and the test `accuracy` of
        each.
    """
    count = experiment.size.samples

    def compute(sampler: Sampler) -> Arrays:
        stacks = _drawn(experiment, experiment.fit.moved(estimator=estimator), sampler)
        images = experiment.test[0].to(experiment.device)
        arrays = _summary([stack.probabilities(images) for stack in stacks], experiment)
        return arrays | {"std": arrays["std"] / sampler.scatter}

    return {
        sampler.name: experiment.stages.arrays(
            f"samples-{count}-{estimator}-{sampler.name}", partial(compute, sampler)
        )
        for sampler in SAMPLERS
    }


def _drawn(experiment: Experiment, fit: DeltaFit, sampler: Sampler) -> Iterator[Stack]:
    space, centre = fit.network.parameters, fit.network.point
    seed = experiment.options.seed
    draws = fit.sample(experiment.size.samples, seed, full_rank=sampler.full_rank)
    for part in (centre + sampler.scatter * (draws - centre)).split(_AT_ONCE):
        networks = [
            with_weights(
                experiment.recipe,
                {name: value.cpu().numpy() for name, value in space.unflatten(row).items()},
            )
            for row in part
        ]
        stack = Stack.of(experiment.recipe, networks)
        yield Stack(experiment.recipe, stack.weights.to(experiment.device))


def _summary(probabilities: list[Tensor], experiment: Experiment) -> Arrays:
    """Of the probabilities (M, n, C) of several stacks."""
    found = torch.cat(probabilities).double()
    right = found.argmax(-1).cpu() == experiment.test[1]
    return {
        "std": found.std(0).float().cpu().numpy(),
        "mean": found.mean(0).float().cpu().numpy(),
        "accuracy": right.double().mean(1).numpy(),
    }


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
