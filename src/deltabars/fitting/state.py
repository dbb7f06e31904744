"""The data of a fit: one frozen object, which every algorithm that works on a fit takes.

`DeltaFit` is this object with methods for users. Quantities that follow from the data alone
(covariances, the overlap of two bases) are computed when they are first needed, and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from deltabars.covariance import build_covariance
from deltabars.covariance.estimators import ESTIMATORS
from deltabars.covariance.estimators import Covariance
from deltabars.covariance.tail import Defects
from deltabars.curvature.pullback import Pullback
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import BadValueError, option
from deltabars.likelihoods.base import Likelihood
from deltabars.problem.behaviour import Behaviour
from deltabars.problem.inputs import Signature
from deltabars.problem.network import Network
from deltabars.problem.prior import L2Rates, Prior
from deltabars.runtime.vectors import products

# Units in the last place, of errors measured on networks of many kinds and doubled or more.
_ROWS = 8  # rows of gradients, relative to √λ₁
_SECOND = 8  # products with a Hessian, relative to λ₁, beyond what consistent products show
_PROJECTION = 2
_SHIFT = 8  # F
_RESULT = 4


@dataclass(frozen=True, eq=False, repr=False)
class FittedState:
    """The data of a fit.

    Attributes:
        estimator: `"hessian"`, `"opg"`, `"sandwich"` or `"ggn"`.
        prior: λ, or the λs by name pattern.
        num_examples: N.
        num_outputs: C.
        spectra: the eigenpairs by matrix: `"hessian"`, `"opg"`, `"ggn"`; of regression at noise 1.
        diagnostics: cost and gradient norm, how good the eigenpairs are, times, versions: as JSON.
        likelihood: the meaning of the outputs.
        network: a private copy of the model, with the trained weights.
        signature: the form of an input.
        weights: the fingerprint of the model's state.
        behaviour: outputs of generated inputs; None in files of older versions.
        memory_budget: bytes to stay within; None for half of what is free.
        progress: whether to show it by default.
        known_overlap: M = Q_Hᵀ Q_G where it is known already, say of vectors before rounding.
    """

    estimator: str
    prior: Prior
    num_examples: int
    num_outputs: int
    spectra: Mapping[str, EigenPairs]
    diagnostics: Mapping[str, Any]
    likelihood: Likelihood
    network: Network
    signature: Signature
    weights: str
    behaviour: Behaviour | None = None
    memory_budget: int | None = None
    progress: bool = True
    known_overlap: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("spectra", "diagnostics"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: dict(values[name]) for name in ("spectra", "diagnostics")}
        return _rebuilt, (type(self), values | plain)

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
        h, g = (self.spectra[name].vectors for name in ("hessian", "opg"))
        return products(h, g)

    @cached_property
    def _covariances(self) -> dict[tuple[str, int, bool], Covariance]:
        return {}

    def moved(self, **changes: Any) -> Self:
        """Replace some fields; the eigenvectors stay, and so does their overlap."""
        overlap = self.__dict__.get("overlap", self.known_overlap)
        return replace(self, known_overlap=overlap, **changes)

    def pairs_of(self, name: str) -> EigenPairs:
        """Return the eigenpairs of a matrix at the fit's noise σ.

        The spectra are those of regression at σ = 1. The Hessian and the GGN of the loss over σ²
        are those over σ², and N/σ² takes care of it; the outer products of gradients are over σ⁴,
        so that in units of σ² their data part is over σ² once more.
        """
        pairs = self.spectra[name]
        if name != "opg" or self.noise in (None, 1):
            return pairs
        factor = 1 / float(self.noise or 1.0) ** 2
        return pairs.mapped(factor, self.level * (1 - factor))

    def covariance_of(self, estimator: str, rank: int, full_rank: bool = True) -> Covariance:
        """Return Σ of an estimator that the fit serves, from its first `rank` pairs."""
        if not isinstance(full_rank, bool):
            raise BadValueError(f"full_rank: expected True or False, got {full_rank!r}.")
        key = estimator, rank, full_rank
        if key not in self._covariances:
            known = {name: self.pairs_of(name) for name in self.spectra}
            both = estimator == "sandwich"
            self._covariances[key] = build_covariance(
                estimator,
                {name: pairs.values for name, pairs in known.items()},
                rank=rank,
                l2=self.level,
                num_parameters=self.num_parameters,
                num_examples=self.informative_examples,
                overlap=self.overlap if both else None,
                least_hessian=self.spectra["hessian"].exact_least if both else None,
                defects={name: _defects_of(name, pairs) for name, pairs in known.items()},
                full_rank=full_rank,
            )
        return self._covariances[key]

    def served(self, asked: str | Sequence[str] | None) -> list[str]:
        """Return the names of the wanted estimators; refuse those that the fit does not serve."""
        if asked is None:
            return [self.estimator]
        names = [asked] if isinstance(asked, str) else list(asked)
        possible = [
            name
            for name, needed in ESTIMATORS.items()
            if all(matrix in self.spectra for matrix in needed)
        ]
        for name in names:
            if name not in possible:
                advice = (
                    f" Fit with {option('estimator', name)} for it." if name in ESTIMATORS else ""
                )
                raise BadValueError(
                    f"estimator: expected one of {possible}, which this {self.estimator} fit can "
                    f"serve, got {name!r}.{advice}"
                )
        if not names:
            raise BadValueError(
                f"estimator: expected one or more of {possible}, got an empty list."
            )
        return names

    def shows_progress(self, progress: Any) -> bool:
        """Return whether to show progress: as given, else as the fit does."""
        if progress is not None and not isinstance(progress, bool):
            raise BadValueError(f"progress: expected True, False or None, got {progress!r}.")
        return self.progress if progress is None else progress


def _rebuilt(kind: type[FittedState], values: dict[str, Any]) -> FittedState:
    return kind(**values)


def _defects_of(name: str, pairs: EigenPairs) -> Defects:
    """Bound how far the pairs of a matrix, and what is computed with them, can be from exact."""
    eps = torch.finfo(pairs.vectors.dtype).eps
    is_hessian = name == "hessian"
    second = _SECOND * eps * float(pairs.values[0].abs()) if is_hessian else 0.0
    return Defects(
        slack=pairs.slack,
        rounding=pairs.rounding + 0.51 * pairs.skew + _PROJECTION * eps,
        skew=pairs.skew,
        residuals=pairs.residual_norms,
        products=pairs.product_rounding + second,
        rows=0.0 if is_hessian else _ROWS * eps,
        result=_RESULT * eps,
        shift=_SHIFT * eps,
    )
