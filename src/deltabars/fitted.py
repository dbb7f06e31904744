"""DeltaFit: what a fit knows, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor

from deltabars.behaviour import Behaviour
from deltabars.certifying import certify
from deltabars.choosing import covariance_of
from deltabars.copies import offloaded, reduced
from deltabars.covariance import Covariance
from deltabars.curvature.pullback import Pullback
from deltabars.decay import L2, Decay
from deltabars.describing import Shown
from deltabars.effective import effective_parameters, effective_parameters_interval
from deltabars.eigen import EigenPairs
from deltabars.inputs import Signature
from deltabars.likelihoods import Likelihood
from deltabars.moderation import SAMPLES
from deltabars.network import Network
from deltabars.noise import at_noise, with_noise
from deltabars.predicting import predict
from deltabars.prediction import Prediction
from deltabars.sampling import sample
from deltabars.saving import MAX_FILE_SIZE, save
from deltabars.shifting import with_l2
from deltabars.tuning import Tuning, tune_l2
from deltabars.vectors import products


@dataclass(frozen=True, eq=False, repr=False)
class DeltaFit(Shown):
    """The eigenpairs of a trained network's curvature, ready to put error bars on predictions.

    Immutable: the weights are those of the moment of the fit, whatever happens to the model.

    Attributes:
        estimator: `"hessian"`, `"opg"`, `"sandwich"` or `"ggn"`.
        decay: λ, or the λs by name pattern.
        num_examples: N.
        num_outputs: C.
        spectra: the eigenpairs by matrix: `"hessian"`, `"opg"`, `"ggn"`; of regression at noise 1.
        diagnostics: cost and gradient norm of the trained weights; for each matrix how its
            eigenpairs were found and how good they are; times and versions.
    """

    estimator: str
    decay: Decay
    num_examples: int
    num_outputs: int
    spectra: Mapping[str, EigenPairs]
    diagnostics: Mapping[str, Any]
    likelihood: Likelihood
    network: Network
    signature: Signature
    weights: str  # the fingerprint of the model's state
    behaviour: Behaviour | None = None  # None of files that do not have it
    memory_budget: int | None = None
    progress: bool = True
    known_overlap: Tensor | None = None  # of the eigenvectors before they were rounded
    _covariances: dict[tuple[str, int, bool], Covariance] = field(default_factory=dict, repr=False)

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.network.parameters.size

    @property
    def l2(self) -> L2:
        """λ as it was given: a number, or numbers by name pattern."""
        return self.decay.given

    @property
    def level(self) -> float:
        """λ as it is in the eigenvalues: `l2`, or 1 times a common factor where that is several."""
        return self.decay.level

    @property
    def rank(self) -> int:
        """K, the number of computed eigenpairs; of a sandwich the larger one, if they differ."""
        return max(len(pairs) for pairs in self.spectra.values())

    @property
    def noise(self) -> float | None:
        """σ of a Gaussian likelihood, given or estimated; None for the others."""
        return self.likelihood.target_noise

    @property
    def effective_parameters(self) -> float:
        """MacKay's number of well-determined parameters, Σₖ (λₖ − λ)/λₖ; a sandwich's of H."""
        return effective_parameters(self)

    @property
    def effective_parameters_interval(self) -> tuple[float, float]:
        """The interval that the full sum lies in, if the tail lies between λ and λ_K.

        Raises:
            BadValueError: no eigenvalue is positive.
        """
        return effective_parameters_interval(self)

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
        progress: bool | None = None,
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
            progress: whether to show it; as the fit does by default.

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
            progress=progress,
        )

    def certify(
        self,
        inputs: Any,
        data: Any,
        *,
        tolerance: float = 1e-3,
        space: str = "probability",
        estimator: str | None = None,
        max_products: int | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Predictions whose error bars are as exact as asked for: `std_error ≤ tolerance·std`.

        What the eigenpairs leave open is closed by conjugate gradients on the training data
        (`deltabars.eigen.enclosing`). The interval is a theorem: no eigenvalue of G and GGN is
        below λ, and more it does not need.

        Args:
            inputs, space, batch_size, progress: as for `predict`; inputs of choice, because it
                costs more.
            data: the training data of the fit.
            tolerance: for half of the width of each std's interval, relative to its middle.
            estimator: `"opg"` or `"ggn"`; a sandwich fit serves `"opg"`.
            max_products: passes over the data a batch at the most; 1,000 by default.

        Cost: about √(λ_K/λ)·log(1/tolerance) passes over the data for each batch of inputs.
        """
        return certify(
            self,
            inputs,
            data,
            tolerance=tolerance,
            space=space,
            estimator=estimator,
            max_products=max_products,
            batch_size=batch_size,
            progress=progress,
        )

    def with_l2(self, l2: L2) -> DeltaFit:
        """The same fit for another λ: the eigenvalues move by the difference. Cost: nothing.

        The weights ω̂ stay as they are, and so do the diagnostics (`diagnostics["fitted_l2"]`).
        A noise σ that was estimated depends on λ and is estimated anew; one that was given stays.
        """
        return with_l2(self, l2)

    def tune_l2(self, data: Any = None, method: str = "marginal_likelihood") -> Tuning:
        """The λ that the data prefer, for networks trained with none, or with an unknown one.

        The weights ω̂ stay as they are: what is tuned is the width of the error bars.

        Args:
            data: for `"validation"`: inputs and targets that were not trained on.
            method: `"marginal_likelihood"` of Laplace's method at ω̂ (see `deltabars.tuning`), or
                `"validation"`: the mean loss of moderated predictions.

        Returns:
            A Tuning: `l2`, the `fit` with it, and the curve with its interval, to be drawn by
            `deltabars.report.tuning.save_tuning`. Cost: K operations a λ, or one prediction.
        """
        return tune_l2(self, data, method)

    def with_noise(self, noise: float | str | None) -> DeltaFit:
        """The same fit of a Gaussian likelihood at another noise σ. Cost: nothing.

        `"estimate"` (or None) takes that of the training residuals: σ̂² = RSS/(N·C − γ), γ the
        effective parameters in the K pairs.
        """
        return with_noise(self, noise)

    def sample(self, n: int, seed: int = 0, *, full_rank: bool = True) -> Tensor:
        """`n` parameter vectors (n, P) from N(ω̂, Σ), Σ the covariance of the fit.

        ω = ω̂ + N^{-½}(Q Λ^{-½} Qᵀz + λ̃^{-½}(z − QQᵀz)) with z ~ N(0, I); for the sandwich
        ω̂ + N^{-½} H̃⁻¹ G̃^{½} z. Split one into named tensors with
        `fit.network.parameters.unflatten`.

        At full rank all P weights scatter, by about (λN)^{-½} where the data say nothing, far out
        of where a network is linear; `full_rank=False` takes the K directions alone.
        """
        return sample(self, n, seed, full_rank)

    def save(
        self, path: Any, *, dtype: Any = None, max_file_size: int | str = MAX_FILE_SIZE
    ) -> None:
        """Write the fit; read it again with `deltabars.load(path, model)`.

        Args:
            path: a file; a folder of several and their index where the eigenvectors take more than
                `max_file_size` (such as `"2GB"`), or where `path` is a folder or ends in /.
            dtype: what eigenvectors are stored in: as they are by default; float32, bfloat16 or
                float16. What that loses is measured (4·K²·P operations), told in
                `diagnostics["storage"]` once loaded, and counted in `std_low` and `std_high`.
        """
        save(self, path, dtype, max_file_size)

    def offloaded(self) -> DeltaFit:
        """The same fit with its eigenvectors in the CPU's memory, for a device that is small."""
        return offloaded(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    @property
    def informative_examples(self) -> float:
        """N/σ²: of regression with noise σ an example says 1/σ² times as much; else N."""
        return self.num_examples / (self.noise or 1.0) ** 2

    def pairs_of(self, name: str) -> EigenPairs:
        """The eigenpairs of a matrix at the fit's noise (see `deltabars.noise`)."""
        return at_noise(name, self.spectra[name], self.level, self.noise)

    @cached_property
    def pullback(self) -> Pullback:
        """From rows of cotangents of the outputs to rows of derivatives by the parameters."""
        return Pullback(self.network)

    @cached_property
    def overlap(self) -> Tensor:
        """M = Q_Hᵀ Q_G (K, K), in float64."""
        known = self.known_overlap
        h, g = (self.spectra[name].vectors for name in ("hessian", "opg"))
        return products(h, g) if known is None else known

    def covariance_of(self, estimator: str, rank: int, full_rank: bool = True) -> Covariance:
        """Σ of an estimator that the fit serves, from its first `rank` pairs."""
        key = (estimator, rank, full_rank)
        if key not in self._covariances or not isinstance(full_rank, bool):  # 1 == True
            self._covariances[key] = covariance_of(self, estimator, rank, full_rank)
        return self._covariances[key]
