"""λ and σ after a fit: both can be changed, estimated and tuned without new eigenpairs.

A fit holds the eigenpairs of the loss ½‖r‖², which its λ belongs to. −log p is that loss over σ²,
and the cost with it, so that, with A and A_G the data parts at σ = 1,

    H, GGN = (A + λI)/σ²        G = A_G/σ⁴ + λI/σ² = (A_G/σ² + λI)/σ²

The common factor 1/σ² is a factor of N, in Σ = H⁻¹/N as in H⁻¹GH⁻¹/N: an example counts 1/σ² times
as much. What remains is the data part of G, over σ². Neither eigenvectors nor λ change.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from deltabars.covariance.base import Covariance
from deltabars.covariance.estimators import SPREADS, InverseCovariance
from deltabars.covariance.sampling import (
    TAIL_PULL,
    TAIL_PULL_SQUARE,
    TRACE,
    SamplingCovariance,
    mean_curvature,
)
from deltabars.eigen.pairs import warn_about_values
from deltabars.errors import BadValueError, DataError, SpectrumWarning
from deltabars.fitting.state import FittedState
from deltabars.likelihoods.base import Likelihood
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.gaussian import Gaussian, check_noise
from deltabars.prediction.averaging import Moderation, choose_moderation
from deltabars.prediction.scoring import Scorer
from deltabars.problem.data import Batch, iterate, labelled
from deltabars.problem.parameters import L2Rates, Prior, scaled
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress

METHODS = ("marginal_likelihood", "validation")
TUNING_SAMPLES = 128  # points of the scatter, while a temperature is searched
_DECADES = 6  # to either side of the fitted λ; on validation data a half of that
_GRID = 241
_TRIED = 61  # on validation data: ten a decade
_ZOOMS = 6  # each to the neighbours of the best point
_FEW_TEMPERATURES, _MANY_TEMPERATURES = 15, 41
_ALIKE = 2.0  # nats of all examples together: about what chance makes
_TEMPERATURE_DECADES = 0.4  # to either side of 1
_READ_SIZE = 1024  # examples
_HALVINGS = 64  # of an interval of σ: to the last bit
_MOST_LEVERAGE = 0.99
_PARTS = 65  # of a range that a minimum is searched in

State = TypeVar("State", bound=FittedState)


def with_l2(state: State, l2: L2Rates) -> State:
    """Move a fit to another λ; estimate its noise anew if it was estimated. Cost: nothing."""
    prior = Prior.read(l2, state.network.parameters, state.prior.scales or None)
    shift = prior.level - state.level
    spectra = {name: pairs.mapped(1.0, shift) for name, pairs in state.spectra.items()}
    for name, pairs in spectra.items():
        warn_about_values(name, pairs, prior.level, was_moved=True)
    diagnostics = {**state.diagnostics, "fitted_l2": state.diagnostics.get("fitted_l2", state.l2)}
    if isinstance(noted := diagnostics.get("l2"), Mapping):
        diagnostics["l2"] = {**noted, "how": "moved", "value": prior.level}
    moved = state.moved(prior=prior, spectra=spectra, diagnostics=diagnostics, calibration={})
    return with_settled_noise(moved)


def with_settled_noise(state: State) -> State:
    """Estimate the noise of a fit where its likelihood has an estimated one; it depends on λ."""
    gaussian = state.likelihood if isinstance(state.likelihood, Gaussian) else None
    is_open = gaussian is not None and (gaussian.noise is None or gaussian.estimated)
    return with_noise(state, None) if is_open else state


def with_noise(state: State, noise: Any) -> State:
    """Move a fit to another noise; None or `"estimate"` takes that of the residuals."""
    if not isinstance(state.likelihood, Gaussian):
        raise BadValueError(
            f"noise: expected a fit with a Gaussian likelihood, got {state.likelihood.name}, which "
            "has none."
        )
    found = given = check_noise(noise)
    if found is None:
        found = float(_estimates(state, torch.tensor([state.level], dtype=torch.float64))[0])
        if not 0 < found < math.inf:
            targets = state.num_examples * state.num_outputs
            few = f"{targets:,} targets for as many effective parameters or more"
            got = few if found else "none: every target is met exactly"
            raise BadValueError(
                f"noise: expected residuals to estimate it from, got {got}. Give it, for example "
                "with likelihood=deltabars.likelihoods.Gaussian(noise=0.1)."
            )
    likelihood = replace(state.likelihood, noise=found, estimated=given is None)
    return state.moved(likelihood=likelihood)


def _noises(state: FittedState, levels: Tensor) -> Tensor:
    """Return the σ of a fit at each λ, (n,), float64: given, or estimated there; else 1."""
    likelihood = state.likelihood
    if isinstance(likelihood, Gaussian) and (likelihood.estimated or likelihood.noise is None):
        return _estimates(state, levels)
    return torch.full_like(levels, state.noise or 1.0, dtype=torch.float64)


def _estimates(state: FittedState, levels: Tensor) -> Tensor:
    """Estimate σ of a fit at each λ, (n,), float64: σ̂² = RSS/(N·C − γ).

    γ is the number of effective parameters in the computed pairs (of a sandwich, of the Hessian).
    γ of G depends on σ: σ̂ is then the one point where both sides agree. Zero where every target is
    met exactly; infinite where there are no more targets than effective parameters.
    """
    name, targets = state.main_matrix, state.num_examples * state.num_outputs
    found = (state.spectra[name].values - state.level).cpu()  # of the data part at noise 1, (K,)
    levels = levels.double()[:, None]
    squares = 2 * state.num_examples * state.diagnostics["mean_loss"]  # RSS

    def left(noise: Tensor) -> Tensor:
        data = found / noise[:, None] ** 2 if name == "opg" else found
        values = data + levels
        return targets - torch.where(values > 0, data / values, 0.0).sum(1)

    low = torch.full_like(levels[:, 0], squares / targets).sqrt()
    if squares == 0:
        return low
    rest = left(low)
    high = (squares / rest).sqrt()  # γ falls as σ grows: σ̂ is not above this
    for _ in range(_HALVINGS if name == "opg" else 0):
        middle = (low + high) / 2
        below = middle**2 * left(middle) < squares
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.where(rest > 0, high, torch.inf)


def log_evidence(state: FittedState, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log marginal likelihood at each λ and its bounds, (n,), float64.

    Laplace's method at ω̂: log p(data | ω̂) − ½N·λ‖ω̂‖² − ½ Σ log(1 + μₖ/λ), μ the eigenvalues of the
    data part. K of them are known; the m others that the data reach lie between 0 and μ_K and sum
    up to what the trace leaves. The value takes the mean eigenvalue there that the fit measured; of
    a Hessian the bounds hold if all eigenvalues are above λ.
    """
    name = state.main_matrix
    pairs, levels = state.spectra[name], levels.double()
    known = (pairs.values - state.level).clamp(min=0).cpu()  # μ at noise 1, (K,)
    trace = state.diagnostics[name].get(TRACE)
    others = max(0, state.diagnostics["parameters_reached"] - len(known))  # m
    rest, mean = mean_curvature(pairs.values, state.level, state.diagnostics[name])
    square = float(state.scaled_point.square().sum())
    precision = _noises(state, levels) ** -2
    targets = 0 if state.noise is None else state.num_examples * state.num_outputs
    cost = state.diagnostics["mean_loss"] + 0.5 * levels * square
    cost = state.num_examples * precision * cost
    cost = cost + 0.5 * targets * (2 * math.pi / precision).log()
    floors = levels / precision if name == "opg" else levels  # log(1 + σ⁻²·μ/λ) = log(1 + μ/floor)
    determinant = torch.log1p(known / floors[:, None]).sum(1)
    most = known[-1].double()
    at_most = torch.log1p(most / floors)
    least = largest = torch.zeros_like(levels)
    if others and float(most):
        if trace is None:
            largest = others * at_most
        else:
            total = min(max(0.0, trace - float(known.sum())), others * float(most))
            least = total / most * at_most
            largest = others * torch.log1p(total / (others * floors))
    if pairs.slack:  # the known ones may be more, and the others then have less to share
        more = torch.log1p((known + pairs.slack) / floors[:, None]).sum(1)
        least, largest = torch.zeros_like(levels), largest + more - determinant
    base = -cost - 0.5 * determinant
    middle = 0.25 * (least + largest) if trace is not None else torch.zeros_like(levels)
    if mean > 0:  # as many eigenvalues at the mean as have the trace
        middle = 0.5 * rest / mean * torch.log1p(mean / floors)
    if trace is not None:
        middle = torch.minimum(torch.maximum(middle, 0.5 * least), 0.5 * largest)
    return base - middle, base - 0.5 * largest, base - 0.5 * least


