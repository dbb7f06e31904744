"""Parameter vectors drawn from the covariance of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.low_rank import Covariance
from deltabars.curvature.pullback import Pullback
from deltabars.eigen.pairs import EigenPairs, is_whole
from deltabars.errors import BadValueError
from deltabars.fitting.certifying import certify
from deltabars.fitting.core import (
    at_noise,
    covariance_of,
    effective_parameters,
    effective_parameters_interval,
    with_l2,
    with_noise,
)
from deltabars.fitting.predicting import predict
from deltabars.fitting.saving import MAX_FILE_SIZE, save
from deltabars.fitting.tuning import Tuning, tune_l2
from deltabars.likelihoods.base import Likelihood
from deltabars.prediction.averaging import SAMPLES
from deltabars.prediction.display import draw_fit, html_table, paragraph
from deltabars.prediction.prediction import Prediction
from deltabars.problem.behaviour import Behaviour
from deltabars.problem.inputs import Signature
from deltabars.problem.network import Network
from deltabars.problem.prior import L2, Decay
from deltabars.runtime.precision import full_precision
from deltabars.runtime.vectors import PartedVectors, products


def sample(fit: DeltaFit, n: int, seed: int, full_rank: bool) -> Tensor:
    """`n` parameter vectors (n, P); the arguments are those of `DeltaFit.sample`, and checked."""
    if not is_whole(n) or n < 1:
        raise BadValueError(f"n: expected a whole number from 1 on, got {n!r}.")
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise BadValueError(f"seed: expected a whole number from 0 on, got {seed!r}.")
    network = fit.network
    generator = torch.Generator().manual_seed(int(seed))
    noise = torch.randn((n, fit.num_parameters), generator=generator, dtype=torch.float64)
    noise = noise.to(network.device, network.dtype)
    vectors = {name: pairs.vectors for name, pairs in fit.spectra.items()}
    with full_precision(network.device):
        covariance = fit.covariance_of(fit.estimator, fit.rank, full_rank)
        drawn = covariance.root(vectors, noise)
        return network.point + (drawn if network.scale is None else drawn * network.scale)


def reduced(fit: DeltaFit) -> tuple[Any, ...]:
    """How to make the fit again: from its fields, without what was kept of computations."""
    values = {field.name: getattr(fit, field.name) for field in fields(fit)}
    plain = {name: dict(values[name]) for name in ("spectra", "diagnostics")}
    return _rebuilt, (type(fit), values | plain | {"_covariances": {}})


def offloaded(fit: DeltaFit) -> DeltaFit:
    """The fit with eigenvectors in the CPU's memory; columns come to the device when needed."""
    device = fit.network.device
    spectra = {
        name: replace(pairs, vectors=PartedVectors.of(pairs.vectors.cpu(), device))
        if isinstance(pairs.vectors, Tensor)
        else pairs
        for name, pairs in fit.spectra.items()
    }
    return replace(fit, spectra=spectra, _covariances={})


def _rebuilt(kind: type[DeltaFit], values: dict[str, Any]) -> DeltaFit:
    return kind(**values)


SANDWICH, REACH = "sandwich", "interval_reach"
WORTH_READING = 0.5  # of a std: an interval that reaches further says little


class Shown:
    """How a fit shows itself: as text, in a notebook, and drawn."""

    def __repr__(self: Any) -> str:
        return describe(self)

    def _repr_html_(self: Any) -> str:
        return describe_in_html(self)

    def plot_spectrum(self: Any, ax: Any = None) -> Any:
        """Draw the eigenvalues against their index into `ax`, or a new figure; returns the Axes.

        Dotted is λ; shaded is where the eigenvalues lie that were not computed, if none is below λ.
        """
        return draw_fit(self, ax)


def describe(fit: DeltaFit) -> str:
    """What was fitted, its spectra, and how many parameters they determine."""
    numbers = ", ".join(f"{name} = {value}" for name, value in _numbers(fit).items())
    lines = [f"DeltaFit: {fit.estimator}, {numbers}"]
    for name, pairs in fit.spectra.items():
        lines.append(
            f"  {name}: eigenvalues {float(pairs.values[0]):.4g} … "
            f"{float(pairs.values[-1]):.4g}"
            f", largest residual {float(pairs.residuals.max()):.1g}"
        )
    lines += [f"  {note}" for note in _notes(fit)]
    return "\n".join(lines)


def describe_in_html(fit: DeltaFit) -> str:
    """The same as tables."""
    numbers = _numbers(fit)
    spectra = [
        [
            name,
            f"{float(pairs.values[0]):.4g}",
            f"{float(pairs.values[-1]):.4g}",
            f"{float(pairs.values[-1]) / fit.level:.4g}",
            f"{float(pairs.residuals.max()):.1g}",
        ]
        for name, pairs in fit.spectra.items()
    ]
    titles = ["matrix", "λ₁", "λ_K", "λ_K / λ", "largest residual"]
    return (
        paragraph(f"DeltaFit: {fit.estimator}")
        + html_table(list(numbers), [list(numbers.values())])
        + html_table(titles, spectra)
        + "".join(paragraph(note) for note in _notes(fit))
    )


def _numbers(fit: DeltaFit) -> dict[str, str]:
    numbers = {
        "N": f"{fit.num_examples:,}",
        "P": f"{fit.num_parameters:,}",
        "K": f"{fit.rank:,}",
        "λ": _in_words(fit.l2),
    }
    return numbers if fit.noise is None else numbers | {"σ": f"{fit.noise:g}"}


def _notes(fit: DeltaFit) -> list[str]:
    notes = []
    hessian = fit.spectra.get("hessian")
    if hessian is not None and hessian.least < fit.level:
        notes.append(
            f"the hessian's spectrum reaches {fit.level - hessian.least:.3g} below λ: its "
            "bounds are about the spectrum corrected to λ"
        )
    reach = fit.diagnostics.get(SANDWICH, {}).get(REACH, 0.0)
    if reach > WORTH_READING:
        notes.append(
            f"the sandwich's intervals say little: up to ±{reach:.2g} times the std of what is "
            "outside the pairs; a larger rank narrows them"
        )
    lost = max(pairs.rounding for pairs in fit.spectra.values())
    if lost:
        notes.append(f"eigenvectors were rounded by up to {lost:.2g}, which the bounds count")
    return [*notes, f"effective parameters: {fit.effective_parameters:.1f} in the K pairs"]


def _in_words(l2: L2) -> str:
    if not isinstance(l2, Mapping):
        return f"{l2:g}"
    return ", ".join(f"{value:g} ({pattern})" for pattern, value in l2.items())


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
