"""The options of a fit and its data: two frozen records, which everything else takes.

`FittedState` is what an algorithm needs of a fit; `DeltaFit` is that, with methods for users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Real
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from deltabars.covariance.base import Covariance, Defects, Tail
from deltabars.covariance.estimators import (
    DEFAULT_ESTIMATOR,
    ESTIMATORS,
    SPREADS,
    build_covariance,
)
from deltabars.covariance.sampling import TRACE, Meat, SamplingCovariance, mean_curvature
from deltabars.curvature.pullback import Pullback
from deltabars.eigen.pairs import EigenPairs, check_rank, is_whole
from deltabars.errors import BadValueError, option
from deltabars.likelihoods.base import Likelihood
from deltabars.prediction.prediction import Evidence
from deltabars.problem.data import Signature
from deltabars.problem.network import Behaviour, Network
from deltabars.problem.parameters import (
    AUTO,
    L2Rates,
    LastLayer,
    ParameterSpace,
    Prior,
    Selection,
)
from deltabars.runtime.vectors import Basis, ShardedVectors, products

SOLVERS = ("auto", "krylov", "incremental", "dense", "arpack")
DEFAULT_RANK = 100
DEFAULT_TOLERANCE = 0.05  # of `rank="auto"`

_LEAST = {"rank": 1, "seed": 0, "smallest": 0, "batch_size": 1, "max_products": 1}
EXPLAINED = 0.1  # R²: a calibration with less says nothing
CONTRADICTED = 10.0  # times: a given λ that is farther from that of the evidence is warned of
_FAR, _FAR_RELATIVE = 1.0, 0.5  # error bars; of the relative gradient
# Units in the last place, of errors measured on networks of many kinds and doubled or more.
_ROWS = 8  # rows of gradients, relative to √λ₁
_SECOND = 8  # products with a Hessian, relative to λ₁, beyond what consistent products show
_PROJECTION = 2
_SHIFT = 8  # F
_RESULT = 4


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is not a whole number from `least` on."""
    if not is_whole(value) or not least <= value < 2**63:
        raise BadValueError(f"{name}: expected a whole number from {least} on, got {value!r}.")


def check_spread(spread: Any) -> None:
    """Refuse a spread that does not exist."""
    if not isinstance(spread, str) or spread not in SPREADS:
        raise BadValueError(f"spread: expected one of {SPREADS}, got {spread!r}.")


