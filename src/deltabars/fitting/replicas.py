"""Retrained networks: resampled data, the scatter of their predictions, and the bars' level.

A replica is the network trained again on a bootstrap sample of its data. The scatter of replicas is
what the sampling spread estimates. Each replica costs a training; two are enough for the level,
because the shape is known from the fit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from deltabars.covariance.estimators import SPREADS
from deltabars.covariance.sampling import SamplingCovariance
from deltabars.curvature.sensitivity import Sensitivity
from deltabars.errors import BadValueError, DataError, DataWarning, ModelError, first_line, warn
from deltabars.fitting.state import EXPLAINED, Calibration, FittedState, check_whole
from deltabars.prediction.metrics import regression
from deltabars.prediction.scoring import Scorer, read_inputs
from deltabars.problem.network import Network, model_errors
from deltabars.problem.parameters import plain_model
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress

State = TypeVar("State", bound=FittedState)

_AT_ONCE = 1024  # inputs


def resample(data: Any, seed: int) -> Any:
    """Draw a bootstrap sample of a dataset: as many examples, with replacement.

    Args:
        data: a Dataset, which gives a `torch.utils.data.Subset` of it; or tensors (inputs,
            targets), which give tensors.
        seed: of the draw; another seed gives another sample.

    Example:
        >>> import torch, deltabars
        >>> images, labels = deltabars.resample((torch.rand(6, 4), torch.arange(6)), seed=1)
        >>> labels.tolist()
        [1, 5, 0, 2, 1, 1]
    """
    check_whole("seed", seed, 0)
    some = data if isinstance(data, tuple | list) else ()
    tensors = len(some) > 0 and all(isinstance(each, Tensor) for each in some)
    known = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if not tensors and not (known and hasattr(data, "__len__")):
        advice = " Give its dataset." if isinstance(data, DataLoader) else ""
        raise DataError(
            "resample: expected a Dataset with a length, or a tuple of tensors, got "
            f"{type(data).__name__}.{advice}"
        )
    counts = {len(each) for each in data} if tensors else {len(data)}
    if len(counts) > 1:
        raise DataError(f"resample: expected tensors of one length, got {sorted(counts)}.")
    count = counts.pop()
    if count == 0:
        raise DataError("resample: expected at least one example, got none.")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, count, (count,), generator=generator)
    if tensors:
        return tuple(each[drawn.to(each.device)] for each in data)
    return Subset(data, drawn.tolist())


def replica_means(
    state: FittedState, replicas: Sequence[Any], inputs: Any, progress: bool = False
) -> Tensor:
    """Return the means (R, n, C) that R replicas predict, in float64, on the CPU.

    A replica is a module, a state dict, or a file of one (.safetensors; .pt of plain tensors).
    """
    if not isinstance(replicas, Sequence) or isinstance(replicas, str) or not replicas:
        got = repr(replicas) if isinstance(replicas, str | list) else type(replicas).__name__
        raise BadValueError(
            f"replicas: expected a list of modules, state dicts or files, got {got}."
        )
    network, found = state.network, []
    batches = [
        part for batch in read_inputs(inputs, state.signature, network)
        for part in batch.split(_AT_ONCE)
    ]  # fmt: skip
    if not batches:
        raise DataError("Inputs: expected at least one, got none.")
    with Progress("Replicas", len(replicas), "replica", progress) as bar:
        for number, given in enumerate(replicas):
            other = _network_of(state, given, number)
            with (
                other.evaluation(),
                model_errors(),
                full_precision(network.device),
                torch.no_grad(),
            ):
                parts = [
                    state.likelihood.mean(other.outputs(other.trained, batch.inputs).double())
                    for batch in batches
                ]
            found.append(torch.cat(parts).cpu())
            bar.show(number + 1)
    means = torch.stack(found)
    if not bool(means.isfinite().all()):
        raise ModelError(
            "replicas: expected finite predictions, got NaN or infinity. Look for such numbers in "
            "their weights and buffers."
        )
    return means


def _network_of(state: FittedState, given: Any, number: int) -> Network:
    own, what = state.network, f"replica {number}"
    if isinstance(given, str | PathLike):
        what, path = str(given), Path(given)
        try:
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                given = load_file(path)
            else:
                given = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ModelError(
                f"replicas: expected a file of weights, got {path} ({first_line(error)})."
            ) from error
    model = copy.deepcopy(own.model)
    model.load_state_dict(state_dict_of(given, model, f"replicas: {what}"))
    return Network.capture(model, own.parameters, own.device, own.dtype)


def state_dict_of(given: Any, model: nn.Module, what: str) -> dict[str, Tensor]:
    """Return the weights of a module or a state dict on the CPU; refuse those of another model."""
    if isinstance(given, nn.Module):
        given = plain_model(given).state_dict()
    if not isinstance(given, Mapping):
        raise BadValueError(
            f"{what}: expected a module, a state dict or a file of one, got a "
            f"{type(given).__name__}. Give, or return, the network."
        )
    own = model.state_dict()
    odd = [name for name in own if getattr(given.get(name), "shape", None) != own[name].shape]
    odd += [name for name in given if name not in own]
    if odd:
        raise ModelError(
            f"{what}: expected the weights of the fitted model, got others (the first difference: "
            f"{odd[0]!r}). Train networks of the same kind."
        )
    return {name: value.detach().cpu() for name, value in given.items()}


def scatter_of(means: Tensor) -> Tensor:
    """Return the standard deviation over replicas (R, …), unbiased for normal scatter."""
    count = len(means)
    if count < 2:
        raise BadValueError(f"replicas: expected at least two, got {count}.")
    return means.std(0) / small_sample(count)


def small_sample(count: int) -> float:
    """Return c₄, what the standard deviation of so many normal numbers is of σ on average."""
    ratio = math.lgamma(count / 2) - math.lgamma((count - 1) / 2)
    return math.sqrt(2 / (count - 1)) * math.exp(ratio)


def slope_of(std: Tensor, scatter: Tensor) -> float:
    """Return the slope through the origin of the scatter on the bars; NaN where these are zero."""
    x, y = std.double().flatten(), scatter.double().flatten()
    return float((x @ y) / (x @ x)) if bool(x.any()) else math.nan


def calibrate(state: State, replicas: Sequence[Any], inputs: Any, progress: bool) -> State:
    """Calibrate a fit; the arguments are those of `DeltaFit.calibrate`."""
    means = replica_means(state, replicas, inputs, progress)
    return calibrated_by(state, means, inputs)


def calibrated_by(state: State, means: Tensor, inputs: Any) -> State:
    """Calibrate a fit by what replicas predict for some inputs, means (R, n, C)."""
    plain, found, scatter = state.moved(calibration={}), {}, scatter_of(means)
    count = len(means)
    noise = 1 / small_sample(count) ** 2 - 1  # the variance of a standard deviation over σ²
    for spread in SPREADS:
        std, alike = bars_of(plain, spread, inputs)
        factor = slope_of(std, scatter)
        if not 0 < factor < math.inf:
            raise DataError(
                "calibrate: expected inputs whose predictions move, got none: bars or replicas do "
                "not scatter."
            )
        error, r2 = factor * math.sqrt(noise * alike), regression(std, scatter).r2
        if r2 < EXPLAINED and spread == SPREADS[-1]:
            warn(
                f"calibrate: expected replicas that scatter as the bars say, got R² {r2:.2f}. "
                "Train each as the network was, on a sample of its own; give a few hundred inputs.",
                DataWarning,
            )
        found[spread] = Calibration(factor, error, r2, count)
    return state.moved(calibration=found)


def bars_of(state: FittedState, spread: str, inputs: Any) -> tuple[Tensor, float]:
    """Return the bars (n, C), on the CPU, and how alike all deviations are: tr Φ²/(tr Φ)².

    Φ is the covariance of the deviations in the coordinates of the eigenvectors: 1 where one
    direction makes all of them move together, and 1/ν for ν directions alike.
    """
    estimator = state.estimator
    inner = state.covariance_of(estimator, state.rank, spread=spread)
    names = state.matrices_of(estimator, spread)
    if isinstance(inner, SamplingCovariance):
        values, turned = torch.linalg.eigh(inner.meat.within)
        root = turned * values.clamp(min=0).sqrt() / inner.values[:, None]
    else:
        used = state.pairs_of(names[0]).values.double()
        root = used[used > 0].rsqrt().diag()
    scorer = Scorer(
        state.pullback, state.likelihood, state.signature,
        {name: state.spectra[name].vectors for name in names}, {}, "probability", "rigorous",
        with_covariance=False, classes=None, moderation=None, memory_budget=state.memory_budget,
    )  # fmt: skip
    inside = torch.zeros(len(root), len(root), dtype=torch.float64, device=root.device)

    def look(outputs: Tensor, found: Sensitivity) -> Tensor:
        rows = found.slope[:, :, None] * found.projections[names[0]][..., : len(root)]
        flat = (rows @ root).flatten(0, 1)
        inside.addmm_(flat.T, flat)
        parts = found.squares, found.projections, found.gram
        return inner.spread(*parts).scaled(found.slope).variance

    with full_precision(state.network.device):
        variance = torch.cat(list(scorer.each(inputs, look)))
    alike = float(inside.square().sum()) / max(float(inside.trace()) ** 2, 1e-300)
    return variance.sqrt().cpu(), alike
