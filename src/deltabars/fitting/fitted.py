"""`DeltaFit`: the public face of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from deltabars.distributed.vectors import PartedVectors
from deltabars.eigen.pairs import EigenPairs
from deltabars.fitting.certifying import certify
from deltabars.fitting.describe import (
    describe,
    describe_in_html,
    draw_spectra,
    effective_parameters,
    effective_parameters_interval,
)
from deltabars.fitting.hyperparameters import with_l2, with_noise
from deltabars.fitting.predicting import predict
from deltabars.fitting.sampling import sample
from deltabars.fitting.saving import MAX_FILE_SIZE, save
from deltabars.fitting.state import FittedState
from deltabars.fitting.tuning import Tuning, tune_l2
from deltabars.likelihoods.base import Likelihood
from deltabars.prediction.averaging import SAMPLES
from deltabars.prediction.prediction import Prediction
from deltabars.problem.inputs import Signature
from deltabars.problem.network import Network
from deltabars.problem.prior import L2


@dataclass(frozen=True, eq=False, repr=False)
class DeltaFit:
    """The eigenpairs of a trained network's curvature, ready to put error bars on predictions.

    Immutable: the weights are those of the moment of the fit, whatever happens to the model.

    Attributes:
        state: the data of the fit, which the methods here work on.
    """

    state: FittedState

    @property
    def estimator(self) -> str:
        """`"hessian"`, `"opg"`, `"sandwich"` or `"ggn"`."""
        return self.state.estimator

    @property
    def l2(self) -> L2:
        """λ as it was given: a number, or numbers by name pattern."""
        return self.state.l2

    @property
    def level(self) -> float:
        """λ as it is in the eigenvalues: `l2`, or 1 times a common factor where that is several."""
        return self.state.level

    @property
    def num_examples(self) -> int:
        """N."""
        return self.state.num_examples

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.state.num_parameters

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.state.num_outputs

    @property
    def rank(self) -> int:
        """K, the number of computed eigenpairs; the larger one of a sandwich."""
        return self.state.rank

    @property
    def spectra(self) -> Mapping[str, EigenPairs]:
        """The eigenpairs by matrix: `"hessian"`, `"opg"`, `"ggn"`; of regression at noise 1."""
        return self.state.spectra

    @property
    def diagnostics(self) -> Mapping[str, Any]:
        """Cost and gradient norm, how good the eigenpairs of each matrix are, times, versions."""
        return self.state.diagnostics

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean."""
        return self.state.likelihood

    @property
    def noise(self) -> float | None:
        """σ of a Gaussian likelihood, given or estimated; None for the others."""
        return self.state.noise

    @property
    def network(self) -> Network:
        """The fit's own copy of the model, with the trained weights."""
        return self.state.network

    @property
    def signature(self) -> Signature:
        """What an input is made of."""
        return self.state.signature

    @property
    def effective_parameters(self) -> float:
        """MacKay's number of well-determined parameters, Σₖ (λₖ − λ)/λₖ; a sandwich's of H."""
        return effective_parameters(self.state)

    @property
    def effective_parameters_interval(self) -> tuple[float, float]:
        """The interval that the full sum lies in, if the tail lies between λ and λ_K.

        Raises:
            BadValueError: no eigenvalue is positive.
        """
        return effective_parameters_interval(self.state)

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
            self.state,
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
        (`deltabars.eigen.quadrature`). The interval is a theorem: no eigenvalue of G and GGN is
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
            self.state,
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
        return DeltaFit(with_l2(self.state, l2))

    def tune_l2(self, data: Any = None, method: str = "marginal_likelihood") -> Tuning:
        """The λ that the data prefer, for networks trained with none, or with an unknown one.

        The weights ω̂ stay as they are: what is tuned is the width of the error bars.

        Args:
            data: for `"validation"`: inputs and targets that were not trained on.
            method: `"marginal_likelihood"` of Laplace's method at ω̂ (see `deltabars.fitting.tuning`), or
                `"validation"`: the mean loss of moderated predictions.

        Returns:
            A Tuning: `l2`, the `fit` with it, and the curve with its interval, to be drawn by
            `deltabars.report.spectra.save_tuning`. Cost: K operations a λ, or one prediction.
        """
        return tune_l2(self.state, data, method, self.with_l2)

    def with_noise(self, noise: float | str | None) -> DeltaFit:
        """The same fit of a Gaussian likelihood at another noise σ. Cost: nothing.

        `"estimate"` (or None) takes that of the training residuals: σ̂² = RSS/(N·C − γ), γ the
        effective parameters in the K pairs.
        """
        return DeltaFit(with_noise(self.state, noise))

    def sample(self, n: int, seed: int = 0, *, full_rank: bool = True) -> Tensor:
        """`n` parameter vectors (n, P) from N(ω̂, Σ), Σ the covariance of the fit.

        ω = ω̂ + N^{-½}(Q Λ^{-½} Qᵀz + λ̃^{-½}(z − QQᵀz)) with z ~ N(0, I); for the sandwich
        ω̂ + N^{-½} H̃⁻¹ G̃^{½} z. Split one into named tensors with
        `fit.network.parameters.unflatten`.

        At full rank all P weights scatter, by about (λN)^{-½} where the data say nothing, far out
        of where a network is linear; `full_rank=False` takes the K directions alone.
        """
        return sample(self.state, n, seed, full_rank)

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
        save(self.state, path, dtype, max_file_size)

    def offloaded(self) -> DeltaFit:
        """The same fit with its eigenvectors in the CPU's memory, for a device that is small."""
        device = self.network.device
        spectra = {
            name: replace(pairs, vectors=PartedVectors.of(pairs.vectors.cpu(), device))
            if isinstance(pairs.vectors, Tensor)
            else pairs
            for name, pairs in self.spectra.items()
        }
        return DeltaFit(self.state.moved(spectra=spectra))

    def with_progress(self, shown: bool) -> DeltaFit:
        """The same fit, which shows progress by default or does not."""
        return DeltaFit(self.state.moved(progress=shown))

    def plot_spectrum(self, ax: Any = None) -> Any:
        """Draw the eigenvalues against their index into `ax`, or a new figure; returns the Axes.

        Dotted is λ; shaded is where the eigenvalues lie that were not computed, if none is below λ.
        """
        return draw_spectra(self.state, ax)

    def __repr__(self) -> str:
        return describe(self.state)

    def _repr_html_(self) -> str:
        return describe_in_html(self.state)
