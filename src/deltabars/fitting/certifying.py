"""Error bars to any tolerance: fᵀA⁻¹f by conjugate gradients on the training data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.estimators import Spread
from deltabars.covariance.tail import Tail
from deltabars.curvature.base import RowOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.quadrature import enclose_inverse_forms, least_tolerance
from deltabars.errors import BadValueError, ConvergenceWarning, DataError, option, warn
from deltabars.fitting.state import FittedState, check_positive, check_whole
from deltabars.likelihoods.base import unit_rows
from deltabars.prediction.prediction import Prediction
from deltabars.prediction.scoring import read_inputs
from deltabars.problem.batches import Batch
from deltabars.problem.network import model_errors
from deltabars.problem.problem import Problem
from deltabars.runtime.distributed import current_group
from deltabars.runtime.memory import BASIS, chunk_within, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import combined, group_of, projected

OPERATORS: dict[str, type[RowOperator]] = {"opg": OPGOperator, "ggn": GGNOperator}

_LARGEST_CHUNK = 1024  # inputs
_COPIES = 6  # of the rows of F, that solving takes
_ENOUGH_PRODUCTS = 1000


class Certifier:
    """The matrix of an estimator at the noise of a fit, to be inverted by conjugate gradients.

    Args:
        state: of the fit.
        data: its training data.
        tolerance: for half of the width of each interval, relative to its middle.
        estimator: `"opg"` or `"ggn"`, or None for the fit's own.
        max_products: a batch of inputs.
        progress: whether to show that the data are read.
    """

    def __init__(
        self,
        state: FittedState,
        data: Any,
        tolerance: float,
        estimator: str | None,
        max_products: int | None,
        progress: bool,
    ) -> None:
        self.state, self.name = state, state.served(estimator)[0]
        _check(state, self.name, tolerance, max_products)
        self.tolerance, self.max_products = tolerance, max_products or _ENOUGH_PRODUCTS
        with Progress("Reading the data", None, "example", progress) as bar:
            self.problem = Problem(
                state.network,
                data,
                state.likelihood,
                l2=state.prior,
                memory_budget=state.memory_budget,
                on_progress=bar.show,
            )
        found = f"{self.problem.data.fingerprint:016x}"
        if found != state.diagnostics["data_fingerprint"]:
            raise DataError(
                "certify: expected the training data of the fit, in the same order, got others "
                f"({self.problem.num_examples} examples; the fit has {state.num_examples})."
            )
        self.operator = OPERATORS[self.name](self.problem)
        # At noise σ the data part of G is over σ², and so is N (see `tuning`).
        self.factor = 1.0 / (state.noise or 1.0) ** 2 if self.name == "opg" else 1.0
        pairs = state.pairs_of(self.name)
        self.norm, self.vectors = float(pairs.values[0]), pairs.vectors
        tail = Tail.after(pairs.values, state.rank, state.level, state.num_parameters)
        self.inverse_tail = 1.0 / tail.harmonic_mean
        self.weights = (1.0 / pairs.values - self.inverse_tail).to(self.vectors.dtype)

    def predict(
        self, inputs: Any, space: str, batch_size: int | None, progress: bool
    ) -> Prediction:
        """Predict with intervals; the arguments are those of `DeltaFit.certify`."""
        state, parts, wide = self.state, [], 0
        total = len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else None
        size = batch_size or self._default_batch_size()
        with Progress("Certifying", total, "input", progress) as bar:
            for batch in read_inputs(inputs, state.signature, state.network):
                for chunk in batch.split(size):
                    part, missed = self._chunk(chunk, space)
                    parts.append(part)
                    wide += missed
                    bar.show(sum(map(len, parts)))
        if not parts:
            raise DataError("Inputs: expected at least one, got none.")
        if wide:
            warn(
                f"certify: expected intervals within a tolerance of {self.tolerance:g}, got {wide} "
                f"that are wider after {self.max_products} products. They hold all the same; allow "
                "more products, or fit with a larger rank.",
                ConvergenceWarning,
            )
        return Prediction.concatenate(parts).judged_by(state.evidence(state.rank, self.name))

    def _default_batch_size(self) -> int:
        state = self.state
        numbers = _COPIES * state.num_parameters + 2 * self.problem.activation_bytes
        per_input = state.num_outputs * numbers * state.network.dtype.itemsize
        room = share(self.problem.memory_budget, BASIS)
        return chunk_within(room, per_input, _LARGEST_CHUNK, state.network.device)

    def _chunk(self, batch: Batch, space: str) -> tuple[Prediction, int]:
        """Predict a batch; return how many of its intervals are too wide as well."""
        state, likelihood = self.state, self.state.likelihood
        in_mean = space == "probability"
        outputs = torch.empty(0)

        def cotangents(at: Tensor) -> Tensor:
            nonlocal outputs
            outputs = at
            return likelihood.mean_jacobian(at) if in_mean else unit_rows(at)

        with state.network.evaluation(), model_errors():
            rows = state.pullback.rows(batch.inputs, cotangents)  # F (B, C, P)
        if not bool(outputs.isfinite().all()):
            raise DataError("Outputs: expected finite values, got NaN or infinity.")
        with full_precision(state.network.device):
            found = enclose_inverse_forms(
                self._product,
                rows.flatten(0, 1),
                self.problem.l2,
                self._precondition,
                self.tolerance,
                self.max_products,
                norm=self.norm,
            )
        low, high = (
            part.view(rows.shape[:2]) / state.informative_examples
            for part in (found.low, found.high)
        )
        mean = likelihood.mean(outputs)
        prediction = Prediction.compute(
            mean if in_mean else outputs,
            Spread(
                variance=((low.sqrt() + high.sqrt()) / 2).square(),
                low=low,
                high=high,
                paper_delta=torch.zeros_like(low),
                covariance=None,
            ),
            likelihood.label(mean),
            likelihood.target_noise,
            of_probabilities=in_mean and likelihood.discrete,
        )
        return prediction, int((~found.is_close).sum())

    def _product(self, rows: Tensor) -> Tensor:
        image = self.operator.whole_matmat(rows)
        if self.factor == 1:
            return image
        return self.factor * image + (1 - self.factor) * self.problem.l2 * rows

    def _precondition(self, rows: Tensor) -> Tensor:
        """Multiply with N·Σ̃ of the fit: exact on the eigenvectors, the tail's middle elsewhere."""
        inside = projected(rows, self.vectors) * self.weights
        if isinstance(self.vectors, Tensor):
            return torch.addmm(rows, inside, self.vectors, beta=self.inverse_tail)
        return combined(inside, self.vectors) + self.inverse_tail * rows


def _check(state: FittedState, name: str, tolerance: float, max_products: int | None) -> None:
    if name not in OPERATORS:
        raise BadValueError(
            f"certify: expected the estimator opg or ggn, whose matrices have no eigenvalue below "
            f"λ, got {name}. "
            + (
                f"Pass {option('estimator', 'opg')}, which a sandwich fit serves."
                if "opg" in state.spectra
                else f"Fit with {option('estimator', 'ggn')}, the nearest to a Hessian, or 'opg'."
            )
        )
    count = max(current_group().size, group_of(state.spectra).size)
    if count > 1:
        raise BadValueError(
            f"certify: expected one process, got {count}. Save the fit, load it in one process, or "
            "within deltabars.distributed.alone(), and certify there."
        )
    least = least_tolerance(state.network.dtype)
    check_positive("tolerance", tolerance)
    if tolerance < 2 * least:
        raise BadValueError(
            f"tolerance: expected {2 * least:.2g} or more, which is what {state.network.dtype} can "
            f"promise, got {tolerance:g}. Fit with {option('dtype', torch.float64)} for less."
        )
    if max_products is not None:
        check_whole("max_products", max_products, 3)