def level_by_evidence(state: FittedState) -> tuple[float, float, float]:
    """Return the λ that the trained weights are evidence of, and its interval.

    Under the prior N(0, σ²/(Nλ)) the trained weight ωₖ along eigenvector k has the mean square
    fₖσ²/(Nλ), fₖ = μₖ/(μₖ + λ) the share that the data determine. MacKay's equation
    Nλ Σ ωₖ²/σ² = Σ fₖ, where Laplace's evidence is stationary, counts all directions alike, also
    those that no data touch, whose weights are as they were initialised unless a weight decay took
    them to zero. Here a direction counts by its share: Nλ Σ fₖωₖ²/σ² = Σ fₖ². The left side rises
    with λ and the right one falls, so that there is one solution.

    Outside the pairs the sums follow from T, the trace there, from E = ωᵀAω and from the mean
    eigenvalues that the fit measured: E/(μ + λ) and T·μ/(μ + λ)². The interval takes the worst
    eigenvalues from 0 to μ_K with these traces. Of a Hessian T is an estimate.
    """
    name = state.main_matrix
    pairs, known = state.spectra[name], state.diagnostics[name]
    data = (pairs.values - state.level).clamp(min=0).cpu()
    squares = state.coordinates_of(state.scaled_point, name).square()
    outside = max(0.0, float(state.scaled_point.square().sum()) - float(squares.sum()))
    rest, mean = mean_curvature(pairs.values, state.level, known)
    others = max(1, state.diagnostics["parameters_reached"] - len(data))
    last, pull = float(data[-1]), min(max(0.0, known[TAIL_PULL]), float(data[-1]) * outside)
    pull_mean = min(known[TAIL_PULL_SQUARE] / pull, last) if pull else 0.0
    if not float(data.sum()) + rest > 0:
        raise BadValueError(
            "l2: expected curvature above zero to find it from, got none. Give a number: the "
            "weight decay of the training."
        )
    if not float((data * squares).sum()) + pull > 0:
        raise BadValueError(
            "l2: expected weights that are not all zero to find it from, got none that the data "
            "determine. Give a number: the weight decay of the training."
        )

    def settled(end: int) -> float:
        """Solve for the value (0), the lower end (-1) or the upper one (1)."""
        low, high = math.log(1e-30), math.log(1e30)
        for _ in range(_HALVINGS * 2):
            level = math.exp((low + high) / 2)
            noise = float(_noises(state, torch.tensor([level], dtype=torch.float64))[0])
            if not noise > 0:
                raise BadValueError(
                    "l2: expected residuals to find it from, got none: every target is met "
                    "exactly. Give a number: the weight decay of the training."
                )
            if noise == math.inf:  # no fewer parameters than targets: λ is larger
                low = math.log(level)
                continue
            precision = noise**-2
            floor = level / precision if name == "opg" else level
            # What an incremental SVD discarded may belong to the pairs.
            few, many = data / (data + floor), (data + pairs.slack) / (data + pairs.slack + floor)
            determined = float(((many if end < 0 else few) * squares).sum())
            counted = float((many if end > 0 else few).square().sum())
            if pull:
                at = {-1: pull / outside, 0: pull_mean, 1: math.inf if pairs.slack else last}[end]
                determined += pull / (at + floor)
            if rest and end == 0:
                counted += rest * mean / (mean + floor) ** 2
            elif rest and end > 0:
                steepest = min(max(floor, rest / others), last + pairs.slack)
                counted += rest * steepest / (steepest + floor) ** 2
            elif rest and not pairs.slack:
                counted += others * _least_square(rest / others, last, floor)
            if state.num_examples * precision * level * determined < counted:
                low = math.log(level)
            else:
                high = math.log(level)
        return math.exp((low + high) / 2)

    return settled(0), settled(-1), settled(1)


