"""fit(): from a trained model and its data to a DeltaFit."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from deltabars.covariance.estimators import DEFAULT_ESTIMATOR, ESTIMATORS
from deltabars.covariance.sandwich import SandwichCovariance
from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import DataWarning, ModelError, option, warn
from deltabars.fitting.checkpoints import Checkpoint, MatrixCheckpoint, Session, identity_of, opened
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.growth import Probe
from deltabars.fitting.solving import Deadline, Task, solve
from deltabars.fitting.state import FitOptions, FittedState, off_optimum
from deltabars.fitting.tuning import with_settled_noise
from deltabars.likelihoods.base import Likelihood, Loss, described, is_own
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.problem.network import Behaviour
from deltabars.problem.parameters import L2Rates, LastLayer, Selection, plain_model
from deltabars.problem.problem import Problem
from deltabars.runtime import VERSION
from deltabars.runtime.distributed import check_same_options, current_group, same_everywhere
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress
from deltabars.runtime.vectors import Basis, ShardedVectors, products

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
            `weight_decay` of SGD and Adam (AdamW's is another thing). Or λs by name pattern, of
            which the last that matches counts: `{"*": 0.01, "*.bias": 1e-6}`; eigenvalues are then
            those of D^{-½} A D^{-½} + I, D = diag(λᵢ), in which λ is 1.
        estimator: `"opg"` (cheap, always positive definite), `"hessian"`, `"sandwich"` (both;
            serves all three), or `"ggn"`.
        rank: K, how many eigenpairs to compute: 100 by default, or P where that is less. The
            bounds of every prediction say whether K was enough. `"auto"` computes pairs until they
            are within `tolerance` on a probe, or the basis fills its share of the memory budget
            (see `diagnostics["rank"]`).
        tolerance: of `rank="auto"`: the largest score_error / score for any input of the probe;
            0.05 by default. Where the probe is drawn from the training examples, 0.6 of that.
        probe: of `rank="auto"`: inputs like those to be predicted; by default 32 of the training
            examples, drawn by the seed.
        params: which parameters count: None for all, name patterns, a predicate, or `last_layer()`.
        likelihood: `"categorical"`, `"bernoulli"`, `"gaussian"` (unit noise); one of
            `deltabars.likelihoods`, such as `Gaussian(noise="estimate")`; or the loss module of the
            training, such as `nn.CrossEntropyLoss` or `nn.MSELoss` (estimated noise), with its
            weights, smoothing and reduction; λ is then that of the cost with its value.
        solver: `"krylov"` (Lanczos for H, block Krylov for G and GGN); `"dense"` (exact, for small
            P); `"arpack"` (SciPy); `"incremental"` (the paper's one pass for G and GGN; a sandwich
            takes its H from Lanczos); or `"auto"`, for one of the first two.
        seed: of the start vectors; the same seed gives the same bits on a CPU.
        device, dtype: where and how precisely to compute; the model's own by default.
        memory_budget: bytes to stay within; half of the free memory by default.
        batch_size: examples processed at a time, whatever the loader's batches are; by default
            chosen by the memory budget. Where memory runs out all the same, it is halved.
        residual_tolerance: for ‖Aq − λq‖ of every pair (see `EigenPairs`); by default a thousandth
            of λ, within what the dtype allows. What is left is counted in the intervals.
        max_products: at most so many products a matrix; pairs that have not converged by then are
            kept, with a warning.
        smallest: how many eigenvalues of the lower end of the Hessian to compute as well.
        deterministic: the same seed gives the same bits on a GPU too, with torch's deterministic
            algorithms alone; a model with an operation that has none is refused.
        max_seconds: stop after so long, between two products, with a warning and the pairs that
            have converged by then (at least one a matrix), whose error bounds hold. With a
            checkpoint the same call resumes. For `"krylov"` (which `"auto"` is then) and
            `"incremental"`.
        allow_probabilities: do not refuse outputs that look like probabilities, not like logits.
        checkpoint: a folder in which the state of the fit is saved every minute (a
            `deltabars.CheckpointFolder` sets another interval). A fit that was killed is resumed by
            the same call, in as many processes, and ends with the same bits on a CPU; a finished
            one returns its result. Solvers other than `"krylov"` save whole matrices alone.
            `progress` and `max_seconds` may change, `device` and `batch_size` at the cost of last
            bits; nothing else may.
        progress: whether to show it.

    Raises:
        BadValueError, ModelError, DataError: with what was expected, found, and to be done.
        CheckpointMismatchError, CheckpointInUseError: the checkpoint is another fit's, or in use.

    Cost: for OPG and GGN one gradient (C gradients) an example and some passes over the kept or
    recomputed rows; for the Hessian about 2.2·K products, each of one or two gradients over the
    data. Memory: at most 2.2·K·P numbers (for K from 54 on), beside the data that are kept.

    Example:
        >>> import deltabars
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, l2=L2, rank=60, progress=False)
        >>> out = fit.predict(digits.test_images)
        >>> out.std.shape  # an error bar for each of ten classes
        torch.Size([500, 10])
        >>> wrong = out.label != digits.test_labels
        >>> bool(out.score[wrong].mean() > 2 * out.score[~wrong].mean())
        True
    """
    started, group = time.perf_counter(), current_group()
    progress = progress and group.is_first
    options = FitOptions(
        estimator=estimator, rank=rank, tolerance=tolerance, solver=solver, seed=seed,
        probe=None if probe is None else "given", memory_budget=memory_budget,
        batch_size=batch_size, residual_tolerance=residual_tolerance, max_products=max_products,
        smallest=smallest, max_seconds=max_seconds, deterministic=deterministic,
    )  # fmt: skip
    check_same_options(group, {**asdict(options), "checkpoint": checkpoint is not None})
    model = plain_model(model)
    options.check_for(model, params, l2)
    deadline = Deadline(options.max_seconds, group)
    with nullcontext() if checkpoint is None else opened(checkpoint, group) as session:
        if memory_budget is None and session is not None:
            memory_budget = session.memory_budget
        with Progress("Reading the data", None, "example", progress) as bar:
            problem = Problem(
                model, data, likelihood, params, l2, device=device, dtype=dtype,
                memory_budget=memory_budget, chunk_size=batch_size, deterministic=deterministic,
                allow_probabilities=allow_probabilities, on_progress=bar.show,
            )  # fmt: skip
            options = options.resolved(problem.num_parameters)
            diagnostics = _look_at(problem, options, bar)
        diagnostics["seconds_reading"] = time.perf_counter() - started
        spectra = _solve_all(problem, options, probe, session, deadline, diagnostics, progress)
    return _assemble(problem, options, spectra, diagnostics, progress)


