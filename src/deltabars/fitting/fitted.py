"""`DeltaFit`: the data of a fit, with the methods that users call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.base import Tail
from deltabars.covariance.estimators import BOUNDS
from deltabars.curvature.sensitivity import check_space
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, IntervalWarning, option, warn
from deltabars.fitting.certifying import certify
from deltabars.fitting.files import MAX_FILE_SIZE, read_fields, save
from deltabars.fitting.replicas import calibrate
from deltabars.fitting.state import FittedState, check_spread, check_whole
from deltabars.fitting.tuning import Tuning, tune_l2, with_l2, with_noise
from deltabars.prediction.averaging import SAMPLES, choose_moderation
from deltabars.prediction.display import axes_or_new, html_table, paragraph
from deltabars.prediction.prediction import Prediction, mean_bound, tail_share
from deltabars.prediction.scoring import Classes, Scorer, choose_classes
from deltabars.problem.parameters import L2Rates, LastLayer
from deltabars.runtime.precision import full_precision
from deltabars.runtime.vectors import PartedVectors, first

_WIDER = 1.0  # of the value: intervals that reach further are warned of
_WORTH_READING = 0.5  # of a std: an interval that reaches further says little
_GAP = 0.12  # the drawn width of what was not computed, as a share of the rest


@dataclass(frozen=True, eq=False, repr=False)
class DeltaFit(FittedState):
    """The eigenpairs of a trained network's curvature, which put error bars on its predictions.

    Immutable, whatever happens to the model. The attributes are those of `FittedState`:
    `estimator`, `l2`, `num_examples` (N), `num_parameters` (P), `num_outputs` (C), `rank` (K),
    `spectra`, `diagnostics`, `likelihood`, `noise`, `network`.
    """

    def predict(
        self,
        inputs: Any,
        *,
        rank: int | None = None,
        full_rank: bool = True,
        space: str = "probability",
        spread: str = "posterior",
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
        """Predict with error bars.

        Args:
            inputs: a tensor (or tuple or mapping of tensors), a DataLoader or a Dataset; targets
                in it are ignored.
            rank: use the first pairs only; all of them by default.
            full_rank: close the spectrum with λ (the default), or use the K pairs alone.
            space: `"probability"` for error bars of the mean, `"logit"` for those of the outputs.
            spread: `"posterior"` for what the data leave open, the paper's numbers; `"sampling"`
                for how far a prediction would move if the network were trained again on as many
                other examples, B⁻¹G₀B⁻¹/N.
            covariance: compute the covariance of the classes as well.
            bound: `"rigorous"`, or `"paper"` for the published formulas.
            estimator: the fit's own by default; a sandwich fit also serves `"hessian"` and
                `"opg"`. A list of names gives a dict of predictions, at the cost of one.
            classes: all of them by default; `"top5"` (or any number) for each input's most probable
                ones, or a list of numbers: only they are computed, and count in the score.
            moderation: how `moderated`, `entropy` and `mutual_information` are computed: from
                `samples` points of the logits' scatter, drawn by `seed` (`"sampling"`), or not
                (None). `"auto"` samples up to 100 classes.
            batch_size: inputs processed at a time; chosen by the memory budget by default.
            progress: whether to show it; as the fit does by default.

        Cost: C backward passes an input (C the number of wanted `classes`), and for each matrix
        P·K operations an input for dense layers, C·P·K for others; memory batch_size·C numbers for
        each parameter of the largest layer and for each activation.
        """
        names, used, chosen = self.check_request(
            estimator=estimator, rank=rank, classes=classes, batch_size=batch_size
        )
        check_space(space)
        check_spread(spread)
        if bound not in BOUNDS:
            raise BadValueError(f"bound: expected one of {BOUNDS}, got {bound!r}.")
        if bound == "paper" and spread != "posterior":
            raise BadValueError(
                "bound: expected 'rigorous' with spread='sampling': the paper bounds the posterior "
                "alone."
            )
        if bound == "paper" and not full_rank:
            raise BadValueError(
                "bound: expected 'rigorous' with full_rank=False: the paper bounds the full-rank "
                "estimate only."
            )
        shown = self.shows_progress(progress)
        average = choose_moderation(
            moderation, samples, seed, self.num_outputs, self.likelihood,
            subset=chosen is not None, temperature=self.temperature,
        )  # fmt: skip
        with full_precision(self.network.device):
            covariances = {n: self.covariance_of(n, used, full_rank, spread) for n in names}
            averaged = {}
            if self.averages != spread and self.averages == "sampling":
                averaged = {n: self.covariance_of(n, used, full_rank, "sampling") for n in names}
        matrices = sorted({matrix for name in names for matrix in self.matrices_of(name, spread)})
        scorer = Scorer(
            self.pullback, self.likelihood, self.signature,
            {matrix: first(self.spectra[matrix].vectors, used) for matrix in matrices}, covariances,
            space, bound, with_covariance=covariance, classes=chosen, moderation=average,
            memory_budget=self.memory_budget, averaged=averaged,
        )  # fmt: skip
        results = {
            name: found.judged_by(self.evidence(used, name, spread))
            for name, found in scorer.predict(inputs, batch_size, shown).items()
        }
        is_one = estimator is None or isinstance(estimator, str)
        if is_one and rank is None and bound == "rigorous":  # others look at widths on purpose
            self._warn_of_width(results[names[0]], spread)
        return results[names[0]] if is_one else results

    def _warn_of_width(self, prediction: Prediction, spread: str) -> None:
        """Warn once where intervals are wider than what they are of, with the remedy."""
        warned: set[str] = self.__dict__.setdefault("_warned_of_width", set())
        bound = mean_bound(prediction)
        if bound <= _WIDER or spread in warned:
            return
        warned.add(spread)
        last = "" if self.evidence(self.rank, self.estimator).last_layer else (
            f", or fewer parameters ({option('params', LastLayer())})"
        )  # fmt: skip
        warn(
            f"predict: expected intervals narrower than the error bars, got ± {bound:.0%} on "
            f"average: {tail_share(prediction):.0%} of the variance is outside the {self.rank} "
            f"eigenpairs, where the bars are estimates. Narrower: a larger rank, certify "
            f"for single inputs{last}.",
            IntervalWarning,
        )

    def check_request(
        self,
        *,
        estimator: str | Sequence[str] | None = None,
        rank: int | None = None,
        classes: str | Sequence[int] | None = None,
        batch_size: int | None = None,
    ) -> tuple[list[str], int, Classes | None]:
        """Check arguments of `predict` before inputs are read; return them resolved."""
        names = self.served(estimator)
        used = self.rank if rank is None else rank
        if not is_whole(used) or not 1 <= used <= self.rank:
            raise BadValueError(
                f"rank: expected a whole number from 1 to the {self.rank} fitted pairs, got "
                f"{used!r}. Fit with a larger rank for more."
            )
        if batch_size is not None:
            check_whole("batch_size", batch_size)
        return names, used, choose_classes(classes, self.num_outputs, self.likelihood)

    def certify(
        self,
        inputs: Any,
        data: Any,
        *,
        tolerance: float = 1e-3,
        space: str = "probability",
        spread: str = "posterior",
        estimator: str | None = None,
        max_products: int | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Predict with error bars as exact as wanted: `std_error ≤ tolerance·std`.

        What the eigenpairs leave open is closed by conjugate gradients on the training data
        (`deltabars.eigen.quadrature`). The interval is a theorem.

        Args:
            inputs, space, spread, batch_size, progress: as for `predict`; each input is dear.
            data: the training data of the fit.
            tolerance: for half of the width of each std's interval, relative to its middle.
            estimator: `"opg"` or `"ggn"`; a sandwich fit serves `"opg"`.
            max_products: passes over the data a batch; at most 1,000 by default.

        Cost: about √(λ_K/λ)·log(1/tolerance) passes over the data for each batch of inputs.
        """
        shown = self.shows_progress(progress)
        check_spread(spread)
        return certify(
            self, inputs, data, tolerance, space, spread, estimator, max_products, batch_size, shown
        )

    def calibrate(
        self, replicas: Sequence[Any], inputs: Any, *, progress: bool | None = None
    ) -> DeltaFit:
        """Bring the level of the bars to the scatter of retrained networks.

        The shape of the bars is known from the fit; one factor is estimated from two replicas or
        more (`deltabars.resample` makes their data), by least squares through the origin, for each
        spread. All that a spread gives is multiplied by it, intervals and draws too.

        Args:
            replicas: the network trained again on bootstrap samples of its data: modules, state
                dicts or files.
            inputs: like those to be predicted; a few hundred. No targets are needed.
            progress: whether to show it; as the fit does by default.

        Returns:
            A fit, with `calibration["sampling"]` and `["posterior"]`: the `factor`, its
            `standard_error`, and the `r_squared` of the replicas' scatter on the bars.
        """
        return calibrate(self, replicas, inputs, self.shows_progress(progress))

    def with_l2(self, l2: L2Rates) -> DeltaFit:
        """Move the fit to another λ: the eigenvalues shift by the difference. Cost: nothing.

        The weights ω̂ stay as they are. A noise σ that was estimated is estimated
        anew; a calibration does not carry over.
        """
        return with_l2(self, l2)

    def tune_l2(self, data: Any = None, method: str = "marginal_likelihood") -> Tuning:
        """Find the λ that the data prefer, for networks trained with none, or an unknown one.

        Args:
            data: for `"validation"`: inputs and targets that were not trained on.
            method: `"marginal_likelihood"` of Laplace's method at ω̂ (`deltabars.fitting.tuning`),
                or `"validation"`: the mean loss of moderated predictions.

        Returns:
            A Tuning: `l2`, the `fit` with it, and the curve with its interval, to be drawn by
            `deltabars.report.spectra.save_tuning`. Cost: K operations a λ, or one prediction.
        """
        return tune_l2(self, data, method)

    def with_noise(self, noise: float | str | None) -> DeltaFit:
        """Move the fit of a Gaussian likelihood to another noise σ. Cost: nothing.

        `"estimate"` (or None) takes that of the training residuals: σ̂² = RSS/(N·C − γ), γ the
        effective parameters in the K pairs.
        """
        return with_noise(self, noise)

    @property
    def effective_parameters(self) -> float:
        """MacKay's number of well-determined parameters, Σₖ (λₖ − λ)/λₖ; a sandwich's of H."""
        values = _positive(self.pairs_of(self.main_matrix).values)
        return float(((values - self.level) / values).sum())

    @property
    def effective_parameters_interval(self) -> tuple[float, float]:
        """The interval of the sum over all eigenvalues, if the tail lies between λ and λ_K."""
        pairs = self.pairs_of(self.main_matrix)
        values, slack = _positive(pairs.values), pairs.slack
        last = Tail.after(values, len(values), self.level, self.num_parameters).last
        rest = self.num_parameters - len(values)
        low = self.effective_parameters + min(0.0, rest * (1 - self.level / last))
        most = float((1 - self.level / (values + slack)).sum())
        return low, most + max(0.0, rest * (1 - self.level / (last + slack)))

    def sample(
        self, n: int, seed: int = 0, *, full_rank: bool = True, spread: str = "posterior"
    ) -> Tensor:
        """Draw `n` parameter vectors (n, P) from N(ω̂, Σ), Σ the covariance of the fit.

        ω = ω̂ + N^{-½}(Q Λ^{-½} Qᵀz + λ̃^{-½}(z − QQᵀz)) with z ~ N(0, I); for the sandwich
        ω̂ + N^{-½} H̃⁻¹ G̃^{½} z. Split one into named tensors with
        `fit.network.parameters.unflatten`.

        `spread="sampling"` draws what retraining on other examples would give, with Σ = B⁻¹G₀B⁻¹/N.
        At full rank all P weights scatter, of the posterior by about (λN)^{-½} where the data say
        nothing; `full_rank=False` takes the K directions alone.
        """
        check_whole("n", n)
        check_whole("seed", seed, 0)
        check_spread(spread)
        network = self.network
        generator = torch.Generator().manual_seed(int(seed))
        noise = torch.randn((n, self.num_parameters), generator=generator, dtype=torch.float64)
        noise = noise.to(network.device, network.dtype)
        vectors = {name: pairs.vectors for name, pairs in self.spectra.items()}
        with full_precision(network.device):
            covariance = self.covariance_of(self.estimator, self.rank, full_rank, spread)
            drawn = covariance.root(vectors, noise)
            return network.point + (drawn if network.scale is None else drawn * network.scale)

    def save(
        self, path: Any, *, dtype: Any = None, max_file_size: int | str = MAX_FILE_SIZE
    ) -> None:
        """Write the fit; read it again with `deltabars.load(path, model)`.

        Args:
            path: a file; a folder of several and their index where the eigenvectors take more than
                `max_file_size` (such as `"2GB"`), or where `path` is a folder or ends in /.
            dtype: the type to store eigenvectors in: their own by default; float32, bfloat16 or
                float16. The loss is measured (4·K²·P operations), reported in
                `diagnostics["storage"]` once loaded, and counted in `std_low` and `std_high`.
        """
        save(self, path, dtype, max_file_size)

    def offloaded(self) -> DeltaFit:
        """Move the eigenvectors to the CPU's memory, for a device that is small."""
        spectra, device = dict(self.spectra), self.network.device
        for name, pairs in self.spectra.items():
            if isinstance(pairs.vectors, Tensor):
                away = PartedVectors.of(pairs.vectors.cpu(), device)
                spectra[name] = replace(pairs, vectors=away)
        return self.moved(spectra=spectra)

    def with_progress(self, shown: bool) -> DeltaFit:
        """Show progress by default, or do not."""
        return self.moved(progress=shown)

    def plot_spectrum(self, ax: Any = None) -> Any:
        """Draw the eigenvalues against their index into `ax`, or a new figure; return the Axes.

        Shaded is where those lie that were not computed, if none is below λ (dotted).
        """
        axes, beyond = axes_or_new(ax), self.rank + 0.5
        for name, pairs in self.spectra.items():
            lower = pairs.smallest.cpu().flip(0)  # its last one has the index P
            lower = lower if name == "hessian" else lower[:0]  # that of the others is λ
            values = torch.cat([pairs.values.detach().cpu().double(), lower])
            count, last = len(pairs), float(pairs.values[-1])
            left, end = self.num_parameters - len(values), count * (1 + _GAP) + 1
            at, magnitudes = torch.arange(1.0, len(values) + 1).numpy(), values.abs().numpy()
            at[count:] += end - count if left else 0.0  # beyond the gap
            marker = "o" if count == 1 else None  # a line needs two points
            (line,) = axes.plot(at[:count], magnitudes[:count], label=name, marker=marker)
            color, negative = line.get_color(), (values < 0).numpy()
            if len(lower):
                label, most = f"{name}, the {len(lower):,} smallest", float(at[-1])
                axes.plot(at[count:], magnitudes[count:], ".", color=color, label=label)
                beyond = max(beyond, most + 0.5)
            if len(lower) and left:
                axes.xaxis.set_major_formatter(
                    lambda x, _, k=count, p=most: f"{x:g}" if x <= k else f"P − {p - x:.0f}"
                )
            if negative.any():
                axes.plot(
                    at[negative], magnitudes[negative], linestyle="none", marker="x",
                    color=color, label=f"{name}, negative",
                )  # fmt: skip
            if left and last > 0:
                beyond = max(beyond, end)
                axes.fill_between(
                    [count + 0.5, end], *sorted((self.level, last)), color=color, alpha=0.25,
                    linewidth=0, label=f"{name}: {left:,} not computed",
                )  # fmt: skip
        level, label = self.level, f"index k of P = {self.num_parameters:,}"
        axes.axhline(level, linestyle=":", linewidth=1, color="gray", label=f"λ = {level:g}")
        axes.set(yscale="log", xlim=(0.5, beyond), xlabel=label)
        axes.set_ylabel("magnitude of the eigenvalue")
        axes.legend()
        return axes

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} = {value}" for name, value in self._numbers.items())
        spectra = [
            f"{name}: eigenvalues {first} … {last}, largest residual {residual}"
            for name, first, last, _, residual in self._ends
        ]
        return "\n  ".join([f"DeltaFit: {self.estimator}, {numbers}", *spectra, *self._notes])

    def _repr_html_(self) -> str:
        head = ["matrix", "λ₁", "λ_K", "λ_K / λ", "largest residual"]
        numbers = html_table(list(self._numbers), [list(self._numbers.values())])
        first, *notes = map(paragraph, (f"DeltaFit: {self.estimator}", *self._notes))
        return "".join((first, numbers, html_table(head, self._ends), *notes))

    @property
    def _numbers(self) -> dict[str, str]:
        l2 = self.l2 if isinstance(self.l2, Mapping) else {"": self.l2}
        levels = [f"{value:g} ({name})".removesuffix(" ()") for name, value in l2.items()]
        counts = {"N": self.num_examples, "P": self.num_parameters, "K": self.rank}
        found = {name: f"{count:,}" for name, count in counts.items()} | {"λ": ", ".join(levels)}
        return found if self.noise is None else found | {"σ": f"{self.noise:g}"}

    @property
    def _ends(self) -> list[list[str]]:
        """Of each matrix: its name, first and last eigenvalue, the last over λ, the residual."""
        found = []
        for name, pairs in self.spectra.items():
            ends = float(pairs.values[0]), float(pairs.values[-1])
            numbers = [f"{value:.4g}" for value in (*ends, ends[1] / self.level)]
            found.append([name, *numbers, f"{float(pairs.residuals.max()):.1g}"])
        return found

    @property
    def _notes(self) -> list[str]:
        notes, hessian = [], self.spectra.get("hessian")
        if hessian is not None and hessian.least < self.level:
            notes.append(
                f"the hessian's spectrum reaches {self.level - hessian.least:.3g} below λ: its "
                "bounds are about the spectrum corrected to λ"
            )
        reach = self.diagnostics.get("sandwich", {}).get("interval_reach", 0.0)
        if reach > _WORTH_READING:
            notes.append(
                f"the sandwich's intervals say little: up to ±{reach:.2g} times the std of what is "
                "outside the pairs; a larger rank narrows them"
            )
        lost = max(pairs.rounding for pairs in self.spectra.values())
        if lost:
            notes.append(f"eigenvectors were rounded by up to {lost:.2g}, which the bounds count")
        return [*notes, f"effective parameters: {self.effective_parameters:.1f} in the K pairs"]