def _least_square(mean: float, most: float, floor: float) -> float:
    """Return the least mean of (μ/(μ + floor))² over μ in [0, most] with a given mean.

    It is the convex hull of that function: some of the μ are equal, the others are the largest.
    """
    x = min(mean, most) * torch.linspace(0, 1, _PARTS, dtype=torch.float64)
    low, high = (x / (x + floor)).square(), (most / (most + floor)) ** 2
    share = (min(mean, most) - x) / (most - x).clamp(min=1e-300)
    return float((low + share * (high - low)).min())


@dataclass(frozen=True, eq=False)
class Tuning:
    """A search over λ."""

    method: str  # "marginal_likelihood" or "validation"
    l2: L2Rates  # the best λ (or λs by name pattern, times a common factor)
    fit: Any  # the `DeltaFit` with that λ
    fitted_level: float  # the λ that the search started from
    levels: Tensor  # the λs that were tried, as in the eigenvalues (see `DeltaFit.level`), (n,)
    values: Tensor  # the log marginal likelihood at each, or the mean validation loss, (n,)
    low: Tensor | None  # what the log marginal likelihood lies between, (n,); None for a loss
    high: Tensor | None
    at_edge: bool  # whether the best one is the first or the last: the optimum may lie beyond
    # The best temperature of the moderated predictions at each λ, (n,); that of the best λ is the
    # fit's. None for the marginal likelihood.
    temperatures: Tensor | None = None

    def __float__(self) -> float:
        """Return the best λ, where it is one number."""
        if isinstance(self.l2, Mapping):
            raise BadValueError(f"l2: expected one number, got several, {dict(self.l2)}.")
        return self.l2

    def __repr__(self) -> str:
        edge = ", at the edge of the search" if self.at_edge else ""
        if self.low is None or self.high is None:
            loss = f"validation loss {float(self.values.min()):.6g}"
            return f"Tuning: l2 = {self.l2}, temperature {self.fit.temperature:.3g}, {loss}{edge}"
        best = int(self.values.argmax())
        value, low, high = (f"{float(x[best]):.6g}" for x in (self.values, self.low, self.high))
        found = f"log marginal likelihood {value} (between {low} and {high})"
        return f"Tuning: l2 = {self.l2}, {found}{edge}"


