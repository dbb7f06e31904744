"""The stages of the paper's experiments: training, eigenpairs, error bars, and their checks.

`summary.py` turns them into numbers; `pictures.py` draws them, and has `reproduce`.
"""

from __future__ import annotations

import json
import platform
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property, wraps
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from deltabars.errors import BadValueError, EvidenceWarning
from deltabars.fitting.fit import fit
from deltabars.fitting.fitted import DeltaFit, load
from deltabars.problem.network import weights_fingerprint
from deltabars.recipes import summary
from deltabars.recipes.paper import (
    BATCH,
    L2,
    PaperNetwork,
    Recipe,
    Size,
    paper_network,
    with_weights,
)
from deltabars.recipes.stages import SECONDS, Arrays, Stages
from deltabars.recipes.summary import ESTIMATORS, MATRICES
from deltabars.recipes.training import probabilities, train
from deltabars.report.style import smooth
from deltabars.runtime import VERSION
from deltabars.storage.writing import write_whole

PARTS = ("train", "test")
_VERSIONS = ("deltabars", "torch", "python", "device")
INITIAL_WEIGHTS = ("fixed", "varying")
# Sizes of parts beside the main experiment: they may grow from run to run, and name their stages.
_FURTHER = ("initialisations", "hessians", "hessian_rank", "bootstrap", "samples")
_GRID = torch.linspace(0, 1, 51, dtype=torch.float64)
_BANDWIDTH = 0.03
_REFERENCES = 10  # training images of the highest scores
# Ways to draw networks from N(ω̂, Σ): a title; whether all weights scatter or only the K computed
# directions; and the factor on the distance from ω̂, by which the std is divided. Near ω̂ a network
# is nearly linear in its weights, and samples must agree with the Delta method up to chance.
SAMPLERS = {
    "low_rank": ("low rank", False, 1.0),
    "full_rank": ("full rank", True, 1.0),
    "full_rank_tenth": ("a tenth as far", True, 0.1),
}


@dataclass(frozen=True)
class Options:
    """What the user chose."""

    data: Path  # the folder of the downloaded files
    out: Path  # the folder of the results
    seed: int  # of initial weights, start vectors, bootstraps and samples
    weights: PaperNetwork | None  # of a network that is trained already
    device: torch.device
    deterministic: bool  # whether the same seed is to give the same bits
    fresh: bool  # whether to remove the stages that are there
    progress: bool


