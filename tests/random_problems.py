"""Random small networks in float64 with data of their own, for properties that hold of all."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

import deltabars
from deltabars.errors import OptimumWarning, SpectrumWarning
from tests.oracles import Oracle

BENDS = {"tanh": nn.Tanh, "softplus": nn.Softplus, "none": nn.Identity}
ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
THEOREM = ("opg", "ggn")  # no eigenvalue is below λ


@dataclass(frozen=True)
class Shape:
    """What a random problem is made from."""

    inputs: int
    hidden: int  # 0 for none
    outputs: int
    count: int
    bend: str
    decade: int  # λ is 10^decade, and more where the Hessian would not be positive definite
    seed: int

    @classmethod
    def drawn(cls, seed: int) -> Shape:
        """The shape of a seed."""
        draw = random.Random(seed)
        return cls(
            draw.randint(1, 4), draw.randint(0, 4), draw.randint(2, 4), draw.randint(1, 14),
            draw.choice(list(BENDS)), draw.randint(-4, 1), seed,
        )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A network that is not trained: what holds at an optimum holds at every point."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    unseen: Tensor
    l2: float

    @classmethod
    def of(cls, shape: Shape) -> Problem:
        generator = torch.Generator().manual_seed(shape.seed)
        new = {"generator": generator, "dtype": torch.float64}
        sizes = [shape.inputs, *([shape.hidden] if shape.hidden else []), shape.outputs]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layer = nn.Linear(before, after, dtype=torch.float64)
            for weight in layer.parameters():
                weight.data = torch.randn(weight.shape, **new)
            layers += [layer, BENDS[shape.bend]()]
        model = nn.Sequential(*layers[:-1])
        inputs, unseen = (torch.randn(n, shape.inputs, **new) for n in (shape.count, 3))
        targets = torch.randint(0, shape.outputs, (shape.count,), generator=generator)
        problem = cls(model, inputs, targets, unseen, 10.0**shape.decade)
        least = float(torch.linalg.eigvalsh(problem.oracle.hessian())[0]) - problem.l2
        return replace(problem, l2=problem.l2 + 1.5 * max(0.0, -least))

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.model, self.inputs, self.targets, self.l2)

    def fit(self, estimator: str, rank: int | None = None, **options) -> deltabars.DeltaFit:
        """Of all pairs by default; what was fitted once is kept."""
        rank = self.oracle.size if rank is None else min(rank, self.oracle.size)
        asked = estimator, rank, *sorted(options.items())
        known = self.__dict__.setdefault("known", {})
        options = {"l2": self.l2, "progress": False, "estimator": estimator, **options}
        with warnings.catch_warnings():  # nobody trained it, nor is the tail of H above λ
            warnings.simplefilter("ignore", OptimumWarning)
            warnings.filterwarnings("ignore", "Expected eigenvalues of the", SpectrumWarning)
            if asked not in known:
                data = self.inputs, self.targets
                known[asked] = deltabars.fit(self.model, data, rank=rank, **options)
        return known[asked]

    def predictions(self, rank: int | None = None, **options) -> dict[str, deltabars.Prediction]:
        """Those of all estimators, from two fits."""
        given = {"estimator": ["hessian", "opg", "sandwich"], "moderation": None}
        found = self.fit("sandwich", rank, **options).predict(self.unseen, **given)
        ggn = self.fit("ggn", rank, **options).predict(self.unseen, moderation=None)
        return {**found, "ggn": ggn}

    @property
    def last(self) -> nn.Linear:
        return self.model[-1]