def _look_at(problem: Problem, options: FitOptions, bar: Progress) -> dict[str, Any]:
    """Return what is known before anything is solved; warn of it where that is needed."""
    accuracy, left_out = problem.train_accuracy, problem.data.left_out
    if not same_everywhere(problem.group, problem.network.weights):
        raise ModelError(
            "Model: expected the same weights in every process, got different ones. Load them "
            "from one file, or broadcast those of the first process."
        )
    usual = getattr(problem.likelihood, "ignore_index", None) == Categorical.ignore_index
    if left_out and usual and problem.group.is_first:  # which nobody may have meant
        warn(
            f"Targets: expected class numbers, got {left_out:,} that are "
            f"{Categorical.ignore_index}, which nn.CrossEntropyLoss ignores; the fit leaves those "
            f"examples out and uses the {problem.num_examples:,} others.",
            DataWarning,
        )
    record = manifest(problem, asdict(options))
    found = {
        "manifest": record,
        "mean_loss": problem.mean_loss,
        "train_accuracy": accuracy,
        "given_l2": problem.given_l2,
        "cost": problem.mean_loss + problem.penalty,
        "parameters_reached": problem.num_reached,
        "gradient_norm": float(problem.gradient.norm()),
        "relative_gradient": problem.relative_gradient,
        "at_chance": problem.is_at_chance,
        "data_fingerprint": record["data"]["fingerprint"],
        "examples_left_out": left_out,
    }
    if options.estimator == "opg" and accuracy is not None and accuracy >= _ALL_RIGHT:
        found["estimator_advice"] = (
            f"Estimator opg: {accuracy:.1%} of the training examples are right, so that their "
            "gradients are nearly zero and G hardly sees the data. "
            f"{option('estimator', 'ggn')} does; it costs up to {problem.num_outputs} times as "
            f"much, which {option('params', LastLayer())} makes small."
        )
        bar.line(found["estimator_advice"])
    return found


