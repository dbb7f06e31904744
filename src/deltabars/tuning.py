"""λ from the data: the log marginal likelihood over λ, or the loss on a validation set.

With μᵢ the eigenvalues of the curvature's data part, Laplace's method at ω̂ gives

    log p(data | λ) ≈ −N·(mean loss + (λ/2)‖ω̂‖²) − ½ Σᵢ log(1 + μᵢ/λ)

(the prior is N(0, (Nλ)⁻¹I), so that ω̂ is its posterior mode). Of regression N and the loss are
over σ², and −½·N·C·log 2πσ² is added, with the σ of each λ where it is estimated: what a fit with
that λ would have. K of the μᵢ are known for every λ
from one fit. Of the others it is known that none is above μ_K, and for G and GGN their sum t,
because the trace is. Since log(1 + μ/λ) is concave in μ, m of them with sum t add between

    (t/μ_K)·log(1 + μ_K/λ)      (as many as possible are μ_K, the others 0)
    m·log(1 + t/(m·λ))          (all are equal)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltabars.covariance import ESTIMATORS
from deltabars.decay import L2, scaled
from deltabars.errors import BadValueError
from deltabars.noise import noises_at
from deltabars.validating import validation_losses

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit

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
        fit: the fit with that λ.
        fitted_level: the λ that the search started from.
        levels: the λs that were tried, as they are in the eigenvalues (see `DeltaFit.level`),
            ascending, (n,).
        values: the log marginal likelihood at each, or the mean loss on the validation set, (n,).
        low, high: what the log marginal likelihood lies between, (n,); None for a loss.
        at_edge: whether the best one is the first or the last, so that it may lie beyond.
    """

    method: str
    l2: L2
    fit: DeltaFit
    fitted_level: float
    levels: Tensor
    values: Tensor
    low: Tensor | None
    high: Tensor | None
    at_edge: bool

    def __float__(self) -> float:
        """The best λ, where it is one number."""
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
        loss: N times the mean loss at ω̂: −log p(data | ω̂), of regression at noise 1 and without
            its constant.
        num_examples: N.
        targets: N·C of regression, zero of the others.
        square: ‖ω̂‖², in the coordinates in which λ is one number.
        eigenvalues: μ₁ ≥ … ≥ μ_K of the data part at noise 1, (K,).
        others: m, how many parameters there are beside those, that the data reach.
        their_sum: t, of the other eigenvalues; None where it is not known.
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
    def of(cls, fit: DeltaFit) -> Evidence:
        """That of a fit's first matrix: its own, or the Hessian of a sandwich."""
        name = ESTIMATORS[fit.estimator][0]
        pairs = fit.spectra[name]
        eigenvalues = (pairs.values - fit.level).clamp(min=0).cpu()
        point, scale = fit.network.point.double(), fit.network.scale
        if scale is not None:
            point = point / scale
        trace = fit.diagnostics[name].get(DATA_TRACE)
        rest = None if trace is None else max(0.0, trace - float(eigenvalues.sum()))
        return cls(
            fit.num_examples * fit.diagnostics["mean_loss"],
            fit.num_examples,
            0 if fit.noise is None else fit.num_examples * fit.num_outputs,
            float(point.square().sum()),
            eigenvalues,
            max(0, fit.diagnostics["parameters_reached"] - len(eigenvalues)),
            rest,
            pairs.slack,
            partial(noises_at, fit),
            name == "opg",
        )

    def interval(self, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The value, and what it lies between, for each λ, (n,), float64.

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


def tune_l2(fit: DeltaFit, data: Any, method: str) -> Tuning:
    """A search over λ; the arguments are those of `DeltaFit.tune_l2`, and checked."""
    if method not in METHODS:
        raise BadValueError(f"method: expected one of {METHODS}, got {method!r}.")
    if method == "validation":
        if data is None:
            raise BadValueError(
                "data: expected validation data (inputs and targets) for method='validation', got "
                "none. method='marginal_likelihood' needs none."
            )
        return _by_validation(fit, data)
    if data is not None:
        raise BadValueError(
            "data: expected none for method='marginal_likelihood', which follows from the fit, got "
            "some. Choose method='validation' to use them."
        )
    evidence = Evidence.of(fit)

    def search(levels: Tensor) -> Tensor:
        return evidence.interval(levels)[0]

    levels = _levels(fit, _DECADES, _GRID)
    best, at_edge = _maximum(search, levels)
    levels = torch.cat([levels, best[None]]).sort().values
    values, low, high = evidence.interval(levels)
    l2 = scaled(fit.l2, float(best) / fit.level)
    return Tuning(method, l2, fit.with_l2(l2), fit.level, levels, values, low, high, at_edge)


def _by_validation(fit: DeltaFit, data: Any) -> Tuning:
    levels = _levels(fit, _DECADES / 2, _TRIED)
    values = validation_losses(fit, data, levels)
    place = int(values.argmin())
    l2 = scaled(fit.l2, float(levels[place]) / fit.level)
    at_edge = place in (0, len(levels) - 1)
    return Tuning("validation", l2, fit.with_l2(l2), fit.level, levels, values, None, None, at_edge)


def _levels(fit: DeltaFit, decades: float, count: int) -> Tensor:
    """The λs to try, without those at which no noise can be estimated."""
    levels = fit.level * 10 ** torch.linspace(-decades, decades, count, dtype=torch.float64)
    return levels[noises_at(fit, levels).isfinite()]


def _maximum(function: Any, levels: Tensor) -> tuple[Tensor, bool]:
    """Where a function of λ is largest, to ten digits, and whether that is at an end."""
    place = int(function(levels).argmax())
    if place in (0, len(levels) - 1):
        return levels[place], True
    for _ in range(_ZOOMS):
        ends = levels[max(place - 1, 0)], levels[min(place + 1, len(levels) - 1)]
        steps = torch.linspace(0, 1, 41, dtype=torch.float64)
        levels = ends[0] * (ends[1] / ends[0]) ** steps
        place = int(function(levels).argmax())
    return levels[place], False
