"""The main experiment: one trained network, its eigenpairs, and error bars for all images."""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.fitting.fit import fit
from deltabars.fitting.fitted import DeltaFit, load
from deltabars.problem.network import fingerprint
from deltabars.recipes.paper import (
    L2,
    PaperNetwork,
    Recipe,
    blank_network,
    paper_network,
    with_weights,
)
from deltabars.recipes.reproduction.settings import FURTHER, Size
from deltabars.recipes.reproduction.stages import Arrays, Stages
from deltabars.recipes.training import Stack, train
from deltabars.runtime import VERSION
from deltabars.storage.writing import write_whole

ESTIMATORS = ("hessian", "opg", "sandwich")
PARTS = ("train", "test")


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes:
        data: the folder of the downloaded files.
        out: the folder of the results.
        seed: of initial weights, start vectors, bootstraps and samples.
        weights: of a network that is trained already, or None.
        device: where to compute.
        deterministic: whether the same seed is to give the same bits.
        fresh: whether stages that are there are thrown away.
        progress: whether to show it.
    """

    data: Path
    out: Path
    seed: int
    weights: PaperNetwork | None
    device: torch.device
    deterministic: bool
    fresh: bool
    progress: bool


class Experiment:
    """One network of a recipe: each property is a stage, computed when it is first asked for."""

    def __init__(
        self, recipe: Recipe, size: Size, options: Options, say: Callable[[str], None]
    ) -> None:
        self.recipe, self.size, self.options = recipe, size, options
        read = recipe.read
        self.train = read(options.data, "train", size.train_images)
        self.test = read(options.data, "test", size.test_images)
        for images, _ in (self.train, self.test):
            expected = (recipe.channels, recipe.side, recipe.side)
            if tuple(images.shape[1:]) != expected:
                raise BadValueError(
                    f"--data: expected images of {expected}, got {tuple(images.shape[1:])}."
                )
        self.stages = Stages.open(options.out / "stages", self._identity, say, options.fresh)

    @property
    def _identity(self) -> dict[str, Any]:
        """What every stage depends on."""
        size = asdict(self.size)
        size["size"] = size.pop("name")
        for free in FURTHER:
            del size[free]  # their stages have them in their names
        weights = self.options.weights
        return {
            "recipe": self.recipe.name,
            **size,
            "seed": self.options.seed,
            "weights": "trained here" if weights is None else fingerprint(weights),
            "deterministic": self.options.deterministic,
            "data": f"{_checksum(*self.train, *self.test):08x}",
        }

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.options.device

    @property
    def memory_budget(self) -> int | None:
        """Half of the GPU's memory: the sizes of chunks, and with them the last bits of sums, are
        then those of every run, whatever else is on the GPU.
        """
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory) // 2

    def initial(self, seed: int) -> PaperNetwork:
        """A network before training."""
        network = paper_network(seed, self.recipe)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(self.size.sigma)
        return network

    def trained(self, start: list[PaperNetwork], rows: Tensor | None = None) -> Stack:
        """Networks trained from where they stand, each on its rows of the data."""
        stack = Stack.of(self.recipe, start)
        return train(
            Stack(self.recipe, stack.weights.to(self.device)),
            *self.train,
            steps=self.size.steps,
            schedule=self.size.schedule,
            rows=rows,
            progress=self.options.progress,
        )

    def fit_of(self, network: PaperNetwork, estimator: str, rank: int) -> DeltaFit:
        """The eigenpairs of a trained network."""
        return fit(
            network.to(self.device),
            self.train,
            l2=L2,
            estimator=estimator,
            rank=rank,
            seed=self.options.seed,
            memory_budget=self.memory_budget,
            progress=self.options.progress,
        )

    @cached_property
    def weights(self) -> Arrays:
        """The trained weights by name; `seconds` of the training beside them."""

        def compute() -> Arrays:
            network = self.options.weights
            if network is None:
                network = self.trained([self.initial(self.options.seed)]).network(0)
            return {name: value.cpu().numpy() for name, value in network.state_dict().items()}

        return self.stages.arrays("weights", compute)

    @cached_property
    def network(self) -> PaperNetwork:
        """The trained network on the device."""
        names = blank_network(self.recipe).state_dict()
        arrays = {name: self.weights[name] for name in names}
        return with_weights(self.recipe, arrays).to(self.device)

    @cached_property
    def fit(self) -> DeltaFit:
        """The sandwich fit, which serves all three estimators."""
        path = self.stages.folder / "fit.deltabars"
        if path.is_file():
            self.stages.say("fit: kept from before")
            budget, progress = self.memory_budget, self.options.progress
            return load(path, self.network, memory_budget=budget, progress=progress)
        self.stages.say("fit: computing")
        found = self.fit_of(self.network, "sandwich", self.size.rank)
        write_whole(path, found.save)
        return found

    @cached_property
    def spectra(self) -> Arrays:
        """The eigenvalues, and what the fit tells of itself."""

        def compute() -> Arrays:
            found = self.fit
            hessian, opg = found.spectra["hessian"], found.spectra["opg"]
            arrays = {
                "hessian": hessian.values,
                "opg": opg.values,
                "hessian_smallest": hessian.smallest,
                "hessian_residuals": hessian.residuals,
                "opg_residuals": opg.residuals,
            }
            told = json.dumps({**found.diagnostics, **versions(self.device)})
            return {name: value.cpu().numpy() for name, value in arrays.items()} | {
                "diagnostics": np.array(told)
            }

        return self.stages.arrays("spectra", compute)

    @cached_property
    def diagnostics(self) -> dict[str, Any]:
        """What the fit tells of itself."""
        told: dict[str, Any] = json.loads(str(self.spectra["diagnostics"]))
        return told

    def predictions(self, part: str) -> Arrays:
        """Probabilities, stds, scores and their errors of `"train"` or `"test"`, by estimator."""
        return self._train_predictions if part == "train" else self._test_predictions

    def labels(self, part: str) -> np.ndarray:
        """The true classes of a part."""
        return (self.train if part == "train" else self.test)[1].numpy()

    @cached_property
    def _train_predictions(self) -> Arrays:
        return self.stages.arrays("predictions-train", lambda: self._predict(self.train[0]))

    @cached_property
    def _test_predictions(self) -> Arrays:
        return self.stages.arrays("predictions-test", lambda: self._predict(self.test[0]))

    def _predict(self, images: Tensor) -> Arrays:
        there = images.to(self.device)
        found = self.fit.predict(there, estimator=list(ESTIMATORS), moderation=None)
        arrays = {"mean": found["opg"].mean, "label": found["opg"].label}
        for name, prediction in found.items():
            arrays[f"{name}_std"] = prediction.std
            arrays[f"{name}_score"] = prediction.score
            arrays[f"{name}_score_error"] = prediction.score_error
        return {name: value.cpu().numpy() for name, value in arrays.items()}


def versions(device: torch.device) -> dict[str, str]:
    """What the numbers were made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "deltabars": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": name,
    }


def _checksum(*tensors: Tensor) -> int:
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().numpy().data.cast("B"), total)
    return total
