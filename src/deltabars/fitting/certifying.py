"""Error bars to any tolerance, posterior or sampling, by conjugate gradients on the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.base import Spread, Tail
from deltabars.covariance.sampling import SamplingCovariance
from deltabars.curvature.base import RowOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.curvature.sensitivity import check_space
from deltabars.eigen.quadrature import (
    Enclosure,
    enclose_inverse_forms,
    enclose_sandwich_forms,
    least_tolerance,
)
from deltabars.errors import BadValueError, ConvergenceWarning, DataError, option, warn
from deltabars.fitting.state import FittedState, check_positive, check_whole
from deltabars.likelihoods.base import unit_rows
from deltabars.prediction.prediction import Prediction
from deltabars.prediction.scoring import read_inputs
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


def certify(
    state: FittedState,
    inputs: Any,
    data: Any,
    tolerance: float,
    space: str,
    spread: str,
    estimator: str | None,
    max_products: int | None,
    batch_size: int | None,
    progress: bool,
) -> Prediction:
    """Predict with intervals; the arguments are those of `DeltaFit.certify`."""
    check_space(space)
    for option_name, value, least in (
        ("batch_size", batch_size, 1),
        ("max_products", max_products, 3),
    ):
        if value is not None:
            check_whole(option_name, value, least)
    name, network, likelihood = state.served(estimator)[0], state.network, state.likelihood
    if name not in OPERATORS:
        advice = f"Fit with {option('estimator', 'ggn')}, the nearest to a Hessian, or 'opg'."
        if "opg" in state.spectra:
            advice = f"Pass {option('estimator', 'opg')}, which a sandwich fit serves."
        raise BadValueError(
            f"certify: expected the estimator opg or ggn, whose matrices have no eigenvalue below "
            f"λ, got {name}. {advice}"
        )
    count = max(current_group().size, group_of(state.spectra).size)
    if count > 1:
        raise BadValueError(
            f"certify: expected one process, got {count}. Save the fit, load it in one process, or "
            "within deltabars.distributed.alone(), and certify there."
        )
    check_positive("tolerance", tolerance)
    lowest = 2 * least_tolerance(network.dtype)
    if tolerance < lowest:
        raise BadValueError(
            f"tolerance: expected {lowest:.2g} or more, which is what {network.dtype} can promise, "
            f"got {tolerance:g}. Fit with {option('dtype', torch.float64)} for less."
        )
    with Progress("Reading the data", None, "example", progress) as bar:
        options: dict[str, Any] = {"memory_budget": state.memory_budget, "on_progress": bar.show}
        problem = Problem(network, data, likelihood, l2=state.prior, **options)
    if f"{problem.data.fingerprint:016x}" != state.diagnostics["data_fingerprint"]:
        raise DataError(
            "certify: expected the training data of the fit, in the same order, got others "
            f"({problem.num_examples} examples; the fit has {state.num_examples})."
        )
    each = _COPIES * state.num_parameters + 2 * problem.activation_bytes
    each *= state.num_outputs * network.dtype.itemsize
    room = share(problem.memory_budget, BASIS)
    size = batch_size or chunk_within(room, each, _LARGEST_CHUNK, network.device)
    limits: dict[str, Any] = {
        "floor": problem.l2,
        "precondition": _preconditioner(state, name),
        "tolerance": tolerance,
        "max_products": max_products or _ENOUGH_PRODUCTS,
        "norm": float(state.pairs_of(name).values[0]),
    }
    product = _products(state, problem, name)
    enclose: Callable[[Tensor], Enclosure] = partial(enclose_inverse_forms, product, **limits)
    if spread == "sampling":
        covariance = state.covariance_of(name, state.rank, spread=spread)
        assert isinstance(covariance, SamplingCovariance)
        meat = _meat_products(state, problem)
        if name != "opg":
            limits["norm"] = max(limits["norm"], covariance.meat.norm)
        reach = covariance.reach
        enclose = partial(enclose_sandwich_forms, product, meat, reach=reach, **limits)
    parts, wide, in_mean = [], 0, space == "probability"
    total = len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else None
    with Progress("Certifying", total, "input", progress) as bar:
        for batch in read_inputs(inputs, state.signature, network):
            for chunk in batch.split(size):
                rows, outputs = _sensitivities(state, chunk.inputs, space)
                with full_precision(network.device):
                    found = enclose(rows.flatten(0, 1))
                ends = torch.stack([found.low, found.high]) / state.examples_for(spread, name)
                low, high = ends.view(2, *outputs.shape)
                middle, mean = (ends.sqrt().mean(0).square()), likelihood.mean(outputs)
                parts.append(
                    Prediction.compute(
                        mean if in_mean else outputs,
                        Spread(middle.view_as(low), low, high, torch.zeros_like(low), None),
                        likelihood.label(mean),
                        likelihood.target_noise,
                        of_probabilities=in_mean and likelihood.discrete,
                    )
                )
                wide += int((~found.is_close).sum())
                bar.show(sum(map(len, parts)))
    if not parts:
        raise DataError("Inputs: expected at least one, got none.")
    if wide:
        warn(
            f"certify: expected intervals within a tolerance of {tolerance:g}, got {wide} that are "
            f"wider after {max_products or _ENOUGH_PRODUCTS} products. They hold all the same; "
            "allow more products, or fit with a larger rank.",
            ConvergenceWarning,
        )
    return Prediction.concatenate(parts).judged_by(state.evidence(state.rank, name, spread))


def _products(state: FittedState, problem: Problem, name: str) -> Callable[[Tensor], Tensor]:
    """Return products with the matrix at noise σ: the data part of G is over σ² (see `tuning`)."""
    operator = OPERATORS[name](problem)
    factor = 1.0 / (state.noise or 1.0) ** 2 if name == "opg" else 1.0

    def product(rows: Tensor) -> Tensor:
        image = operator.whole_matmat(rows)
        return image if factor == 1 else factor * image + (1 - factor) * problem.l2 * rows

    return product


def _meat_products(state: FittedState, problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return products with G₀ at noise σ, over σ² like those of G."""
    operator, factor = OPGOperator(problem), 1.0 / (state.noise or 1.0) ** 2
    return lambda rows: factor * operator.data_matmat(rows)


def _preconditioner(state: FittedState, name: str) -> Callable[[Tensor], Tensor]:
    """Return products with N·Σ̃ of the fit: exact on the eigenvectors, the tail's middle beyond."""
    pairs = state.pairs_of(name)
    tail = Tail.after(pairs.values, state.rank, state.level, state.num_parameters)
    outside = 1.0 / tail.harmonic_mean
    weights = (1.0 / pairs.values - outside).to(pairs.vectors.dtype)

    def precondition(rows: Tensor) -> Tensor:
        return combined(projected(rows, pairs.vectors) * weights, pairs.vectors) + outside * rows

    return precondition


def _sensitivities(state: FittedState, inputs: Any, space: str) -> tuple[Tensor, Tensor]:
    """Compute F (B, C, P) and the outputs (B, C)."""
    outputs = torch.empty(0)

    def cotangents(at: Tensor) -> Tensor:
        nonlocal outputs
        outputs = at
        return state.likelihood.mean_jacobian(at) if space == "probability" else unit_rows(at)

    with state.network.evaluation(), model_errors():
        rows = state.pullback.rows(inputs, cotangents)
    if not bool(outputs.isfinite().all()):
        raise DataError("Outputs: expected finite values, got NaN or infinity.")
    return rows, outputs
