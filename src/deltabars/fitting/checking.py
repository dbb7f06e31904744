"""Are the bars true? Retrain on bootstrap samples, and compare the scatter with the bars."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, DataError, StorageError
from deltabars.fitting.replicas import (
    bars_of,
    replica_means,
    resample,
    scatter_of,
    slope_of,
    state_dict_of,
)
from deltabars.fitting.state import FittedState, check_spread, check_whole
from deltabars.prediction.display import axes_or_new
from deltabars.prediction.metrics import regression
from deltabars.problem.data import Batch, fingerprint_of
from deltabars.runtime.progress import Progress
from deltabars.storage.writing import write_text

_ABOUT = "check.json"


@dataclass(frozen=True)
class Agreement:
    """How far bars are the scatter: slope 1 is right, 0.5 means bars that are twice too wide."""

    slope: float  # of the scatter on the bars, through the origin
    r_squared: float
    spearman: float  # of their ranks


@dataclass(frozen=True, eq=False)
class Check:
    """Bars beside the scatter of retrained networks, over n inputs and C outputs."""

    std: Tensor  # the bars, (n, C)
    scatter: Tensor  # the standard deviation over the replicas, (n, C)
    spread: str
    replicas: int
    agreement: Agreement

    def __repr__(self) -> str:
        found = self.agreement
        wide = "as wide as the scatter"
        if not 0.8 <= found.slope <= 1.25:
            ratio = 1 / found.slope if found.slope < 1 else found.slope
            wide = f"{ratio:.1f} times too {'wide' if found.slope < 1 else 'narrow'}"
        return (
            f"Check of {self.spread} bars against {self.replicas} retrained networks, "
            f"{len(self.std):,} inputs\n"
            f"  slope {found.slope:.2f}, R² {found.r_squared:.2f}, Spearman {found.spearman:.2f}: "
            f"the bars are {wide}"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the scatter against the bars into `ax`, or a new figure; return the Axes."""
        axes = axes_or_new(ax)
        x, y = self.std.flatten().numpy(), self.scatter.flatten().numpy()
        end = float(max(x.max(), y.max())) * 1.03
        axes.plot(x, y, ".", markersize=3, alpha=0.4)
        axes.plot([0, end], [0, end], color="gray", linewidth=1, linestyle=":", label="equal")
        slope = self.agreement.slope
        axes.plot([0, end], [0, slope * end], linewidth=1.2, label=f"slope {slope:.2f}")
        axes.set(
            xlim=(0, end), ylim=(0, end), xlabel=f"error bar ({self.spread})",
            ylabel=f"std over {self.replicas} retrained networks",
        )  # fmt: skip
        axes.set_aspect("equal")
        axes.legend(loc="upper left")
        return axes


def agreement(std: Tensor, scatter: Tensor) -> Agreement:
    """Compare bars with a scatter, over all their elements."""
    x, y = std.double().flatten(), scatter.double().flatten()
    ranks = (_ranks(x), _ranks(y))
    r2 = regression(*ranks).r2
    sign = 1.0 if float((ranks[0] - ranks[0].mean()) @ (ranks[1] - ranks[1].mean())) >= 0 else -1.0
    return Agreement(slope_of(x, y), regression(x, y).r2, sign * r2**0.5)


def compare_with_replicas(
    fit: FittedState,
    replicas: Sequence[Any],
    inputs: Any,
    *,
    spread: str = "sampling",
    progress: bool = False,
) -> Check:
    """Compare the bars of a fit with the scatter of networks that are retrained already.

    Args:
        fit: whose bars to check.
        replicas: two or more, trained on bootstrap samples: modules, state dicts or files.
        inputs: to predict.
        spread: `"sampling"` or `"posterior"`.
        progress: whether to show it.
    """
    check_spread(spread)
    scatter = scatter_of(replica_means(fit, replicas, inputs, progress))
    return _check_of(bars_of(fit, spread, inputs)[0], scatter, spread, len(replicas))