def check_positive(name: str, value: Any, example: str = "") -> None:
    """Refuse what is not a number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise BadValueError(f"{name}: expected a number above zero{example}, got {value!r}.")


@dataclass(frozen=True)
class FitOptions:
    """The options of `fit`, by the names of its arguments; all are checked here."""

    estimator: str = DEFAULT_ESTIMATOR
    rank: int | str | None = None  # None until P is known (see `resolved`)
    tolerance: float | None = None
    probe: str | None = None  # "given" where inputs were given for it
    solver: str = "auto"
    seed: int = 0
    memory_budget: int | None = None
    batch_size: int | None = None
    residual_tolerance: float | None = None
    max_products: int | None = None
    smallest: int = 0
    max_seconds: float | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, known in (("estimator", ESTIMATORS), ("solver", SOLVERS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise BadValueError(f"{name}: expected one of {list(known)}, got {value!r}.")
        if isinstance(self.rank, str) and not self.is_automatic:
            raise BadValueError(f"rank: expected a whole number or 'auto', got {self.rank!r}.")
        if not self.is_automatic and (self.tolerance is not None or self.probe is not None):
            raise BadValueError(
                f"tolerance, probe: expected them with {option('rank', 'auto')} only, got "
                f"{option('rank', self.rank)}."
            )
        if self.tolerance is not None:
            check_positive("tolerance", self.tolerance, ", such as 0.05 for 5 % of a score")
        for name, least in _LEAST.items():
            value = None if name == "rank" and self.is_automatic else getattr(self, name)
            if least == 0 or value is not None:
                check_whole(name, value, least)
                object.__setattr__(self, name, int(value or 0))
        if self.residual_tolerance is not None:
            check_positive("residual_tolerance", self.residual_tolerance)
        if self.max_seconds is not None:
            check_positive("max_seconds", self.max_seconds, ", such as 600")
            seconds = float(self.max_seconds)
            object.__setattr__(self, "max_seconds", seconds if seconds < math.inf else None)
        self._check_solver()

    def _check_solver(self) -> None:
        matrices, solver, fault = ESTIMATORS[self.estimator], self.solver, ""
        if self.is_automatic and solver in ("arpack", "incremental"):
            fault = (
                f"solver: expected 'auto', 'krylov' or 'dense' with {option('rank', 'auto')}, got "
                f"{solver!r}, which must know the rank before it starts."
            )
        elif solver == "incremental" and matrices == ("hessian",):
            fault = (
                "solver: expected 'krylov', 'dense' or 'arpack' for the Hessian, got "
                "'incremental', which works on rows of gradients (opg, ggn)."
            )
        elif self.smallest and ("hessian" not in matrices or solver == "arpack"):
            fault = (
                f"smallest: expected 0, got {self.smallest}: the lower end of the spectrum is "
                "computed for a Hessian, by 'krylov' and 'dense'. (That of opg and ggn is λ.)"
            )
        elif self.max_seconds is not None and solver in ("dense", "arpack"):
            fault = (
                "max_seconds: expected solver 'auto', 'krylov' or 'incremental', got "
                f"{solver!r}, which has no pairs before its end."
            )
        if fault:
            raise BadValueError(fault)

    @property
    def is_automatic(self) -> bool:
        """Whether the rank is chosen by a probe."""
        return self.rank == "auto"

    def check_for(self, model: torch.nn.Module, params: Selection, l2: L2Rates | str) -> None:
        """Refuse what is wrong for a model whatever the data are, before these are read."""
        space = ParameterSpace.select(model, params)
        if l2 != AUTO:
            Prior.read(l2, space)
        if isinstance(self.rank, int):
            check_rank(self.rank, space.size)

    def resolved(self, num_parameters: int) -> FitOptions:
        """Return the same with a rank, where none was given."""
        rank = min(DEFAULT_RANK, num_parameters) if self.rank is None else self.rank
        return replace(self, rank=rank)


@dataclass(frozen=True)
class Calibration:
    """The factor that brings the bars of a fit to the scatter of retrained networks."""

    factor: float
    standard_error: float  # of the factor
    r_squared: float  # of the replicas' scatter on the bars, over all inputs and outputs
    replicas: int

    @property
    def is_good(self) -> bool:
        """Whether the bars explain enough of the scatter for a verdict to rest on it."""
        return self.r_squared >= EXPLAINED


@dataclass(frozen=True, eq=False, repr=False)
class FittedState:
    """The data of a fit."""

    estimator: str
    prior: Prior
    num_examples: int  # N
    num_outputs: int  # C
    spectra: Mapping[str, EigenPairs]  # by matrix; of regression at noise 1
    diagnostics: Mapping[str, Any]  # how good the eigenpairs are, times, versions: as JSON
    likelihood: Likelihood
    network: Network  # a private copy of the model, with the trained weights
    signature: Signature  # of the inputs
    weights: str  # the fingerprint of the model's state
    behaviour: Behaviour | None = None  # outputs of generated inputs; None in older files
    memory_budget: int | None = None  # bytes; None for half of what is free
    progress: bool = True
    known_overlap: Tensor | None = None  # M where it is known, say of vectors before rounding
    meats: Mapping[str, Meat] = field(default_factory=dict)  # G₀ beside H or GGN, at noise 1
    calibration: Mapping[str, Calibration] = field(default_factory=dict)  # by spread
    temperature: float = 1.0  # that logits are divided by before they are averaged
    averages: str = "posterior"  # the spread of the weights that `moderated` averages over

    def __post_init__(self) -> None:
        for name in ("spectra", "diagnostics", "meats", "calibration"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        mappings = ("spectra", "diagnostics", "meats", "calibration")
        plain = {name: dict(values[name]) for name in mappings}
        return partial(type(self), **(values | plain)), ()

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.network.parameters.size

    @property
    def l2(self) -> L2Rates:
        """λ as it was given: a number, or numbers by name pattern."""
        return self.prior.given

    @property
    def level(self) -> float:
        """λ as it is in the eigenvalues: `l2`, or 1 times a common factor where that is several."""
        return self.prior.level

    @property
    def rank(self) -> int:
        """K, the number of computed eigenpairs; the larger one of a sandwich."""
        return max(len(pairs) for pairs in self.spectra.values())

    @property
    def noise(self) -> float | None:
        """σ of a Gaussian likelihood, given or estimated; None for the others."""
        return self.likelihood.target_noise

    @property
    def informative_examples(self) -> float:
        """N/σ²: with noise σ an example of regression counts 1/σ² times as much. Else N."""
        return self.num_examples / (self.noise or 1.0) ** 2

    @property
    def main_matrix(self) -> str:
        """The matrix of the fit: that of its estimator, or the Hessian of a sandwich."""
        return ESTIMATORS[self.estimator][0]

    @cached_property
    def pullback(self) -> Pullback:
        """The map from cotangents of the outputs to rows of derivatives by the parameters."""
        return Pullback(self.network)

    @cached_property
    def overlap(self) -> Tensor:
        """M = Q_Hᵀ Q_G (K, K), in float64."""
        if self.known_overlap is not None:
            return self.known_overlap
        return products(self.spectra["hessian"].vectors, self.spectra["opg"].vectors)

    @property
    def scaled_point(self) -> Tensor:
        """ω̂ in the coordinates in which λ is one number, (P,), float64."""
        point, scale = self.network.point.double(), self.network.scale
        return point if scale is None else point / scale

    def coordinates_of(self, vector: Tensor, name: str) -> Tensor:
        """Return qₖᵀv of a vector (P,) for the eigenvectors of a matrix, (K,), float64."""
        vectors = self.spectra[name].vectors
        vector = vector.to(vectors.device, vectors.dtype)
        row: Basis = vector[None]
        if isinstance(vectors, ShardedVectors):
            row = ShardedVectors(vector[None, vectors.space.own], vectors.space)
        return products(row, vectors)[0].cpu()

    def moved(self, **changes: Any) -> Self:
        """Replace some fields; the eigenvectors stay, and so does their overlap."""
        overlap = self.__dict__.get("overlap", self.known_overlap)
        return replace(self, known_overlap=overlap, **changes)

    def examples_for(self, spread: str, estimator: str) -> float:
        """Return the N that a covariance divides by; over c² for bars calibrated by a factor c."""
        known = self.calibration.get(spread) if estimator == self.estimator else None
        return self.informative_examples / (1.0 if known is None else known.factor) ** 2

    def pairs_of(self, name: str) -> EigenPairs:
        """Return the eigenpairs of a matrix at the fit's noise σ: G's data part is over σ².

        The spectra are those of regression at σ = 1; see `deltabars.fitting.tuning`.
        """
        pairs = self.spectra[name]
        if name != "opg" or self.noise in (None, 1):
            return pairs
        factor = 1 / float(self.noise or 1.0) ** 2
        return pairs.mapped(factor, self.level * (1 - factor))

    def covariance_of(
        self, estimator: str, rank: int, full_rank: bool = True, spread: str = "posterior"
    ) -> Covariance:
        """Return Σ of an estimator that the fit serves, from its first `rank` pairs."""
        if not isinstance(full_rank, bool):
            raise BadValueError(f"full_rank: expected True or False, got {full_rank!r}.")
        found: dict[Any, Covariance] = self.__dict__.setdefault("_covariances", {})
        key = estimator, rank, full_rank, spread
        if key in found:
            return found[key]
        if spread == "sampling":
            found[key] = self._sampling_covariance(estimator, rank, full_rank)
        else:
            known = {name: self.pairs_of(name) for name in self.spectra}
            both = estimator == "sandwich"
            found[key] = build_covariance(
                estimator, {name: pairs.values for name, pairs in known.items()}, rank=rank,
                l2=self.level, num_parameters=self.num_parameters,
                num_examples=self.examples_for(spread, estimator),
                overlap=self.overlap if both else None,
                least_hessian=self.spectra["hessian"].exact_least if both else None,
                defects={name: self._defects_of(name, pairs) for name, pairs in known.items()},
                full_rank=full_rank,
            )  # fmt: skip
        return found[key]

    def matrices_of(self, estimator: str, spread: str) -> tuple[str, ...]:
        """Return the matrices whose eigenvectors the covariance of an estimator needs."""
        needed = ESTIMATORS[estimator]
        return needed[:1] if spread == "sampling" else needed  # the bread

    def meat_of(self, name: str) -> Meat:
        """Return G₀ beside the eigenvectors of a matrix, at the fit's noise."""
        pairs, known = self.pairs_of(name), self.diagnostics.get(name, {})
        if name == "opg":
            factor = 1 / float(self.noise or 1.0) ** 2
            _, mean = mean_curvature(self.spectra[name].values, self.level, known)
            return Meat.of_itself(pairs.values - self.level, factor * mean).to(pairs.values.device)
        if name not in self.meats:
            raise BadValueError(
                f"spread: expected 'posterior', got 'sampling' of a {self.estimator} fit that was "
                "saved by an earlier version, without the gradients' outer products. Fit again."
            )
        return self.meats[name].scaled(1 / float(self.noise or 1.0) ** 2)

    def _sampling_covariance(self, estimator: str, rank: int, full_rank: bool) -> Covariance:
        name = self.matrices_of(estimator, "sampling")[0]
        pairs, known = self.pairs_of(name), self.diagnostics.get(name, {})
        least = pairs.exact_least if name == "hessian" else None
        size, defects = self.num_parameters, self._defects_of(name, pairs)
        tail = Tail.after(pairs.values, rank, self.level, size, least, defects)
        rest, _ = mean_curvature(self.spectra[name].values, self.level, known)
        rest /= float(self.noise or 1.0) ** 2 if name == "opg" else 1.0
        meat = self.meat_of(name).first(tail.rank, pairs.values - self.level, rest)
        values = pairs.values[: tail.rank].double()
        examples = self.examples_for("sampling", estimator)
        return SamplingCovariance(name, values, tail, meat, examples, full_rank)

    def _defects_of(self, name: str, pairs: EigenPairs) -> Defects:
        """Bound how far the pairs of a matrix, and what is computed with them, can be from exact.

        Where pairs have not converged a larger eigenvalue may be missing: of G and GGN it is no
        more than what their trace leaves.
        """
        defects = _defects_of(name, pairs)
        trace, count = self.diagnostics.get(name, {}).get(TRACE), len(pairs)
        if trace is None or int(pairs.statistics.get("converged", count)) >= count:
            return defects
        factor = 1 / float(self.noise or 1.0) ** 2 if name == "opg" else 1.0
        left = factor * float(trace) - float((pairs.values - self.level).clamp(min=0).sum())
        above = max(0.0, left) + self.level - float(pairs.values[-1])
        return replace(defects, missed=max(0.0, above))

    @property
    def described_level(self) -> tuple[str, str, str]:
        """What λ is called here, its value, and how it was found, beside that of the evidence."""
        name = "factor of the λs" if isinstance(self.l2, Mapping) else "λ"
        value, known = f"{self.level:.2g}", self.diagnostics.get("l2")
        if known is None:  # no evidence, or an older file
            return name, value, "given"
        best, low, high = (f"{known[f'evidence{end}']:.2g}" for end in ("", "_low", "_high"))
        if known["how"] == AUTO and self.level == known["value"]:
            return name, value, f"by the evidence ({low} to {high})"
        return name, value, f"given; by the evidence {best} ({low} to {high})"

    def evidence(self, rank: int, estimator: str, spread: str = "posterior") -> Evidence:
        """Return what a fit knows of the quality of all its error bars."""
        network, known = self.network, self.diagnostics
        last = set(network.parameters.names) <= set(LastLayer().names(network.model))
        level: Any = known.get("l2")
        level = level if isinstance(level, Mapping) else {}
        names = ("relative_gradient", "distance_from_optimum", "gradient_to_noise")
        # Diagnostics from a file may be anything: what is no number is no evidence.
        gradient, distance, ratio, value = (
            float(each) if isinstance(each, int | float) else None
            for each in (*map(known.get, names), level.get("evidence"))
        )
        far, at_chance = off_optimum(gradient or 0.0, distance), known.get("at_chance") is True
        calibration = self.calibration.get(spread) if estimator == self.estimator else None
        is_given = level.get("how") != AUTO
        return Evidence(
            rank, estimator == "opg", last, far if is_given else "", at_chance, spread,
            l2=self.level, l2_evidence=value, is_given=is_given,
            is_contradicted=bool(is_given and value and contradicted(level)),
            gradient_to_noise=ratio,
            calibrated=calibration.replicas if calibration and calibration.is_good else 0,
        )  # fmt: skip

    def served(self, asked: str | Sequence[str] | None) -> list[str]:
        """Return the names of the wanted estimators; refuse those that the fit does not serve."""
        if asked is None:
            return [self.estimator]
        names = [asked] if isinstance(asked, str) else list(asked)
        possible = [name for name, needed in ESTIMATORS.items() if set(needed) <= set(self.spectra)]
        for name in names or ["an empty list"]:
            if name not in possible:
                advice = option("estimator", name)
                raise BadValueError(
                    f"estimator: expected one of {possible}, which this {self.estimator} fit can "
                    f"serve, got {name!r}."
                    + (f" Fit with {advice} for it." if name in ESTIMATORS else "")
                )
        return names

    def shows_progress(self, progress: Any) -> bool:
        """Return whether to show progress: as given, else as the fit does."""
        if progress is not None and not isinstance(progress, bool):
            raise BadValueError(f"progress: expected True, False or None, got {progress!r}.")
        return self.progress if progress is None else progress


