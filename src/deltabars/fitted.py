"""DeltaFit: what a fit knows, and what can be asked of it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance import (
    ESTIMATORS,
    Covariance,
    Tail,
    build_covariance,
    warn_about_spectrum,
)
from deltabars.curvature.pullback import Pullback
from deltabars.eigen import EigenPairs
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.inputs import Signature
from deltabars.likelihoods import Likelihood
from deltabars.moderation import SAMPLES
from deltabars.network import Network
from deltabars.precision import full_precision
from deltabars.predicting import predict
from deltabars.problem import check_l2
from deltabars.saving import save
from deltabars.summation import inner


@dataclass(frozen=True, eq=False)
class DeltaFit:
    """The eigenpairs of a trained network's curvature, ready to put error bars on predictions.

    Immutable: the weights are those of the moment of the fit, whatever happens to the model.

    Attributes:
        estimator: `"hessian"`, `"opg"`, `"sandwich"` or `"ggn"`.
        l2: λ.
        num_examples: N.
        num_outputs: C.
        spectra: the eigenpairs by matrix: `"hessian"`, `"opg"`, `"ggn"`.
        diagnostics: cost and gradient norm of the trained weights; for each matrix how its
            eigenpairs were found and how good they are; times and versions.
    """

    estimator: str
    l2: float
    num_examples: int
    num_outputs: int
    spectra: Mapping[str, EigenPairs]
    diagnostics: Mapping[str, Any]
    likelihood: Likelihood
    network: Network
    signature: Signature
    weights: str  # the fingerprint of the model's state
    memory_budget: int | None = None
    progress: bool = True
    _covariances: dict[tuple[str, int, bool], Covariance] = field(default_factory=dict, repr=False)

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.network.parameters.size

    @property
    def rank(self) -> int:
        """K, the number of computed eigenpairs of each matrix."""
        return min(len(pairs) for pairs in self.spectra.values())

    @property
    def effective_parameters(self) -> float:
        """MacKay's number of well-determined parameters, Σₖ (λₖ − λ)/λₖ over the K pairs.

        A sandwich fit answers for its Hessian. See `effective_parameters_interval` for the rest
        of the spectrum.
        """
        values = self._main_values
        return float(((values - self.l2) / values).sum())

    @property
    def effective_parameters_interval(self) -> tuple[float, float]:
        """The interval that the full sum lies in, if the tail lies between λ and λ_K.

        Raises:
            BadValueError: no eigenvalue is positive.
        """
        values = self._main_values
        last = Tail.after(values, len(values), self.l2, self.num_parameters).last
        slack = self.spectra[ESTIMATORS[self.estimator][0]].slack
        rest = self.num_parameters - len(values)
        low = self.effective_parameters + min(0.0, rest * (1 - self.l2 / last))
        most = float((1 - self.l2 / (values + slack)).sum())
        return low, most + max(0.0, rest * (1 - self.l2 / (last + slack)))

    def __post_init__(self) -> None:
        for name in ("spectra", "diagnostics"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def predict(
        self,
        inputs: Any,
        *,
        rank: int | None = None,
        full_rank: bool = True,
        space: str = "probability",
        covariance: bool = False,
        bound: str = "rigorous",
        estimator: str | Sequence[str] | None = None,
        classes: str | Sequence[int] | None = None,
        moderation: str | None = "auto",
        samples: int = SAMPLES,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> Any:
        """Predictions with error bars.

        Args:
            inputs: a tensor (or tuple or mapping of tensors), a DataLoader or a Dataset; targets
                in it are left out.
            rank: use the first pairs only; all of them by default.
            full_rank: close the spectrum with λ (the default), or use the K pairs alone.
            space: `"probability"` for error bars of the mean, `"logit"` for those of the outputs.
            covariance: compute the covariance of the classes as well.
            bound: `"rigorous"`, or `"paper"` for the published formulas.
            estimator: the fit's own by default; a sandwich fit also serves `"hessian"` and
                `"opg"`. A list of names gives a dict of predictions, at the cost of one.
            classes: all of them by default; `"top5"` (or any number) for each input's most probable
                ones, or a list of class numbers: only their rows are computed, and only they count
                in the score.
            moderation: how `moderated`, `entropy` and `mutual_information` are computed: from
                `samples` points of the logits' scatter (`"sampling"`), by a formula without the
                mutual information (`"probit"`), or not (None). `"auto"` samples up to 100 classes.
            samples, seed: of the sampling; the same ones for all inputs.
            batch_size: inputs worked on at a time; chosen by the memory budget by default.

        Returns:
            A Prediction, or a dict of them.

        Cost: C backward passes an input, and for each matrix P·K operations an input for dense
        layers, C·P·K for others; memory batch_size·C numbers for each parameter of the largest
        layer and for each activation. C is the number of `classes` asked for.
        """
        return predict(
            self,
            inputs,
            rank=rank,
            full_rank=full_rank,
            space=space,
            covariance=covariance,
            bound=bound,
            estimator=estimator,
            classes=classes,
            moderation=moderation,
            samples=samples,
            seed=seed,
            batch_size=batch_size,
        )

    def with_l2(self, l2: float) -> DeltaFit:
        """The same fit for another λ: the eigenvalues move by the difference. Cost: nothing.

        The eigenvectors do not depend on λ, but the weights ω̂ do: they stay as they are, and so do
        the diagnostics, which are those of the fit (`diagnostics["fitted_l2"]`).
        """
        shift = check_l2(l2) - self.l2
        spectra = {name: pairs.shifted(shift) for name, pairs in self.spectra.items()}
        for name, pairs in spectra.items():
            warn_about_spectrum(name, pairs.values, float(l2), self.num_parameters)
        diagnostics = {**self.diagnostics, "fitted_l2": self.diagnostics.get("fitted_l2", self.l2)}
        moved = replace(
            self, l2=float(l2), spectra=spectra, diagnostics=diagnostics, _covariances={}
        )
        if "_overlap" in self.__dict__:
            moved.__dict__["_overlap"] = self._overlap  # it depends on the vectors alone
        return moved

    def sample(self, n: int, seed: int = 0, *, full_rank: bool = True) -> Tensor:
        """`n` parameter vectors (n, P) from N(ω̂, Σ), Σ the covariance of the fit.

        ω = ω̂ + N^{-½}(Q Λ^{-½} Qᵀz + λ̃^{-½}(z − QQᵀz)) with z ~ N(0, I); for the sandwich
        ω̂ + N^{-½} H̃⁻¹ G̃^{½} z. Split one into named tensors with
        `fit.network.parameters.unflatten`.

        At full rank all P weights scatter, by about (λN)^{-½} where the data say nothing, which can
        lead far out of where a network is linear; `full_rank=False` takes the K directions alone.
        """
        if not is_whole(n) or n < 1:
            raise BadValueError(f"n: expected a whole number from 1 on, got {n!r}.")
        if not is_whole(seed) or not 0 <= seed < 2**63:
            raise BadValueError(f"seed: expected a whole number from 0 on, got {seed!r}.")
        generator = torch.Generator().manual_seed(int(seed))
        shape = (n, self.num_parameters)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        noise = noise.to(self.network.device, self.network.dtype)
        vectors = {name: pairs.vectors for name, pairs in self.spectra.items()}
        with full_precision(self.network.device):
            covariance = self.covariance_of(self.estimator, self.rank, full_rank)
            return self.network.point + covariance.root(vectors, noise)

    def save(self, path: Any) -> None:
        """Write the fit to one file; read it again with `deltabars.load(path, model)`."""
        save(self, path)

    def __repr__(self) -> str:
        lines = [
            f"DeltaFit: {self.estimator}, N = {self.num_examples:,}, P = {self.num_parameters:,}, "
            f"K = {self.rank:,}, λ = {self.l2:g}"
        ]
        for name, pairs in self.spectra.items():
            lines.append(
                f"  {name}: eigenvalues {float(pairs.values[0]):.4g} … "
                f"{float(pairs.values[-1]):.4g}"
                f", largest residual {float(pairs.residuals.max()):.1g}"
            )
        hessian = self.spectra.get("hessian")
        if hessian is not None and hessian.least < self.l2:
            lines.append(
                f"  the hessian's spectrum reaches {self.l2 - hessian.least:.3g} below λ: its "
                "bounds are about the spectrum corrected to λ"
            )
        lines.append(f"  effective parameters: {self.effective_parameters:.1f} in the K pairs")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    @property
    def _main_values(self) -> Tensor:
        values = self.spectra[ESTIMATORS[self.estimator][0]].values
        return values[values > 0]  # the others have no place in a covariance

    @cached_property
    def pullback(self) -> Pullback:
        """From rows of cotangents of the outputs to rows of derivatives by the parameters."""
        return Pullback(self.network)

    @cached_property
    def _overlap(self) -> Tensor:
        """M = Q_Hᵀ Q_G (K, K), in float64."""
        return inner(self.spectra["hessian"].vectors, self.spectra["opg"].vectors)

    def covariance_of(self, estimator: str, rank: int, full_rank: bool = True) -> Covariance:
        """Σ of an estimator that the fit serves, from its first `rank` pairs."""
        if not isinstance(full_rank, bool):
            raise BadValueError(f"full_rank: expected True or False, got {full_rank!r}.")
        key = (estimator, rank, full_rank)
        if key not in self._covariances:
            self._covariances[key] = build_covariance(
                estimator,
                {name: pairs.values for name, pairs in self.spectra.items()},
                rank=rank,
                l2=self.l2,
                num_parameters=self.num_parameters,
                num_examples=self.num_examples,
                overlap=self._overlap if estimator == "sandwich" else None,
                least_hessian=self.spectra["hessian"].exact_least
                if estimator == "sandwich"
                else None,
                slacks={name: pairs.slack for name, pairs in self.spectra.items()},
                full_rank=full_rank,
            )
        return self._covariances[key]