def bootstrap_check(
    fit: FittedState,
    train_function: Callable[[Any], Any],
    data: Any,
    inputs: Any,
    *,
    replicas: int = 16,
    spread: str = "sampling",
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Check:
    """Retrain on bootstrap samples, and compare the scatter of predictions with the bars.

    Args:
        fit: whose bars to check.
        train_function: trains a network on the data it is given, as the network of the fit was
            trained, from the same initial weights; returns a module or a state dict.
        data: the training data: a Dataset or tensors (inputs, targets); `deltabars.resample` makes
            each sample, which is what the function is called with.
        inputs: to predict with every network; held-out ones.
        replicas: how many times to train; two at least. The standard deviation over B of them is
            known to about 1/√(2B) of itself.
        spread: `"sampling"` or `"posterior"`.
        seed: of the samples.
        folder: where to keep the weights of each replica. A check that was stopped is resumed by
            the same call; after a change of the training give another folder.
        progress: whether to show it.

    Example:
        >>> import deltabars
        >>> from deltabars.recipes.digits import L2, digits_network, trained_digits
        >>> from deltabars.recipes.digits import train_to_convergence
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, progress=False)
        >>> def retrain(sample):
        ...     network = digits_network()
        ...     train_to_convergence(network, *sample, L2, steps=20)
        ...     return network
        >>> check = deltabars.checking.bootstrap_check(
        ...     fit, retrain, train, digits.test_images[:50], replicas=2, progress=False
        ... )
        >>> check.std.shape == check.scatter.shape
        True
    """
    check_whole("replicas", replicas, 2)
    check_whole("seed", seed, 0)
    check_spread(spread)
    if not callable(train_function):
        raise BadValueError(
            f"train_function: expected a function that trains, got {train_function!r:.100}."
        )
    resample(data, seed)  # refuses data of other kinds
    std = bars_of(fit, spread, inputs)[0]  # and inputs, before anything is trained
    kept = None if folder is None else Path(folder)
    if kept is not None:
        _claim(kept, {"weights": fit.weights, "seed": seed, "data": _fingerprint(data)})
    found: list[Tensor] = []
    with Progress("Retraining", replicas, "replica", progress) as bar:
        for number in range(replicas):
            path = None if kept is None else kept / f"replica-{number:02d}.pt"
            if path is not None and path.is_file():
                found.append(replica_means(fit, [path], inputs)[0])
            else:
                given = train_function(resample(data, seed + number))
                trained = state_dict_of(given, fit.network.model, "train_function")
                found.append(replica_means(fit, [trained], inputs)[0])  # before they are kept
                if path is not None:
                    unfinished = path.with_suffix(".part")
                    torch.save(trained, unfinished)
                    os.replace(unfinished, path)
            bar.show(number + 1)
    return _check_of(std, scatter_of(torch.stack(found)), spread, replicas)


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Note what a folder's replicas are of, or refuse a folder that is of something else."""
    path = folder / _ABOUT
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"folder: expected a folder, got {folder}, which is a file.")
    if path.is_file():
        try:
            known = json.loads(path.read_text())
        except ValueError as error:
            raise StorageError(f"folder: {path} is altered. Give another folder.") from error
        if known != about:
            raise StorageError(
                "folder: expected replicas of this network, data and seed, got those of another in "
                f"{folder}. Give another folder, or remove it."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise StorageError(
            f"folder: expected a new or empty folder, got {folder} with files in it."
        )
    write_text(path, json.dumps(about))


def _fingerprint(data: Any) -> int:
    """Return what identifies data: all of tensors, the length of a dataset, which may augment."""
    if isinstance(data, tuple | list):
        return fingerprint_of([Batch(tuple(data), None)])
    return len(data)


def _check_of(std: Tensor, scatter: Tensor, spread: str, replicas: int) -> Check:
    if not bool(scatter.any()) or not bool(std.any()):
        same = "replicas whose predictions differ" if bool(std.any()) else "bars above zero"
        raise DataError(f"check: expected {same}, got none that do. Train each on its own sample.")
    return Check(std, scatter, spread, replicas, agreement(std, scatter))


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks of numbers, ties sharing theirs."""
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() + 1) / 2)[places]


def as_dict(check: Check) -> dict[str, Any]:
    """Return the numbers of a check, for JSON."""
    return {**asdict(check.agreement), "spread": check.spread, "replicas": check.replicas}
