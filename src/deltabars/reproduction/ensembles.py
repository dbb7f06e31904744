"""Other ways to a standard deviation: many networks, trained on bootstraps or drawn from Σ.

Each gives a standard deviation of every test probability, which is held against that of the Delta
method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from deltabars.fitted import DeltaFit
from deltabars.recipes.paper import with_weights
from deltabars.recipes.stack import Stack
from deltabars.reproduction.experiment import Experiment
from deltabars.reproduction.stages import Arrays

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
        stacks = _drawn(experiment, replace(experiment.fit, estimator=estimator), sampler)
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
