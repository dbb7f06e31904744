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
from deltabars.errors import BadValueError, DataError, ModelError, first_line
from deltabars.fitting.state import Calibration, FittedState
from deltabars.prediction.metrics import regression
from deltabars.prediction.scoring import Scorer, read_inputs
from deltabars.problem.network import Network, model_errors
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
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise BadValueError(f"seed: expected a whole number from 0 on, got {seed!r}.")
    some = data if isinstance(data, tuple | list) else ()
    tensors = len(some) > 0 and all(isinstance(each, Tensor) for each in some)
    known = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if not tensors and not (known and hasattr(data, "__len__")):
        advice = " Give its dataset." if isinstance(data, DataLoader) else ""
        raise DataError(
            "resample: expected a Dataset with a length, or a tuple of tensors, got "
            f"{type(data).__name__}.{advice}"
        )
    count = len(data[0]) if tensors else len(data)
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
    if means.shape[2] != state.num_outputs or not bool(means.isfinite().all()):
        raise ModelError(
            f"replicas: expected finite predictions of {state.num_outputs} outputs, got "
            f"{means.shape[2]} outputs, or NaN."
        )
    return means


def _network_of(state: FittedState, given: Any, number: int) -> Network:
    own, what = state.network, f"replica {number}"
    if isinstance(given, nn.Module):
        return Network.capture(given, None, own.device, own.dtype)
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
    if not isinstance(given, Mapping):
        raise BadValueError(
            f"replicas: expected modules, state dicts or files of them, got {type(given).__name__}."
        )
    model = copy.deepcopy(own.model)
    try:
        model.load_state_dict(dict(given))
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"replicas: expected the weights of this model, got other ones in {what} "
            f"({first_line(error)})."
        ) from error
    return Network.capture(model, None, own.device, own.dtype)


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
    alike = float(inside.square().sum()) / float(inside.trace()) ** 2
    return variance.sqrt().cpu(), alike
