"""λ after a fit: by the evidence of Laplace's method, or by the loss on validation data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.estimators import ESTIMATORS
from deltabars.covariance.estimators import Covariance
from deltabars.errors import BadValueError, DataError, SpectrumWarning
from deltabars.fitting.hyperparameters import noises_at, with_l2
from deltabars.fitting.state import FittedState
from deltabars.likelihoods.base import Likelihood
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.prediction.averaging import SAMPLES, choose_moderation
from deltabars.prediction.prediction import Prediction
from deltabars.prediction.scoring import Scorer
from deltabars.problem.batches import iterate, labelled
from deltabars.problem.prior import L2Rates, scaled
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress

_READ_SIZE = 1024  # examples


def validation_losses(state: FittedState, data: Any, levels: Tensor) -> Tensor:
    """Return the mean −log p(target) for each λ, (n,), float64.

    p is the moderated probability, or has the total standard deviation.

    F and its projections are computed once, for all λ. Cost: that of one prediction of the data,
    and n·C·K operations an example.
    """
    names = ESTIMATORS[state.estimator]
    method = "sampling" if state.likelihood.discrete else None
    with full_precision(state.network.device):
        covariances = _covariances(state, levels)
    scorer = Scorer(
        state.pullback,
        state.likelihood,
        state.signature,
        {matrix: state.spectra[matrix].vectors for matrix in sorted(names)},
        covariances,
        "probability",
        "rigorous",
        with_covariance=False,
        classes=None,
        moderation=choose_moderation(
            method, SAMPLES, 0, state.num_outputs, state.likelihood, subset=False
        ),
        memory_budget=state.memory_budget,
    )
    total, count = torch.zeros(len(levels), dtype=torch.float64), 0
    with Progress("Validating", None, "example", state.progress) as bar:
        noises = noises_at(state, levels).tolist()
        for raw in iterate(data, _READ_SIZE):
            batch = labelled(raw, state.likelihood.counted)
            assert batch.targets is not None
            if not len(batch):
                continue
            found = scorer.predict(batch.inputs, None, False)
            targets = state.likelihood.arranged(batch.targets, state.num_outputs)
            targets = targets.to(state.network.device)
            state.likelihood.check_targets(found["0"].mean, targets)
            for place, prediction in enumerate(found.values()):
                losses = _losses(state.likelihood, prediction, targets, noises[place])
                total[place] += float(losses.sum())
            count += len(targets)
            bar.show(count)
    if not count:
        raise DataError("Validation data: expected at least one example, got none.")
    return total / count


def _covariances(state: FittedState, levels: Tensor) -> dict[str, Covariance]:
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectrumWarning)  # of λs that are only tried
        for place, level in enumerate(levels.tolist()):
            moved = with_l2(state, scaled(state.l2, level / state.level))
            found[str(place)] = moved.covariance_of(state.estimator, state.rank)
    return found


def _losses(
    likelihood: Likelihood, prediction: Prediction, targets: Tensor, noise: float
) -> Tensor:
    """Compute −log p of each target, at a given noise, (B,)."""
    if isinstance(likelihood, Gaussian):
        total_std = (prediction.variance + noise**2).sqrt()
        gap = (targets - prediction.mean) / total_std
        density = 0.5 * gap.square() + total_std.log() + 0.5 * math.log(2 * math.pi)
        return density.sum(-1)
    assert prediction.moderated is not None
    if isinstance(likelihood, Bernoulli):
        right = torch.where(targets > 0, prediction.moderated, 1 - prediction.moderated)
        return -right.log().sum(-1)
    return -prediction.moderated.gather(1, targets.long()[:, None]).squeeze(1).log()


METHODS = ("marginal_likelihood", "validation")
DATA_TRACE = "data_trace"

_DECADES = 6  # to either side of the fitted λ; on validation data a half of that
_GRID = 241
_TRIED = 61  # on validation data: ten a decade
_ZOOMS = 6  # each to the neighbours of the best point


@dataclass(frozen=True, eq=False)
class Tuning:
    """A search over λ.

    Attributes:
        method: `"marginal_likelihood"` or `"validation"`.
        l2: the best λ (or λs by name pattern, times a common factor).
        fit: the `DeltaFit` with that λ.
        fitted_level: the λ that the search started from.
        levels: the λs that were tried, as they are in the eigenvalues (see `DeltaFit.level`),
            ascending, (n,).
        values: the log marginal likelihood at each, or the mean loss on the validation set, (n,).
        low, high: what the log marginal likelihood lies between, (n,); None for a loss.
        at_edge: whether the best one is the first or the last: the optimum may lie beyond.
    """

    method: str
    l2: L2Rates
    fit: Any
    fitted_level: float
    levels: Tensor
    values: Tensor
    low: Tensor | None
    high: Tensor | None
    at_edge: bool

    def __float__(self) -> float:
        """Return the best λ, where it is one number."""
        if isinstance(self.l2, Mapping):
            raise BadValueError(f"l2: expected one number, got several, {dict(self.l2)}.")
        return self.l2

    def __repr__(self) -> str:
        best = int(self.values.argmax() if self.low is not None else self.values.argmin())
        what = "log marginal likelihood" if self.low is not None else "validation loss"
        text = f"Tuning: l2 = {self.l2}, {what} {float(self.values[best]):.6g}"
        if self.low is not None and self.high is not None:
            text += f" (between {float(self.low[best]):.6g} and {float(self.high[best]):.6g})"
        return text + (", at the edge of the search" if self.at_edge else "")


@dataclass(frozen=True)
class Evidence:
    """The log marginal likelihood of a fit as a function of λ.

    Attributes:
        loss: N times the mean loss at ω̂: −log p(data | ω̂); of regression at noise 1, without its
            constant.
        num_examples: N.
        targets: N·C of regression, zero of the others.
        square: ‖ω̂‖², in the coordinates in which λ is one number.
        eigenvalues: μ₁ ≥ … ≥ μ_K of the data part at noise 1, (K,).
        others: m, how many further parameters the data reach.
        their_sum: t, the sum of the other eigenvalues; None where it is not known.
        slack: how much too low the eigenvalues can be (see `EigenPairs.slack`).
        noises: from λs to the σ of each.
        is_over_noise: whether the eigenvalues are to be divided by σ² (those of G).
    """

    loss: float
    num_examples: int
    targets: int
    square: float
    eigenvalues: Tensor
    others: int
    their_sum: float | None
    slack: float
    noises: Callable[[Tensor], Tensor]
    is_over_noise: bool

    @classmethod
    def of(cls, state: FittedState) -> Evidence:
        """Make that of a fit's main matrix: its own, or the Hessian of a sandwich."""
        name = ESTIMATORS[state.estimator][0]
        pairs = state.spectra[name]
        eigenvalues = (pairs.values - state.level).clamp(min=0).cpu()
        point, scale = state.network.point.double(), state.network.scale
        if scale is not None:
            point = point / scale
        trace = state.diagnostics[name].get(DATA_TRACE)
        rest = None if trace is None else max(0.0, trace - float(eigenvalues.sum()))
        return cls(
            state.num_examples * state.diagnostics["mean_loss"],
            state.num_examples,
            0 if state.noise is None else state.num_examples * state.num_outputs,
            float(point.square().sum()),
            eigenvalues,
            max(0, state.diagnostics["parameters_reached"] - len(eigenvalues)),
            rest,
            pairs.slack,
            partial(noises_at, state),
            name == "opg",
        )

    def interval(self, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value for each λ and its lower and upper bound, (n,), float64.

        The value is the middle. Of a Hessian, whose other eigenvalues lie to both sides of λ, it is
        that of a tail at λ, and the interval holds if they are all above.
        """
        levels = levels.double()
        precision = self.noises(levels) ** -2
        cost = precision * (self.loss + 0.5 * self.num_examples * levels * self.square)
        cost = cost + 0.5 * self.targets * (2 * math.pi / precision).log()
        # log(1 + factor·μ/λ) = log(1 + μ/floor)
        floors = levels / precision if self.is_over_noise else levels
        known = torch.log1p(self.eigenvalues / floors[:, None]).sum(1)
        most = self.eigenvalues[-1].double()
        at_most = torch.log1p(most / floors)
        if self.others == 0 or float(most) == 0:
            least = largest = torch.zeros_like(levels)
        elif self.their_sum is None:
            least, largest = torch.zeros_like(levels), self.others * at_most
        else:
            count, total = self.others, min(self.their_sum, self.others * float(most))
            least = total / most * at_most
            largest = count * torch.log1p(total / (count * floors))
        if self.slack:  # the known ones may be more, and the others then have less to share
            more = torch.log1p((self.eigenvalues + self.slack) / floors[:, None]).sum(1)
            least, largest = torch.zeros_like(levels), largest + more - known
        base = -cost - 0.5 * known
        middle = 0.0 if self.their_sum is None else 0.25 * (least + largest)
        return base - middle, base - 0.5 * largest, base - 0.5 * least


def tune_l2(state: FittedState, data: Any, method: str) -> Tuning:
    """Search over λ; the arguments are those of `DeltaFit.tune_l2`."""
    if method not in METHODS:
        raise BadValueError(f"method: expected one of {METHODS}, got {method!r}.")
    if method == "validation":
        if data is None:
            raise BadValueError(
                "data: expected validation data (inputs and targets) for method='validation', got "
                "none. method='marginal_likelihood' needs none."
            )
        return _by_validation(state, data)
    if data is not None:
        raise BadValueError(
            "data: expected none for method='marginal_likelihood', which follows from the fit, got "
            "some. Choose method='validation' to use them."
        )
    evidence = Evidence.of(state)

    def search(levels: Tensor) -> Tensor:
        return evidence.interval(levels)[0]

    levels = _levels(state, _DECADES, _GRID)
    best, at_edge = _maximum(search, levels)
    levels = torch.cat([levels, best[None]]).sort().values
    values, low, high = evidence.interval(levels)
    l2 = scaled(state.l2, float(best) / state.level)
    return Tuning(method, l2, with_l2(state, l2), state.level, levels, values, low, high, at_edge)


def _by_validation(state: FittedState, data: Any) -> Tuning:
    levels = _levels(state, _DECADES / 2, _TRIED)
    values = validation_losses(state, data, levels)
    place = int(values.argmin())
    l2 = scaled(state.l2, float(levels[place]) / state.level)
    at_edge = place in (0, len(levels) - 1)
    return Tuning(
        "validation", l2, with_l2(state, l2), state.level, levels, values, None, None, at_edge
    )


def _levels(state: FittedState, decades: float, count: int) -> Tensor:
    """Return the λs to try, without those at which no noise can be estimated."""
    levels = state.level * 10 ** torch.linspace(-decades, decades, count, dtype=torch.float64)
    return levels[noises_at(state, levels).isfinite()]


def _maximum(function: Any, levels: Tensor) -> tuple[Tensor, bool]:
    """Return where a function of λ is largest, to ten digits, and whether that is at an end."""
    place = int(function(levels).argmax())
    if place in (0, len(levels) - 1):
        return levels[place], True
    for _ in range(_ZOOMS):
        ends = levels[max(place - 1, 0)], levels[min(place + 1, len(levels) - 1)]
        steps = torch.linspace(0, 1, 41, dtype=torch.float64)
        levels = ends[0] * (ends[1] / ends[0]) ** steps
        place = int(function(levels).argmax())
    return levels[place], False