def _solve_all(
    problem: Problem,
    options: FitOptions,
    probe: Any,
    session: Session | None,
    deadline: Deadline,
    diagnostics: dict[str, Any],
    progress: bool,
) -> dict[str, EigenPairs]:
    """Compute the eigenpairs of every matrix of the estimator; add how to the diagnostics."""
    group, estimator, chosen = problem.group, options.estimator, None
    sent = group.collectives, group.bytes
    if options.is_automatic:
        chosen = Probe.take(problem, probe, options.tolerance, options.seed)
    if session is not None:
        number = None if chosen is None else chosen.fingerprint
        session.begin(identity_of(diagnostics["manifest"], problem, number), problem.memory_budget)
    spectra: dict[str, EigenPairs] = {}
    # G before H: it costs less, and the Hessian of a sandwich grows until they are enough together.
    names = ESTIMATORS[estimator][::-1]
    for index, name in enumerate(names):
        operator = OPERATORS[name](problem)
        growth = None if chosen is None else chosen.growth(operator, name, estimator, spectra)
        kept = None if session is None else MatrixCheckpoint(session, name)
        own = deadline.first_of(len(names) - index)
        spectra[name], diagnostics[name] = solve(
            Task(name, operator, options, growth, kept, own, progress)
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
    fit = DeltaFit(
        estimator=options.estimator, prior=problem.prior, num_examples=problem.num_examples,
        num_outputs=problem.num_outputs, spectra=spectra, diagnostics=diagnostics,
        likelihood=problem.likelihood, network=network, signature=signature,
        weights=network.weights, behaviour=Behaviour.of(network, signature, problem.ranges),
        memory_budget=options.memory_budget, progress=progress,
    )  # fmt: skip
    if isinstance(fit.likelihood, Gaussian):
        fit = with_settled_noise(fit)
    with full_precision(problem.device):
        distance = _distance_from_optimum(fit, problem.gradient)
        found = {**diagnostics, "distance_from_optimum": distance}
        positive = all(float(pairs.values[0]) > 0 for pairs in spectra.values())
        if fit.estimator == "sandwich" and positive:
            covariance = fit.covariance_of("sandwich", fit.rank)
            assert isinstance(covariance, SandwichCovariance)
            found["sandwich"] = {"interval_reach": covariance.interval_reach}
    far = off_optimum(problem.relative_gradient, distance)
    if far or problem.is_at_chance:
        problem.warn_of_optimum("" if distance is None else far)
    return fit.moved(diagnostics=found)


def _distance_from_optimum(state: FittedState, gradient: torch.Tensor) -> float | None:
    """Measure how far predictions at the optimum are from those at ω̂, in their error bars.

    The Newton step H⁻¹g, g the gradient (P,), moves a prediction along eigenvector k by N(qₖᵀg)²/λₖ
    of its variance: the root of the mean of that, weighted by the share (λₖ − λ)/λₖ that the data
    determine. None where the curvature is not positive, so that no minimum is known to be near.
    """
    pairs = state.pairs_of(state.main_matrix)
    vectors = pairs.vectors
    row: Basis = gradient[None].to(vectors.device)
    if isinstance(vectors, ShardedVectors):
        row = ShardedVectors(gradient[None, vectors.space.own], vectors.space)
    along = products(row, vectors)[0].cpu()
    values = pairs.values.double().cpu()
    if not bool((values > 0).all()):
        return None
    weights = ((values - state.level) / values).clamp(min=0)
    squares = state.informative_examples * along.square() / values
    return float((weights @ squares / weights.sum().clamp(min=1e-300)).sqrt())


def manifest(problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that has to be the same for a fit to be the same, as JSON values."""
    likelihood, device = problem.likelihood, problem.device
    meaning = described(likelihood) if is_own(likelihood) else type(likelihood).__name__
    name = platform.processor() or platform.machine()
    processor = f"{name}, {torch.backends.cpu.get_cpu_capability()}"  # kernels are chosen by it
    cuda = device.type == "cuda"
    record = {
        "deltabars": VERSION,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else processor,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "threads": torch.get_num_threads(),
        "dtype": str(problem.dtype),
        "weights": problem.network.weights,
        "data": {
            "fingerprint": f"{problem.data.fingerprint:016x}",
            "num_examples": problem.num_examples,
            "inputs": asdict(problem.data.signature),
        },
        "options": {
            **options,
            "l2": problem.given_l2,
            "params": problem.parameters.names,
            "likelihood": meaning,
        },
    }
    # NumPy has numbers that JSON does not know.
    text = json.dumps(record, default=lambda x: x.item() if isinstance(x, np.generic) else str(x))
    plain: dict[str, Any] = json.loads(text)
    return plain