def off_optimum(relative_gradient: float, distance: float | None) -> str:
    """Describe how far, in error bars, predictions are from an optimum's; empty where near."""
    if relative_gradient <= _FAR_RELATIVE or (distance is not None and distance <= _FAR):
        return ""
    if distance is None:
        return f"the gradient of the cost is {relative_gradient:.0%} of the sum of its two parts"
    return f"predictions at the optimum differ by about {distance:.1f} of their error bars"


def contradicted(noted: Mapping[str, Any]) -> bool:
    """Return whether a given λ is more than ten times off the interval of the evidence's."""
    ends = (noted.get(name) for name in ("value", "evidence_low", "evidence_high"))
    used, low, high = (float(x) if isinstance(x, int | float) else math.nan for x in ends)
    return used < low / CONTRADICTED or used > high * CONTRADICTED


def _defects_of(name: str, pairs: EigenPairs) -> Defects:
    """Bound how far the pairs of a matrix, and what is computed with them, can be from exact."""
    eps = torch.finfo(pairs.vectors.dtype).eps
    is_hessian = name == "hessian"
    second = _SECOND * eps * float(pairs.values[0].abs()) if is_hessian else 0.0
    return Defects(
        slack=pairs.slack, rounding=pairs.rounding + 0.51 * pairs.skew + _PROJECTION * eps,
        skew=pairs.skew, residuals=pairs.residual_norms, products=pairs.product_rounding + second,
        rows=0.0 if is_hessian else _ROWS * eps, result=_RESULT * eps, shift=_SHIFT * eps,
    )  # fmt: skip