def load(
    path: Any,
    model: torch.nn.Module,
    *,
    check_weights: bool = True,
    device: torch.device | str | None = None,
    memory_budget: int | None = None,
    offload: bool | None = None,
    progress: bool = True,
) -> DeltaFit:
    """Read a fit that `DeltaFit.save` wrote, for the model it was fitted to.

    Args:
        path: the file, or the folder of several.
        model: the network, with the same weights.
        check_weights: refuse a model whose weights differ from the fitted ones, or that computes
            something else with them. With False only the names and shapes of the parameters must
            agree, and the error bars are those of the *given* weights under the fitted curvature.
        device: where to compute; the model's own by default.
        memory_budget, progress: as for `fit`.
        offload: with True the eigenvectors stay in the files, mapped into memory, and their columns
            come to the device when they are needed; with False they are read as one tensor. By
            default they stay where they take more than three quarters of the memory budget.

    Raises:
        CorruptFileError, FormatVersionError, WeightsMismatchError, StorageError.

    Example:
        >>> import tempfile, deltabars
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, l2=L2, rank=20, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fit.save(f"{folder}/digits.deltabars")
        ...     again = deltabars.load(f"{folder}/digits.deltabars", model)
        >>> some = digits.test_images[:5]
        >>> bool((again.predict(some).std == fit.predict(some).std).all())
        True
    """
    fields = read_fields(path, model, check_weights, device, memory_budget, offload)
    return DeltaFit(**fields, memory_budget=memory_budget, progress=progress)


def _positive(values: Tensor) -> Tensor:
    return values[values > 0]  # the others have no part in a covariance
