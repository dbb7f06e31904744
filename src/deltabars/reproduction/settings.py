"""How much of the paper is computed: all of it on a GPU, or a taste of it on two cores."""

from __future__ import annotations

from dataclasses import dataclass

from deltabars.recipes.paper import Recipe

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