def temperature_by_leaving_out(state: FittedState, batches: Sequence[Batch]) -> float:
    """Return the T that the moderated predictions of left-out training examples prefer.

    Without its example n the network has the logits z + (I − VS)⁻¹V∇ℓ, V = JB⁻¹Jᵀ/N their
    posterior covariance, closed by the mean curvature that was measured, and S = ∂²ℓ/∂z². The loss
    is the mean −log p of softmax(z/T), averaged over the sampling scatter. Of the temperatures that
    it hardly tells apart, T is the nearest to the neutral one, at which the averages are the most
    like the network's own probabilities. No other data are needed. Cost: one prediction of them.
    """
    with full_precision(state.network.device):
        name, rank = state.main_matrix, state.rank
        posterior = state.covariance_of(name, rank)
        sampling = state.covariance_of(name, rank, spread="sampling")
        assert isinstance(posterior, InverseCovariance)
        assert isinstance(sampling, SamplingCovariance)
        closing = 1 / (state.level + sampling.meat.curvature)
        spreads = dict(zip(SPREADS, (replace(posterior, closing=closing), sampling), strict=True))
    scorer = _logit_scorer(state, spreads)
    moderation = _moderation(state)
    temperatures = _temperatures(_MANY_TEMPERATURES)
    total, away = torch.zeros(2, len(temperatures), dtype=torch.float64)
    for batch in batches:
        found = scorer.predict(batch.inputs, None, False)
        own, scatter = (found[spread].covariance for spread in SPREADS)
        assert batch.targets is not None
        assert own is not None
        assert scatter is not None
        outputs = found["posterior"].mean.double()
        left = outputs + _left_out(state.likelihood, outputs, batch.targets, own.double())
        means = moderation.means(left, scatter, temperatures)
        shares = _shares(state.likelihood, batch.targets, state.num_outputs)
        total += _cross_entropies(state.likelihood, means, shares).cpu()
        plain = state.likelihood.mean(left)
        away += _cross_entropies(state.likelihood, means, plain).cpu()
    alike = temperatures[total <= total.min() + _ALIKE]
    neutral = temperatures[away.argmin()]
    return float(alike[(alike / neutral).log().abs().argmin()])