def stage(compute: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Make a method a stage: computed once, and kept under its name and its arguments."""

    @wraps(compute)
    def kept(self: Experiment, *arguments: Any) -> Arrays:
        name = "-".join(map(str, (compute.__name__, *arguments)))
        return self.stages.arrays(name, lambda: compute(self, *arguments))

    return kept


class Experiment:
    """One network of a recipe, and the stages that are computed of it."""

    def __init__(
        self, recipe: Recipe, size: Size, options: Options, say: Callable[[str], None]
    ) -> None:
        self.recipe, self.size, self.options = recipe, size, options
        self.device, self.data, checksum = options.device, {}, 0
        for part, count in zip(PARTS, (size.train_images, size.test_images), strict=True):
            images, labels = self.data[part] = recipe.read(options.data, part, count)
            expected, got = (recipe.channels, recipe.side, recipe.side), tuple(images.shape[1:])
            if got != expected:
                raise BadValueError(f"--data: expected images of {expected}, got {got}.")
            for tensor in (images, labels):
                checksum = zlib.crc32(tensor.contiguous().numpy().data.cast("B"), checksum)
        own, weights = self._main_size(), options.weights
        kind = "trained here" if weights is None else weights_fingerprint(weights)
        identity = {
            "recipe": recipe.name, "size": own.pop("name"), **own, "seed": options.seed,
            "weights": kind, "deterministic": options.deterministic, "data": f"{checksum:08x}",
        }  # fmt: skip
        self.stages = Stages(options.out / "stages", identity, say, options.fresh)

    def _main_size(self) -> dict[str, Any]:
        size = asdict(self.size)
        return {name: value for name, value in size.items() if name not in _FURTHER}

    @property
    def memory_budget(self) -> int | None:
        """Half of the GPU's memory, whatever else is on it: sums then have the same last bits."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory) // 2

    def trained(self, seeds: Sequence[int], rows: Tensor | None = None) -> list[PaperNetwork]:
        """Train networks from the initial weights of seeds, each on its rows of the data."""
        size, start = self.size, [paper_network(seed, self.recipe) for seed in seeds]
        with torch.no_grad():
            for parameter in (each for network in start for each in network.parameters()):
                parameter.mul_(size.sigma)
        networks = [network.to(self.device) for network in start]
        how: dict[str, Any] = {"steps": size.steps, "schedule": size.schedule, "rows": rows}
        return train(networks, *self.data["train"], **how, progress=self.options.progress)

    def fit_of(self, network: PaperNetwork, estimator: str, rank: int) -> DeltaFit:
        """Fit a trained network."""
        options: dict[str, Any] = {"seed": self.options.seed, "memory_budget": self.memory_budget}
        options |= {"estimator": estimator, "rank": rank, "progress": self.options.progress}
        with warnings.catch_warnings():
            # The paper's λ is the paper's on purpose, whatever the evidence says.
            warnings.simplefilter("ignore", EvidenceWarning)
            return fit(network.to(self.device), self.data["train"], l2=L2, **options)

    @stage
    def weights(self) -> Arrays:
        """Return the weights of the main network by name."""
        network = self.options.weights or self.trained([self.options.seed])[0]
        return _arrays(network.state_dict())

    @cached_property
    def network(self) -> PaperNetwork:
        """The main network, trained, on the device."""
        arrays = {name: value for name, value in self.weights().items() if name != SECONDS}
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

    @stage
    def spectra(self) -> Arrays:
        """Return the eigenvalues of the main network, and the diagnostics of its fit as JSON."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        made_by = (VERSION, str(torch.__version__), platform.python_version(), device)
        notes = {**self.fit.diagnostics, **dict(zip(_VERSIONS, made_by, strict=True))}
        arrays = {"diagnostics": np.array(json.dumps(notes))}
        for name, pairs in self.fit.spectra.items():
            arrays |= _arrays({name: pairs.values, f"{name}_residuals": pairs.residuals})
        return arrays | _arrays({"hessian_smallest": self.fit.spectra["hessian"].smallest})

    @cached_property
    def diagnostics(self) -> dict[str, Any]:
        """The diagnostics of the main fit, and the versions that made it."""
        return dict(json.loads(str(self.spectra()["diagnostics"])))

    @stage
    def predictions(self, part: str) -> Arrays:
        """Return probabilities, stds, scores and their errors, by estimator."""
        images = self.data[part][0].to(self.device)
        found = self.fit.predict(images, estimator=list(ESTIMATORS), moderation=None)
        tensors = {"mean": found["opg"].mean, "label": found["opg"].label}
        for name, prediction in found.items():
            for field in ("std", "score", "score_error"):
                tensors[f"{name}_{field}"] = getattr(prediction, field)
        return _arrays(tensors)

    @stage
    def surfaces(self) -> Arrays:
        """Return OPG's smoothed `std` and `error` (R, g) over `ranks` (R,) and probabilities."""
        images, ranks = self.data["test"][0].to(self.device), self.size.ranks
        options: dict[str, Any] = {"estimator": "opg", "bound": "paper", "moderation": None}
        found = [self.fit.predict(images, rank=rank, **options) for rank in ranks]
        probability = found[-1].mean.flatten().cpu()
        arrays = {"ranks": np.array(ranks), "grid": _GRID.numpy()}
        for name, field in (("std", "std"), ("error", "std_error")):
            values = torch.stack([getattr(each, field).flatten().cpu() for each in found])
            arrays[name] = smooth(probability, values, _GRID, _BANDWIDTH).numpy()
        return arrays

    @stage
    def foreign(self) -> Arrays:
        """Return OPG's scores over K of a foreign image, beside the highest ones of training."""
        ranks, image = self.size.ranks, chessboard(self.recipe)
        score = torch.from_numpy(self.predictions("train")["opg_score"])
        highest = score.sort(descending=True, stable=True).indices[:_REFERENCES]
        images = torch.cat([image[None], self.data["train"][0][highest]]).to(self.device)
        options: dict[str, Any] = {"estimator": "opg", "moderation": None}
        full = [self.fit.predict(images, rank=rank, bound="paper", **options) for rank in ranks]
        low = [self.fit.predict(images, rank=rank, full_rank=False, **options) for rank in ranks]
        scores = torch.stack([each.score for each in full], dim=1)  # (1 + n, R)
        arrays = _arrays({"image": image, "full": scores[0], "references": scores[1:]})
        return arrays | {
            "ranks": np.array(ranks),
            "full_low": np.array([float(each.score_low[0]) for each in full]),
            "full_high": np.array([float(each.score_high[0]) for each in full]),
            "low_rank": np.array([float(each.score[0]) for each in low]),
        }

    @stage
    def bootstrap(self, count: int, initial: str) -> Arrays:
        """Train networks on N examples drawn with replacement, from fixed or varying weights."""
        seed, examples = self.options.seed, len(self.data["train"][1])
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(examples, (count, examples), generator=generator)
        seeds = [seed + index * (initial == "varying") for index in range(count)]
        return self._ensemble(self.trained(seeds, rows))

    @stage
    def samples(self, count: int, estimator: str, sampler: str) -> Arrays:
        """Draw networks with weights from N(ω̂, Σ), Σ of the fitted eigenpairs."""
        _, full_rank, scatter = SAMPLERS[sampler]
        fit, network = self.fit.moved(estimator=estimator), deepcopy(self.network)
        centre = fit.network.point
        draws = fit.sample(count, self.options.seed, full_rank=full_rank)

        def networks() -> Iterator[PaperNetwork]:
            for row in centre + scatter * (draws - centre):
                vector_to_parameters(row, network.parameters())
                yield network

        arrays = self._ensemble(networks())
        return arrays | {"std": arrays["std"] / scatter}

    def _ensemble(self, networks: Iterable[PaperNetwork]) -> Arrays:
        """Return mean and std (n, C) of the test probabilities, and each network's accuracy."""
        images, labels = self.data["test"]
        there = images.to(self.device)
        found = torch.stack([probabilities(network, there) for network in networks]).double()
        right = found.argmax(-1).cpu() == labels
        arrays = _arrays({"std": found.std(0).float(), "mean": found.mean(0).float()})
        return arrays | {"accuracy": right.double().mean(1).numpy()}

    @stage
    def networks(self, count: int) -> Arrays:
        """Train further networks at once, from the seeds after the main one's."""
        found = self.trained([self.options.seed + index for index in range(1, count)])
        states = [_arrays(network.state_dict()) for network in found]
        return {name: np.stack([state[name] for state in states]) for name in states[0]}

    @stage
    def spectrum(self, count: int, index: int, matrix: str, rank: int) -> Arrays:
        """Return the eigenvalues of one of the further networks, its cost and gradient norm."""
        stacked = self.networks(count)
        weights = {name: value[index - 1] for name, value in stacked.items() if name != SECONDS}
        fit = self.fit_of(with_weights(self.recipe, weights), matrix, rank)
        pairs = fit.spectra[matrix]
        tensors = {matrix: pairs.values, f"{matrix}_smallest": pairs.smallest}
        return _arrays(tensors) | _costs(fit.diagnostics)

    def initialisations(self) -> list[Arrays]:
        """Return the spectra of several networks, the main one first; not all have a `hessian`."""
        size, names = self.size, ("opg", "hessian", "hessian_smallest")
        found = [{name: self.spectra()[name] for name in names} | _costs(self.diagnostics)]
        for index in range(1, size.initialisations):
            arrays = self.spectrum(size.initialisations, index, "opg", size.rank)
            if index < size.hessians:
                rank = size.hessian_rank or size.rank
                arrays = arrays | self.spectrum(size.initialisations, index, "hessian", rank)
            found.append(arrays)
        return found

    def main_results(self) -> dict[str, Any]:
        """Return what the paper prints, and how it was computed."""
        diagnostics, size = self.diagnostics, self._main_size()
        given = self.options.weights is not None
        training, regressions, scores = {}, {}, {}
        times = {} if given else {"training": float(self.weights()[SECONDS])}
        times |= {matrix: diagnostics[matrix]["seconds"] for matrix in MATRICES}
        for part, (_, labels) in self.data.items():
            found = self.predictions(part)
            regressions[part], scores[part] = summary.of_predictions(found, labels.numpy())
            training[f"{part}_accuracy"] = float((found["label"] == labels.numpy()).mean())
            times[f"predicting_{part}"] = float(found[SECONDS])
        training |= {name: diagnostics[name] for name in ("cost", "gradient_norm")}
        for name in ("sigma", "schedule", "steps") if given else ():
            del size[name]  # given weights were trained elsewhere
        return {
            "recipe": self.recipe.name,
            "size": size.pop("name"),
            "seed": self.options.seed,
            "weights": "given" if given else "trained",
            "deterministic": self.options.deterministic,
            "versions": {name: diagnostics[name] for name in _VERSIONS},
            "settings": {
                **size,
                "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
                "parameters_reached": diagnostics["parameters_reached"],
                "l2": L2,
                **({} if given else {"batch": BATCH}),
            },
            "training": training,
            **summary.of_spectra(self.spectra(), diagnostics),
            "regressions": regressions,
            "scores": scores,
            "times": times,
        }

    def further_results(self) -> dict[str, Any]:
        """Return the results of the foreign image, of other initial weights, and of ensembles."""
        self.surfaces()
        results: dict[str, Any] = {
            "foreign": summary.of_foreign(self.foreign()),
            "initialisations": summary.of_initialisations(self.initialisations()),
        }
        size, predictions = self.size, self.predictions("test")
        own = {name: predictions[f"{name}_std"] for name in ESTIMATORS}
        if size.bootstrap:
            results["bootstrap"] = {}
            for initial in INITIAL_WEIGHTS:
                found = self.bootstrap(size.bootstrap, initial)
                lines = {name: summary.line(std, found["std"]) for name, std in own.items()}
                results["bootstrap"][initial] = {"against": lines, **summary.of_ensemble(found)}
        if size.samples:
            results["samples"] = {name: {} for name in ESTIMATORS}
            for name, sampler in product(ESTIMATORS, SAMPLERS):
                found = self.samples(size.samples, name, sampler)
                line = summary.line(own[name], found["std"])
                results["samples"][name][sampler] = {**line, **summary.of_ensemble(found)}
        return results


def chessboard(recipe: Recipe) -> Tensor:
    """Return four by four squares, black and white: neither a digit nor anything of CIFAR-10."""
    square = torch.arange(recipe.side) // (recipe.side // 4)
    board = (square[:, None] + square[None, :]) % 2
    return board.float().expand(recipe.channels, -1, -1).clone()


def _arrays(tensors: Mapping[str, Tensor | None]) -> Arrays:
    return {name: value.cpu().numpy() for name, value in tensors.items() if value is not None}


def _costs(diagnostics: Mapping[str, Any]) -> Arrays:
    return {name: np.array(diagnostics[name]) for name in ("cost", "gradient_norm")}
