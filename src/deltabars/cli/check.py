"""`deltabars check`: the error bars of a RUN beside the scatter of retrained networks."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from deltabars.cli.runs import Run
from deltabars.cli.sources.models import NamedModel, find_object, user_code
from deltabars.cli.sources.source import Source
from deltabars.cli.subject import PICTURES, check_file, load_fit, named_data, open_run, sayer
from deltabars.errors import BadValueError, DataError, ModelError, StorageError, UsageError
from deltabars.fitting.checking import as_dict, bootstrap_check, compare_with_replicas
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.replicas import state_dict_of
from deltabars.storage.writing import check_parent, write_whole

_COUNT, _SEED, _FOLDER = 16, 0, "check"


def run(options: argparse.Namespace) -> None:
    """Compare, and write the picture and the calibrated RUN where they were asked for."""
    _check_options(options)
    kept = open_run(options)
    fit, say = load_fit(kept, options), sayer(options.quiet)
    if options.spread == "sampling" or options.calibrate is not None:
        fit.meat_of(fit.matrices_of(fit.estimator, "sampling")[0])  # or refuse, before any training
    source = kept.load_data(named_data(options, kept.data))
    source.check_ordered()
    shown: dict[str, Any] = {"spread": options.spread, "progress": not options.quiet}
    replicas: Sequence[Any] = _Files(kept.model, options.replicas or ())
    if options.train is None:
        found = compare_with_replicas(fit, replicas, source.data, **shown)
    else:
        count, folder = options.count or _COUNT, options.folder or kept.path / _FOLDER
        replicas = [folder / f"replica-{number:02d}.pt" for number in range(count)]
        there = sum(path.is_file() for path in replicas)
        say(f"{count} networks in {folder}" + (f", {there} of them from before" if there else ""))
        train = _trainer(options.train, fit)
        data = _training_data(kept, fit)
        found = bootstrap_check(
            fit, train, data, source.data, replicas=count, seed=options.seed or _SEED,
            folder=folder, **shown,
        )  # fmt: skip
    result: dict[str, Any] = {**as_dict(found), "inputs": len(found.std)}
    lines = [str(found), f"  the scatter itself is known to about {_noise(len(replicas)):.0%}"]
    if options.out is not None:
        from deltabars.report.uncertainty import save_checks

        write_whole(options.out, lambda draft: save_checks(draft, [found]))
        result["out"] = str(options.out)
        lines.append(f"The picture: {options.out}")
    if options.calibrate is not None:
        fit = fit.calibrate(replicas, source.data)
        _write(kept, fit, options.calibrate)
        result["calibrated"] = str(options.calibrate)
        result["calibration"] = {name: asdict(each) for name, each in fit.calibration.items()}
        lines.append(f"RUN: {options.calibrate}, whose bars have the level of these networks")
        for name, each in fit.calibration.items():
            lines.append(f"  {name:10} bars times {each.factor:.2f} ± {each.standard_error:.2f}")
    print(json.dumps(result) if options.json else "\n".join(lines))


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, and files that cannot be written."""
    if (options.train is None) == (options.replicas is None):
        got = "neither" if options.train is None else "both"
        raise UsageError(f"--train, --replicas: expected one of the two, got {got}")
    for name in ("count", "seed", "folder"):
        if options.train is None and getattr(options, name) is not None:
            raise UsageError(f"--{name}: expected --train with it, got --replicas")
    if options.count is not None and options.count < 2:
        raise BadValueError(f"--count: expected a whole number from 2 on, got {options.count}.")
    if options.seed is not None and options.seed < 0:
        raise BadValueError(f"--seed: expected a whole number from 0 on, got {options.seed}.")
    if options.replicas is not None and len(options.replicas) < 2:
        raise BadValueError("--replicas: expected two files or more, got one.")
    check_file(options.out, PICTURES)
    if options.folder is not None:
        check_parent(options.folder.absolute(), "--folder")
    if options.calibrate is not None:
        if options.calibrate.exists():
            said = f"--calibrate: expected a folder that does not exist, got {options.calibrate}."
            raise StorageError(f"{said} Give another.")
        check_parent(options.calibrate.absolute(), "--calibrate")


def _noise(count: int) -> float:
    """Return the relative standard error of a standard deviation over so many networks."""
    return 1 / math.sqrt(2 * (count - 1))


@dataclass(frozen=True)
class _Files(Sequence[nn.Module]):
    """The model with the weights of each file, one in memory at a time."""

    model: NamedModel
    files: Sequence[str]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        try:
            return replace(self.model, weights=self.files[index]).load()
        except ModelError as error:
            raise ModelError(str(error).replace("--weights:", "--replicas:", 1)) from error


def _trainer(spec: str, fit: DeltaFit) -> Callable[[Any], Mapping[str, Tensor]]:
    """Return what calls the user's function, and gives the weights of the network it trains."""
    function = find_object(spec, "--train")
    if not callable(function):
        raise BadValueError(f"--train: expected a function, got {spec}, which is none.")

    def train(sample: Any) -> Mapping[str, Tensor]:
        given = TensorDataset(*sample) if isinstance(sample, tuple) else sample
        with torch.random.fork_rng(), user_code(spec, "--train"):
            torch.manual_seed(0)  # the same initial weights each time, also where it is resumed
            made = function(given)
        return state_dict_of(made, fit.network.model, f"--train: {spec}")

    return train


def _training_data(kept: Run, fit: DeltaFit) -> Any:
    """Return the training data of a RUN by their indices: tensors, or a Dataset."""
    source: Source = kept.load_data()
    if fit.likelihood.name == "gaussian":
        source = source.with_real_targets()
    data = source.data.dataset if isinstance(source.data, DataLoader) else source.data
    if isinstance(data, Dataset | tuple):
        return data
    if not hasattr(data, "__len__"):
        raise DataError(f"--train: expected training data with a length, got {kept.data.spec}.")
    return Subset(data, range(len(data)))


def _write(kept: Run, fit: DeltaFit, folder: Path) -> None:
    about = kept.about
    Run.create(
        folder, fit, kept.model, kept.data, kept.classes, loss=about.get("loss"),
        columns=about.get("columns"),
    )  # fmt: skip