def _left_out(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, covariance: Tensor
) -> Tensor:
    """Return how far outputs (B, C) move where each example is left out: (I − VS)⁻¹V∇ℓ.

    With S = RRᵀ that is V∇ℓ + VR(I − RᵀVR)⁻¹RᵀV∇ℓ. The eigenvalues of RᵀVR, the leverages, are
    below 1; they may come out larger, because V outside the pairs is an estimate.
    """
    pull = likelihood.loss_gradient(outputs, targets).double()[:, :, None]
    root = likelihood.curvature_root(outputs, targets).double()  # Rᵀ
    moved = covariance @ pull
    leverages, turned = torch.linalg.eigh(root @ covariance @ root.mT)
    turned = turned.mT @ root  # UᵀRᵀ
    again = (turned @ moved) / (1 - leverages.clamp(max=_MOST_LEVERAGE))[:, :, None]
    return (moved + covariance @ turned.mT @ again)[:, :, 0]


def _logit_scorer(state: FittedState, covariances: Mapping[str, Covariance]) -> Scorer:
    """Return what gives outputs with the covariances of their logits."""
    needed = {m for spread in SPREADS for m in state.matrices_of(state.estimator, spread)}
    return Scorer(
        state.pullback, state.likelihood, state.signature,
        {name: state.spectra[name].vectors for name in sorted(needed)}, covariances, "logit",
        "rigorous", with_covariance=state.likelihood.discrete, classes=None, moderation=None,
        memory_budget=state.memory_budget,
    )  # fmt: skip


def _moderation(state: FittedState) -> Moderation:
    given = (TUNING_SAMPLES, 0, state.num_outputs, state.likelihood)
    found = choose_moderation("sampling", *given, subset=False)
    assert found is not None
    return found


def _temperatures(count: int) -> Tensor:
    """Return temperatures to try, 1 in their middle."""
    return torch.logspace(-_TEMPERATURE_DECADES, _TEMPERATURE_DECADES, count, dtype=torch.float64)


def _cross_entropies(likelihood: Likelihood, means: Tensor, shares: Tensor) -> Tensor:
    """Return −Σ q log p over B examples, (T,), for probabilities p (T, B, C) and q (B, C)."""
    found = (shares * means.clamp(min=1e-300).log()).sum((1, 2))
    if isinstance(likelihood, Bernoulli):
        found += ((1 - shares) * (1 - means).clamp(min=1e-300).log()).sum((1, 2))
    return -found


def _shares(likelihood: Likelihood, targets: Tensor, classes: int) -> Tensor:
    """Return labels as probabilities (B, C) of 0 and 1."""
    if isinstance(likelihood, Bernoulli):
        return targets.double()
    return torch.nn.functional.one_hot(targets.long(), classes).double()


def tune_l2(state: FittedState, data: Any, method: str) -> Tuning:
    """Search over λ; the arguments are those of `DeltaFit.tune_l2`."""
    if method not in METHODS:
        raise BadValueError(f"method: expected one of {METHODS}, got {method!r}.")
    if (data is None) == (method == "validation"):
        some, none = "validation data", "none"
        expected, got = (some, none) if data is None else (none, some)
        raise BadValueError(f"data: expected {expected} for method={method!r}, got {got}.")
    temperatures = None
    if method == "validation":
        levels, tried = _levels(state, _DECADES / 2, _TRIED), _temperatures(_FEW_TEMPERATURES)
        if not state.likelihood.discrete:
            tried = torch.ones(1, dtype=torch.float64)
        (table, count), low, high = _validation_losses(state, data, levels, tried), None, None
        values, places = table.min(1)
        index, temperatures = _nearest(values, count, levels, state.level), tried[places]
        best, at_edge = levels[index], index in (0, len(levels) - 1)
    else:
        levels = _levels(state, _DECADES, _GRID)
        best, at_edge = _maximum(lambda tried: log_evidence(state, tried)[0], levels)
        levels = torch.cat([levels, best[None]]).sort().values
        values, low, high = log_evidence(state, levels)
    l2 = scaled(state.l2, float(best) / state.level)
    fit = with_l2(state, l2)
    if temperatures is not None:
        fit = fit.moved(temperature=float(temperatures[index]))
    return Tuning(method, l2, fit, state.level, levels, values, low, high, at_edge, temperatures)


