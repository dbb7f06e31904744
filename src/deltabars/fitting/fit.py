"""fit(): from a trained model and its data to a DeltaFit."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from deltabars.covariance.estimators import DEFAULT_ESTIMATOR, ESTIMATORS
from deltabars.covariance.tail import warn_about_spectrum
from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import DataWarning, ModelError, option
from deltabars.fitting.checkpoints import Checkpoint, Session, identity_of, opened
from deltabars.fitting.describe import distance_from_optimum, interval_reach, manifest
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.growth import Probe
from deltabars.fitting.hyperparameters import with_settled_noise
from deltabars.fitting.options import Deadline, FitOptions
from deltabars.fitting.solving import solve
from deltabars.likelihoods.base import Likelihood
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.losses import Loss
from deltabars.problem.behaviour import Behaviour
from deltabars.problem.parameters import LastLayer, Selection, plain_model
from deltabars.problem.prior import L2Rates
from deltabars.problem.problem import Problem
from deltabars.runtime.distributed import check_same_options, current_group, same_everywhere
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress

OPERATORS: dict[str, type[CurvatureOperator]] = {
    "hessian": HessianOperator,
    "opg": OPGOperator,
    "ggn": GGNOperator,
}

_ALL_RIGHT = 0.995  # of the training examples: from there on opg is the poorer choice


def fit(
    model: torch.nn.Module,
    data: Any,
    *,
    l2: L2Rates,
    estimator: str = DEFAULT_ESTIMATOR,
    rank: int | str | None = None,
    tolerance: float | None = None,
    probe: Any = None,
    params: Selection = None,
    likelihood: str | Likelihood | Loss | torch.nn.Module = "categorical",
    solver: str = "auto",
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory_budget: int | None = None,
    batch_size: int | None = None,
    residual_tolerance: float | None = None,
    max_products: int | None = None,
    smallest: int = 0,
    deterministic: bool = False,
    max_seconds: float | None = None,
    allow_probabilities: bool = False,
    checkpoint: Checkpoint | None = None,
    progress: bool = True,
) -> DeltaFit:
    """Compute the eigenpairs that put error bars on a trained network's predictions.

    Args:
        model: a module that returns logits (B, C). It is never altered.
        data: the training data: a DataLoader, a Dataset, or a pair of tensors (inputs, targets).
            Batches may be tuples, or mappings with `labels`.
        l2: λ > 0 of the cost that the network was trained with, mean loss + (λ/2)·‖ω‖²: the
            `weight_decay` of SGD and Adam (AdamW's is another thing). With a loss module for the
            likelihood, that of the cost with its value in place of the mean loss. Or a mapping from
            name patterns to the λs of their parameters, of which the last that matches counts:
            `{"*": 0.01, "*.bias": 1e-6}`. The eigenvalues are then those of D^{-½} A D^{-½} + I,
            D = diag(λᵢ), in which λ is 1.
        estimator: `"opg"` (cheap, always positive definite), `"hessian"`, `"sandwich"` (both;
            serves all three), or `"ggn"`.
        rank: K, how many eigenpairs to compute: 100 by default, or P where that is less. Error
            bounds come with every prediction and say whether K was enough. `"auto"` goes on until
            they are within `tolerance` on a probe, or the basis fills its share of the memory
            budget; `diagnostics["rank"]` has which, and the error reached.
        tolerance: of `rank="auto"`: the largest score_error / score for any input of the probe;
            0.05 by default. It is a promise about the probe alone: where that is drawn from the
            training examples the aim is 0.6 of the tolerance, as errors on new inputs were up to
            1.6 times as large; on shifted ones up to 5.6 times, so give inputs like those to be
            predicted.
        probe: of `rank="auto"`: inputs like those to be predicted; by default 32 of the training
            examples, drawn by the seed.
        params: which parameters count: None for all, name patterns, a predicate, or
            `last_layer()`.
        likelihood: `"categorical"`, `"bernoulli"`, `"gaussian"` (unit noise); one of
            `deltabars.likelihoods`, such as `Gaussian(noise="estimate")`; or the loss module of the
            training, `nn.CrossEntropyLoss`, `nn.BCEWithLogitsLoss` or `nn.MSELoss` (estimated
            noise), whose weights, smoothing and reduction are accounted for; or
            `likelihoods.named_loss("mse", noise=0.3)`, as the command line names it.
        solver: `"auto"`; `"krylov"` (Lanczos for H, block Krylov for G and GGN); `"dense"`
            (exact, for small P); `"arpack"` (SciPy); `"incremental"` (the paper's one pass for G
            and GGN; a sandwich takes its H from Lanczos).
        seed: of the start vectors; the same seed gives the same bits on a CPU, whatever the number
            of a loader's workers and whatever the program drew from torch's generators.
        device, dtype: where and how precisely to compute; the model's own by default.
        memory_budget: bytes to stay within; half of the free memory by default.
        batch_size: examples processed at a time, whatever the loader's batches are; by default
            chosen from the size of the activations and the memory budget. Where memory runs out
            all the same, half as many are tried, with one warning.
        residual_tolerance: for ‖Aq − λq‖ of every pair (see `EigenPairs`); by default a thousandth
            of λ, at most 1e-5 in float32 and 1e-10 in float64, and at least twice their eps. What
            is left is counted in the intervals.
        max_products: at most so many products a matrix; pairs that have not converged by then are
            kept, with a warning.
        smallest: how many eigenvalues of the lower end of the Hessian to compute as well.
        deterministic: the same seed gives the same bits on a GPU too: of the fit, where
            `memory_budget` is given or does not bind, and of its predictions. With torch's
            deterministic algorithms alone; a model with an operation that has none is refused. On a
            CPU it changes nothing.
        max_seconds: stop after so long with the pairs that have converged by then (at least one a
            matrix), whose error bounds hold, with a warning. Checked between products: reading the
            data and one product are always done. With a checkpoint, the same call with more time
            resumes. None for no limit; for the solvers `"auto"`, `"krylov"` and `"incremental"`.
        allow_probabilities: take outputs for logits that look like probabilities, of a softmax or a
            sigmoid, which are refused otherwise.
        checkpoint: a folder in which the state of the fit is saved every minute (a
            `deltabars.checkpoints.CheckpointFolder` sets another interval). A fit that was killed
            is resumed by the same call, in as many processes, and ends with the same bits on a CPU;
            a finished one returns its result. Solvers other than `"krylov"` save whole matrices
            alone. `progress` and `max_seconds` may change, and `device` and `batch_size` at the
            cost of last bits; anything else is refused.
        progress: whether to show it.

    Returns:
        A DeltaFit.

    Raises:
        BadValueError, ModelError, DataError: with what was expected, found, and to be done.
        CheckpointMismatchError, CheckpointInUseError: the checkpoint is of another fit, or another
            process is working on it.

    Cost: for OPG and GGN one gradient (C gradients) an example and some passes over the kept or
    recomputed rows; for the Hessian about 2.2·K products, each of about one gradient over the
    data (two where the budget does not let its linear part be kept). Memory: at most 2.2·K·P
    numbers (for K from 54 on), beside the data that are kept.

    Example:
        >>> import deltabars
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, l2=L2, rank=60, progress=False)
        >>> fit.rank, fit.num_examples, fit.num_parameters
        (60, 1297, 1898)
        >>> out = fit.predict(digits.test_images)
        >>> out.std.shape  # an error bar for each of ten classes
        torch.Size([500, 10])
        >>> wrong = out.label != digits.test_labels
        >>> bool(out.score[wrong].mean() > 2 * out.score[~wrong].mean())
        True
    """
    started = time.perf_counter()
    group = current_group()
    progress = progress and group.is_first
    options = FitOptions(
        estimator=estimator,
        rank=rank,
        tolerance=tolerance,
        probe=None if probe is None else "given",
        solver=solver,
        seed=seed,
        memory_budget=memory_budget,
        batch_size=batch_size,
        residual_tolerance=residual_tolerance,
        max_products=max_products,
        smallest=smallest,
        max_seconds=max_seconds,
        deterministic=deterministic,
    )
    check_same_options(group, {**options.as_json(), "checkpoint": checkpoint is not None})
    model = plain_model(model)
    options.check_for(model, params, l2)
    deadline = Deadline(options.max_seconds, group)
    with nullcontext() if checkpoint is None else opened(checkpoint, group) as session:
        resumed = None if session is None else session.memory_budget
        with Progress("Reading the data", None, "example", progress) as bar:
            problem = Problem(
                model,
                data,
                likelihood,
                params,
                l2,
                device=device,
                dtype=dtype,
                memory_budget=resumed if memory_budget is None else memory_budget,
                chunk_size=batch_size,
                deterministic=deterministic,
                allow_probabilities=allow_probabilities,
                on_progress=bar.show,
            )
        _check_weights(problem)
        options = options.resolved(problem.num_parameters)
        diagnostics = _describe_problem(problem, options, time.perf_counter() - started)
        _advise(problem, options, diagnostics, progress)
        spectra = _solve_all(problem, options, probe, session, deadline, diagnostics, progress)
    return _assemble(problem, options, spectra, diagnostics, progress)


def _check_weights(problem: Problem) -> None:
    if not same_everywhere(problem.group, problem.network.weights):
        raise ModelError(
            "Model: expected the same weights in every process, got different ones. Load them "
            "from one file, or broadcast those of the first process."
        )


def _describe_problem(problem: Problem, options: FitOptions, seconds: float) -> dict[str, Any]:
    """Return what is known of the problem before anything is solved."""
    record = manifest(problem, options.as_json())
    return {
        "manifest": record,
        "mean_loss": problem.mean_loss,
        "train_accuracy": problem.train_accuracy,
        "given_l2": problem.given_l2,
        "cost": problem.mean_loss + problem.penalty,
        "parameters_reached": problem.num_reached,
        "gradient_norm": float(problem.gradient.norm()),
        "relative_gradient": problem.relative_gradient,
        "at_chance": problem.is_at_chance,
        "data_fingerprint": record["data"]["fingerprint"],
        "seed": options.seed,
        "torch": record["torch"],
        "device": record["device"],
        "seconds_reading": seconds,
        "examples_left_out": problem.data.left_out,
    }


def _advise(
    problem: Problem, options: FitOptions, diagnostics: dict[str, Any], progress: bool
) -> None:
    """Warn of examples that are left out, and advise another estimator where opg is poor."""
    likelihood, count = problem.likelihood, problem.data.left_out
    usual = getattr(likelihood, "ignore_index", None) == Categorical.ignore_index
    if count and usual and problem.group.is_first:  # which nobody may have meant
        warnings.warn(
            f"Targets: expected class numbers, got {count:,} that are {Categorical.ignore_index}, "
            "which nn.CrossEntropyLoss ignores; the fit leaves those examples out and uses the "
            f"{problem.num_examples:,} others.",
            DataWarning,
            stacklevel=3,
        )
    if options.estimator == "opg" and (problem.train_accuracy or 0.0) >= _ALL_RIGHT:
        diagnostics["estimator_advice"] = (
            f"Estimator opg: {problem.train_accuracy:.1%} of the training examples are right, so "
            "that their gradients are nearly zero and G hardly sees the data. "
            f"{option('estimator', 'ggn')} does; it costs up to {problem.num_outputs} times as "
            f"much, which {option('params', LastLayer())} makes small."
        )
        with Progress("Fit", None, "", progress) as bar:
            bar.line(diagnostics["estimator_advice"])


def _solve_all(
    problem: Problem,
    options: FitOptions,
    probe: Any,
    session: Session | None,
    deadline: Deadline,
    diagnostics: dict[str, Any],
    progress: bool,
) -> dict[str, EigenPairs]:
    """Compute the eigenpairs of every matrix of the estimator."""
    group, estimator = problem.group, options.estimator
    sent = group.collectives, group.bytes
    chosen = None
    if options.is_automatic:
        chosen = Probe.take(problem, probe, options.tolerance, options.seed)
    if session is not None:
        number = None if chosen is None else chosen.fingerprint
        session.begin(identity_of(diagnostics["manifest"], problem, number), problem.memory_budget)
    spectra: dict[str, EigenPairs] = {}
    diagnostics["forecast"] = {}
    # G before H: it costs less, and the Hessian of a sandwich grows until they are enough together.
    names = ESTIMATORS[estimator][::-1]
    for index, name in enumerate(names):
        operator = OPERATORS[name](problem)
        growth = None
        if chosen is not None:
            growth = chosen.growth(operator, name, estimator, spectra)
        spectra[name], diagnostics[name], diagnostics["forecast"][name] = solve(
            name,
            operator,
            options,
            progress=progress,
            growth=growth,
            checkpoint=None if session is None else session.of(name),
            deadline=deadline.first_of(len(names) - index),
        )
        warn_about_spectrum(
            name, spectra[name].values, problem.l2, problem.num_parameters, problem.dtype
        )
        if growth is not None:
            diagnostics["rank"] = growth.outcome(spectra[name])
    if group.size > 1:
        diagnostics["processes"] = {
            "count": group.size,
            "examples": problem.data.counts,
            "source": problem.data.source,
            "columns": problem.spaces.whole.columns.widths,
            "collectives": group.collectives - sent[0],
            "bytes": group.bytes - sent[1],
        }
    return {name: spectra[name] for name in ESTIMATORS[estimator]}


def _assemble(
    problem: Problem,
    options: FitOptions,
    spectra: dict[str, EigenPairs],
    diagnostics: dict[str, Any],
    progress: bool,
) -> DeltaFit:
    network, signature = problem.network, problem.data.signature
    fit = with_settled_noise(
        DeltaFit(
            estimator=options.estimator,
            prior=problem.prior,
            num_examples=problem.num_examples,
            num_outputs=problem.num_outputs,
            spectra=spectra,
            diagnostics=diagnostics,
            likelihood=problem.likelihood,
            network=network,
            signature=signature,
            weights=network.weights,
            behaviour=Behaviour.of(network, signature, problem.ranges),
            memory_budget=options.memory_budget,
            progress=progress,
        )
    )
    with full_precision(problem.device):
        distance = distance_from_optimum(fit, problem.gradient)
        reach = interval_reach(fit)
    problem.warn_if_far_from_optimum(distance)
    found = {**diagnostics, "distance_from_optimum": distance, **reach}
    return fit.moved(diagnostics=found)
