"""Error bars to any tolerance: the interval of a prediction, refined on the training data."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltabars.covariance.low_rank import Spread
from deltabars.covariance.tail import Tail
from deltabars.curvature.base import RowOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.curvature.sensitivity import check_space
from deltabars.eigen.pairs import is_whole
from deltabars.eigen.quadrature import Enclosure, enclose_inverse_forms, least_tolerance
from deltabars.errors import BadValueError, ConvergenceWarning, DataError, option
from deltabars.fitting.predicting import check_batch_size, served, shows_progress
from deltabars.likelihoods.base import unit_rows
from deltabars.prediction.judgement import Evidence
from deltabars.prediction.prediction import Prediction
from deltabars.prediction.scoring import read_inputs
from deltabars.problem.batches import Batch
from deltabars.problem.network import model_errors
from deltabars.problem.problem import Problem
from deltabars.runtime.distributed import current
from deltabars.runtime.memory import BASIS, chunk_within, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import chosen, combined, projected, ranks_of

if TYPE_CHECKING:
    from deltabars.fitting.fitted import DeltaFit

OPERATORS: dict[str, type[RowOperator]] = {"opg": OPGOperator, "ggn": GGNOperator}

_LARGEST_CHUNK = 1024  # inputs
_COPIES = 6  # of the rows of F, that solving takes
_ENOUGH_PRODUCTS = 1000


def certify(
    fit: DeltaFit,
    inputs: Any,
    data: Any,
    *,
    tolerance: float,
    space: str,
    estimator: str | None,
    max_products: int | None,
    batch_size: int | None,
    progress: bool | None,
) -> Prediction:
    """Predictions with intervals of a given width; arguments are those of `DeltaFit.certify`."""
    name = served(fit, estimator)[0]
    if name not in OPERATORS:
        raise BadValueError(
            f"certify: expected the estimator opg or ggn, whose matrices have no eigenvalue below "
            f"λ, got {name}. "
            + (
                f"Pass {option('estimator', 'opg')}, which a sandwich fit serves."
                if "opg" in fit.spectra
                else f"Fit with {option('estimator', 'ggn')}, the nearest to a Hessian, or 'opg'."
            )
        )
    count = max(current().count, ranks_of(fit.spectra).count)
    if count > 1:
        raise BadValueError(
            f"certify: expected one process, got {count} ranks. Save the fit, load it in one "
            "process, or within deltabars.ranks.alone(), and certify there."
        )
    least = least_tolerance(fit.network.dtype)
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not tolerance > 0:
        raise BadValueError(f"tolerance: expected a number above zero, got {tolerance!r}.")
    if tolerance < 2 * least:
        raise BadValueError(
            f"tolerance: expected {2 * least:.2g} or more, which is what {fit.network.dtype} can "
            f"promise, got {tolerance:g}. Fit with "
            f"{option('dtype', torch.float64)} for less."
        )
    if max_products is not None and (not is_whole(max_products) or max_products < 3):
        raise BadValueError(
            f"max_products: expected a whole number from 3 on, got {max_products!r}."
        )
    check_space(space)
    check_batch_size(batch_size)
    shown = shows_progress(fit, progress)
    with Progress("Reading the data", None, "example", shown) as bar:
        problem = Problem(
            fit.network,
            data,
            fit.likelihood,
            l2=fit.decay,
            memory_budget=fit.memory_budget,
            on_progress=bar.show,
        )
    found = f"{problem.data.fingerprint:016x}"
    if found != fit.diagnostics["data_fingerprint"]:
        raise DataError(
            "certify: expected the training data that the fit was made with, in the same order, "
            f"got others ({problem.num_examples} examples; the fit has {fit.num_examples})."
        )
    solver = _Solver(fit, name, problem, tolerance, max_products or _ENOUGH_PRODUCTS)
    with full_precision(fit.network.device):
        return solver.predict(inputs, space, batch_size, shown)


class _Solver:
    def __init__(
        self, fit: DeltaFit, name: str, problem: Problem, tolerance: float, max_products: int
    ) -> None:
        self.fit, self.name, self.problem = fit, name, problem
        self.operator = OPERATORS[name](problem)
        self.tolerance, self.max_products = tolerance, max_products
        # At noise σ the data part of G is over σ², and so is N (see `deltabars.noise`).
        self.share = 1.0 / (fit.noise or 1.0) ** 2 if name == "opg" else 1.0
        pairs = fit.pairs_of(name)
        self.norm = float(pairs.values[0])
        self.vectors = chosen(pairs.vectors, problem.reached)  # (K, P')
        tail = Tail.after(pairs.values, fit.rank, fit.level, fit.num_parameters)
        self.inverse_tail = 1.0 / tail.harmonic_mean
        self.weights = (1.0 / pairs.values - self.inverse_tail).to(self.vectors.dtype)

    def predict(
        self, inputs: Any, space: str, batch_size: int | None, progress: bool
    ) -> Prediction:
        fit, parts, wide = self.fit, [], 0
        total = len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else None
        size = batch_size or self._default_batch_size()
        with Progress("Certifying", total, "input", progress) as bar:
            for batch in read_inputs(inputs, fit.signature, fit.network):
                for chunk in batch.split(size):
                    part, missed = self._chunk(chunk, space)
                    parts.append(part)
                    wide += missed
                    bar.show(sum(map(len, parts)))
        if not parts:
            raise DataError("Inputs: expected at least one, got none.")
        if wide:
            warnings.warn(
                f"certify: expected intervals within a tolerance of {self.tolerance:g}, got {wide} "
                f"that are wider after {self.max_products} products. They hold all the same; allow "
                "more products, or fit with a larger rank.",
                ConvergenceWarning,
                stacklevel=5,
            )
        evidence = Evidence.of(fit, fit.rank, self.name)
        return Prediction.concatenate(parts).judged_by(evidence)

    def _default_batch_size(self) -> int:
        fit = self.fit
        numbers = _COPIES * fit.num_parameters + 2 * self.problem.activation_bytes
        per_input = fit.num_outputs * numbers * fit.network.dtype.itemsize
        room = share(self.problem.memory_budget, BASIS)
        return chunk_within(room, per_input, _LARGEST_CHUNK, fit.network.device)

    def _chunk(self, batch: Batch, space: str) -> tuple[Prediction, int]:
        """The predictions of a batch, and how many of its intervals are too wide."""
        fit, likelihood = self.fit, self.fit.likelihood
        in_mean = space == "probability"
        outputs = torch.empty(0)

        def cotangents(at: Tensor) -> Tensor:
            nonlocal outputs
            outputs = at
            return likelihood.mean_jacobian(at) if in_mean else unit_rows(at)

        with fit.network.evaluation(), model_errors():
            rows = fit.pullback.rows(batch.inputs, cotangents)  # F (B, C, P)
        if not bool(outputs.isfinite().all()):
            raise DataError("Outputs: expected finite values, got NaN or infinity.")
        shape = rows.shape[:2]
        found = self._enclose(rows.flatten(0, 1))
        low, high = (
            part.view(shape) / fit.informative_examples for part in (found.low, found.high)
        )
        mean = likelihood.mean(outputs)
        value = mean if in_mean else outputs
        noise = likelihood.target_noise
        prediction = Prediction.compute(
            value,
            _spread(low, high),
            likelihood.label(mean),
            noise,
            of_probabilities=in_mean and likelihood.discrete,
        )
        return prediction, int((~found.is_close).sum())

    def _enclose(self, rows: Tensor) -> Enclosure:
        """fᵀA⁻¹f: of the parameters that the examples reach, and of the others, where A is λ."""
        reached, level = self.problem.reached, self.problem.l2
        inside = rows if reached is None else rows.index_select(1, reached)
        found = enclose_inverse_forms(
            self._product,
            inside,
            level,
            self._precondition,
            self.tolerance,
            self.max_products,
            norm=self.norm,
        )
        if reached is None:
            return found
        square = rows.double().square().sum(-1) - inside.double().square().sum(-1)
        others = square.clamp(min=0) / level
        return Enclosure(found.low + others, found.high + others, found.products, found.is_close)

    def _product(self, rows: Tensor) -> Tensor:
        image = self.operator.reached_matmat(rows)
        if self.share == 1:
            return image
        return self.share * image + (1 - self.share) * self.problem.l2 * rows

    def _precondition(self, rows: Tensor) -> Tensor:
        """Σ̃ of the fit, times N: exact on the eigenvectors, the tail's middle elsewhere."""
        inside = projected(rows, self.vectors) * self.weights
        if isinstance(self.vectors, Tensor):
            return torch.addmm(rows, inside, self.vectors, beta=self.inverse_tail)
        return combined(inside, self.vectors) + self.inverse_tail * rows


def _spread(low: Tensor, high: Tensor) -> Spread:
    """A standard deviation in the middle of its interval, from that of each variance, (B, C)."""
    return Spread(
        variance=((low.sqrt() + high.sqrt()) / 2).square(),
        low=low,
        high=high,
        paper_delta=torch.zeros_like(low),
        covariance=None,
    )