def _nearest(losses: Tensor, count: int, levels: Tensor, level: float) -> int:
    """Return the index of the λ nearest to that of the fit among those the data hardly tell apart.

    These are a likelihood interval: mean losses of `count` examples within 2/count of the least.
    """
    alike = (losses <= losses.min() + _ALIKE / count).nonzero().squeeze(1)
    away = (levels[alike] / level).log().abs()
    return int(alike[away.argmin()])


def _levels(state: FittedState, decades: float, count: int) -> Tensor:
    """Return the λs to try, without those at which no noise can be estimated."""
    levels = state.level * 10 ** torch.linspace(-decades, decades, count, dtype=torch.float64)
    return levels[_noises(state, levels).isfinite()]


def _maximum(function: Callable[[Tensor], Tensor], levels: Tensor) -> tuple[Tensor, bool]:
    """Return where a function of λ is largest, to ten digits, and whether that is at an end."""
    index = int(function(levels).argmax())
    if index in (0, len(levels) - 1):
        return levels[index], True
    for _ in range(_ZOOMS):
        low, high = levels[max(index - 1, 0)], levels[min(index + 1, len(levels) - 1)]
        levels = low * (high / low) ** torch.linspace(0, 1, 41, dtype=torch.float64)
        index = int(function(levels).argmax())
    return levels[index], False


def _validation_losses(
    state: FittedState, data: Any, levels: Tensor, temperatures: Tensor
) -> tuple[Tensor, int]:
    """Return the mean −log p(target) for each λ and temperature, (n, T), and of how many targets.

    p is the moderated probability, or has the total standard deviation. F is computed once.
    """
    likelihood, covariances = state.likelihood, {}
    with full_precision(state.network.device), warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectrumWarning)  # of λs that are only tried
        for index, level in enumerate(levels.tolist()):
            moved = with_l2(state, scaled(state.l2, level / state.level))
            spread = state.averages if likelihood.discrete else "posterior"
            covariances[str(index)] = moved.covariance_of(
                state.estimator, state.rank, spread=spread
            )
    scorer = _logit_scorer(state, covariances)
    moderation = _moderation(state) if likelihood.discrete else None
    total, count = torch.zeros(len(levels), len(temperatures), dtype=torch.float64), 0
    noises = _noises(state, levels).tolist()
    with Progress("Validating", None, "example", state.progress) as bar:
        for raw in iterate(data, _READ_SIZE):
            batch = labelled(raw, likelihood.counted)
            assert batch.targets is not None
            if not len(batch):
                continue
            found = scorer.predict(batch.inputs, None, False)
            outputs = found["0"].mean.double()
            targets = likelihood.arranged(batch.targets, state.num_outputs).to(outputs.device)
            likelihood.check_targets(outputs, targets)
            for index, prediction in enumerate(found.values()):
                if moderation is None:
                    std = (prediction.variance.double() + noises[index] ** 2).sqrt()
                    scatter = torch.distributions.Normal(outputs, std)
                    losses = -scatter.log_prob(targets.double()).sum()[None]
                else:
                    assert prediction.covariance is not None
                    means = moderation.means(outputs, prediction.covariance, temperatures)
                    shares = _shares(likelihood, targets, state.num_outputs)
                    losses = _cross_entropies(likelihood, means, shares)
                total[index] += losses.cpu()
            count += len(targets)
            bar.show(count)
    if not count:
        raise DataError("Validation data: expected at least one example, got none.")
    return total / count, count
