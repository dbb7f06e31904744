"""The numbers that the paper prints, and ours beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deltabars.recipes.paper import Recipe

PAIRS = (("hessian", "opg"), ("hessian", "sandwich"), ("opg", "sandwich"))

Line = tuple[float, float, float]  # R², intercept, slope


@dataclass(frozen=True)
class Published:
    """What the paper prints of one experiment.

    Attributes:
        training: train and test accuracy, cost and gradient norm at the end.
        regressions: by part of the data, the line of each of PAIRS (its Table 1).
    """

    training: Mapping[str, float]
    regressions: Mapping[str, tuple[Line, Line, Line]]


PUBLISHED = {
    "mnist": Published(
        training={
            "train_accuracy": 0.979,
            "test_accuracy": 0.981,
            "cost": 0.257,
            "gradient_norm": 0.016,
        },
        regressions={
            "train": ((0.997, 0.0, 1.206), (0.998, 0.0, 0.923), (0.990, 0.0, 0.761)),
            "test": ((0.998, 0.0, 1.219), (0.999, 0.0, 0.915), (0.995, 0.0, 0.748)),
        },
    ),
    "cifar10": Published(
        training={
            "train_accuracy": 0.701,
            "test_accuracy": 0.687,
            "cost": 1.284,
            "gradient_norm": 0.030,
        },
        regressions={
            "train": ((0.999, 0.0, 1.062), (0.999, 0.0, 1.017), (0.997, 0.0, 0.956)),
            "test": ((1.000, 0.0, 1.066), (1.000, 0.0, 1.014), (0.998, 0.0, 0.950)),
        },
    ),
}


def beside_published(name: str, results: Mapping[str, Any]) -> str:
    """A table of our numbers beside the paper's."""
    return "\n".join(
        [f"{'':<38}{'ours':>8}{'paper':>10}{'difference':>12}", *_rows(PUBLISHED[name], results)]
    )


def _rows(published: Published, results: Mapping[str, Any]) -> Iterator[str]:
    for key, value in published.training.items():
        yield _row(key.replace("_", " "), results["training"][key], value)
    for part, lines in published.regressions.items():
        for (x, y), line in zip(PAIRS, lines, strict=True):
            ours = results["regressions"][part][f"{x}_{y}"]
            for key, value in zip(("r2", "intercept", "slope"), line, strict=True):
                yield _row(f"{part}: {x} → {y}, {key}", ours[key], value)


def _row(title: str, ours: float | None, paper: float) -> str:
    if ours is None:
        return f"{title:<38}{'–':>8}{paper:>10.3f}{'–':>12}"
    ours, difference = round(ours, 4) + 0.0, round(ours - paper, 4) + 0.0  # not −0.0000
    return f"{title:<38}{ours:>8.4f}{paper:>10.3f} {difference:>+11.4f}"


_MANY = 150  # eigenpairs
# Sizes of parts beside the main experiment: they may grow from run to run.
FURTHER = ("initialisations", "hessians", "hessian_rank", "bootstrap", "samples")


@dataclass(frozen=True)
class Size:
    """What a reproduction computes.

    Attributes:
        name: `"paper"` or `"small"`.
        train_images, test_images: the first ones of the files.
        sigma: of the initial weights.
        schedule: the learning rate from a step on: (step, rate) pairs.
        steps: of training.
        rank: K.
        initialisations: networks in the spread of the spectra, the main one included.
        hessians: of how many of them the spectrum of H is computed as well.
        hessian_rank: how many eigenvalues of it, of all but the main network; `rank` if None.
        bootstrap: replicates with fixed and as many with varying initial weights.
        samples: networks drawn by the sampler.
    """

    name: str
    train_images: int
    test_images: int
    sigma: float
    schedule: tuple[tuple[int, float], ...]
    steps: int
    rank: int
    initialisations: int
    hessians: int
    hessian_rank: int | None
    bootstrap: int
    samples: int

    @property
    def ranks(self) -> list[int]:
        """The K at which figures over K are computed: fifteen steps and two small ones; for few
        eigenpairs, five steps.
        """
        count = 15 if self.rank >= _MANY else 5
        steps = {-(-self.rank * step // count) for step in range(1, count + 1)} | {25, 50}
        return sorted(rank for rank in steps if rank <= self.rank)


def paper_size(recipe: Recipe) -> Size:
    """All of it, but for the Hessians of four initialisations in place of sixteen.

    (The paper has sixteen initialisations of the MNIST network alone.)
    """
    several = recipe.name == "mnist"
    return Size(
        name="paper",
        train_images=recipe.train_images,
        test_images=recipe.test_images,
        sigma=1.0,
        schedule=recipe.schedule,
        steps=recipe.steps,
        rank=recipe.rank,
        initialisations=16 if several else 1,
        hessians=4 if several else 1,
        hessian_rank=None,
        bootstrap=16 if several else 0,
        samples=100,
    )


def small_size(recipe: Recipe) -> Size:
    """A taste: 600 images, twenty eigenpairs, a few networks.

    From initial weights of σ = 1 the cost is still in the hundreds after 1,500 steps; here they are
    smaller, and a few hundred steps do.
    """
    return Size(
        name="small",
        train_images=600,
        test_images=200,
        sigma=0.06,
        schedule=((0, 3e-3), (200, 3e-4), (270, 3e-5)),
        steps=300,
        rank=20,
        initialisations=2,
        hessians=2,
        hessian_rank=None,
        bootstrap=2,
        samples=20,
    )
