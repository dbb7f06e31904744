"""fit(): from a trained model and its data to a DeltaFit."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from deltabars.covariance.estimators import DEFAULT_ESTIMATOR, ESTIMATORS
from deltabars.covariance.sampling import Meat
from deltabars.covariance.sandwich import SandwichCovariance
from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.pairs import EigenPairs, warn_about_values
from deltabars.errors import (
    BadValueError,
    DataWarning,
    EvidenceWarning,
    ModelError,
    option,
    warn,
)
from deltabars.fitting.checkpoints import Checkpoint, MatrixCheckpoint, Session, identity_of, opened
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.growth import Probe, drawn
from deltabars.fitting.solving import Deadline, Task, solve
from deltabars.fitting.state import (
    DEFAULT_RANK,
    FitOptions,
    FittedState,
    contradicted,
    off_optimum,
)
from deltabars.fitting.surveying import measure_meat
from deltabars.fitting.tuning import (
    level_by_evidence,
    temperature_by_leaving_out,
    with_settled_noise,
)
from deltabars.likelihoods.base import Likelihood, Loss, described, is_own
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.prediction.averaging import can_be_averaged
from deltabars.problem.network import Behaviour
from deltabars.problem.parameters import AUTO, L2Rates, LastLayer, Selection, plain_model
from deltabars.problem.problem import Problem
from deltabars.runtime import VERSION
from deltabars.runtime.distributed import check_same_options, current_group, same_everywhere
from deltabars.runtime.precision import full_precision
from deltabars.runtime.progress import Progress

OPERATORS: dict[str, type[CurvatureOperator]] = {
    "hessian": HessianOperator,
    "opg": OPGOperator,
    "ggn": GGNOperator,
}

ESTIMATOR_OF_AUTO = "ggn"  # see docs/true-bars.md for what was measured

_LEFT_OUT, _LEFT_OUT_SHARE = 1024, 16  # examples that a temperature is found from, at most 1/16
_DETERMINED = 0.1  # of the examples, or parameters if these are fewer, to begin with
_SEEN = 0.02  # of λ: directions of less curvature say nothing of the gradient
_ROUNDED = 1e-6  # of the largest number: what is less is rounding
_ALL_RIGHT = 0.995  # of the training examples: from there on opg is the poorer choice


def fit(
    model: torch.nn.Module,
    data: Any,
    *,
    l2: L2Rates | str = AUTO,
    estimator: str = AUTO,
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
        l2: `"auto"` for the λ that the evidence finds from the eigenpairs; or the λ > 0 of the cost
            that the network was trained with, mean loss + (λ/2)·‖ω‖²: the `weight_decay` of SGD and
            Adam (AdamW's is another thing). Or λs by name pattern, of which the last that matches
            counts: `{"*": 0.01, "*.bias": 1e-6}`; eigenvalues are then those of
            D^{-½} A D^{-½} + I, D = diag(λᵢ), in which λ is 1.
        estimator: `"opg"` (cheap, always positive definite), `"hessian"`, `"sandwich"` (both;
            serves all three), or `"ggn"` (up to C times the cost of opg). `"auto"` is opg with a
            given λ, as in the paper, and ggn with l2="auto" (see docs/true-bars.md).
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
    if estimator == AUTO:
        estimator = ESTIMATOR_OF_AUTO if l2 == AUTO else DEFAULT_ESTIMATOR
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
        work = _Work(problem, options, session, deadline, diagnostics, progress)
        if l2 == AUTO:
            work = replace(work, problem=problem.at_l2(_starting_l2(problem)))
            if options.is_automatic:  # which needs λ to say what is enough
                few = min(DEFAULT_RANK, problem.num_parameters)
                plain = replace(options, rank=few, tolerance=None, probe=None)
                half = deadline.first_of(2)
                first = replace(work, session=None, options=plain, deadline=half)
                found = level_by_evidence(first.solved(None))[0]
                work = replace(work, problem=problem.at_l2(found))
        return work.assembled(work.solved(probe))


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
        "parameters_reached": problem.num_reached,
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


def _starting_l2(problem: Problem) -> float:
    """Return a λ to begin with, where the evidence is to find it: the scale of residuals.

    That of a network of which a tenth of what could be determined is; the result is seldom less.
    """
    square = float(problem.network.point.double().square().sum())
    if not square > 0:
        raise BadValueError(
            "l2: expected weights that are not all zero to find it from, got zeros. Give a number: "
            "the weight decay of the training."
        )
    determined = _DETERMINED * min(problem.num_examples, problem.num_reached)
    scale = 1.0
    if isinstance(problem.likelihood, Gaussian):
        scale = (problem.likelihood.noise or 0.0) ** 2 or 2 * problem.mean_loss
    return max(determined, 1.0) * (scale or 1.0) / (problem.num_examples * square)


@dataclass(frozen=True)
class _Work:
    """A fit, from its problem to its result."""

    problem: Problem
    options: FitOptions
    session: Session | None
    deadline: Deadline
    diagnostics: dict[str, Any]
    progress: bool

    def solved(self, probe: Any) -> DeltaFit:
        """Compute the eigenpairs of every matrix of the estimator, and the meat beside them.

        The fit is at the λ of the problem, and its noise is not settled yet.
        """
        problem, options, session = self.problem, self.options, self.session
        group, estimator, chosen = problem.group, options.estimator, None
        diagnostics = dict(self.diagnostics)
        sent = group.collectives, group.bytes
        if options.is_automatic:
            chosen = Probe.take(problem, probe, options.tolerance, options.seed)
        if session is not None:
            number = None if chosen is None else chosen.fingerprint
            identity = identity_of(diagnostics["manifest"], problem, number)
            session.begin(identity, problem.memory_budget)
        spectra: dict[str, EigenPairs] = {}
        meats: dict[str, Meat] = {}
        # G before H: it costs less, and the Hessian of a sandwich grows until they are enough
        # together.
        names = ESTIMATORS[estimator][::-1]
        for index, name in enumerate(names):
            operator = OPERATORS[name](problem)
            growth = None if chosen is None else chosen.growth(operator, name, estimator, spectra)
            kept = None if session is None else MatrixCheckpoint(session, name)
            own = self.deadline.first_of(len(names) - index)
            task = Task(name, operator, options, growth, kept, own, self.progress)
            spectra[name], diagnostics[name], beside = solve(task)
            if growth is not None:
                diagnostics["rank"] = growth.outcome(spectra[name])
            del operator, task, growth  # rows that are kept
            if name != "opg":
                meats[name] = measure_meat(problem, name, spectra[name], beside)
        if group.size > 1:
            diagnostics["processes"] = {
                "count": group.size,
                "examples": problem.data.counts,
                "source": problem.data.source,
                "columns": problem.spaces.whole.columns.widths,
                "collectives": group.collectives - sent[0],
                "bytes": group.bytes - sent[1],
            }
        network, signature = problem.network, problem.data.signature
        return DeltaFit(
            estimator=estimator, prior=problem.prior, num_examples=problem.num_examples,
            num_outputs=problem.num_outputs,
            spectra={name: spectra[name] for name in ESTIMATORS[estimator]},
            diagnostics=diagnostics, likelihood=problem.likelihood, network=network,
            signature=signature, weights=network.weights,
            behaviour=Behaviour.of(network, signature, problem.ranges),
            memory_budget=options.memory_budget, progress=self.progress, meats=meats,
        )  # fmt: skip

    def assembled(self, fit: DeltaFit) -> DeltaFit:
        """Settle λ and the noise; look at the trained point with them."""
        problem, is_auto = self.problem, self.problem.given_l2 == AUTO
        noted = _level_of(fit, is_auto)
        if is_auto:
            assert noted is not None
            problem = problem.at_l2(noted["evidence"])
            shift = problem.l2 - fit.level
            moved = {name: pairs.mapped(1.0, shift) for name, pairs in fit.spectra.items()}
            for name, pairs in moved.items():
                warn_about_values(name, pairs, problem.l2, was_moved=True)
            fit = fit.moved(prior=problem.prior, spectra=moved)
        fit = with_settled_noise(fit)
        if is_auto and can_be_averaged(fit.num_outputs, fit.likelihood):
            count = min(_LEFT_OUT, max(1, problem.num_examples // _LEFT_OUT_SHARE))
            own = [
                batch.to(torch.device("cpu")) for batch in drawn(problem, count, self.options.seed)
            ]
            gathered = problem.group.gather_objects(own) if problem.group.size > 1 else [own]
            few = [batch.to(problem.device, problem.dtype) for part in gathered for batch in part]
            temperature = temperature_by_leaving_out(fit, few)
            fit = fit.moved(averages="sampling", temperature=temperature)
        gradient, scale = problem.gradient, problem.network.scale
        gradient = gradient if scale is None else gradient * scale  # by what λ is one number of
        with full_precision(problem.device):
            distance = _distance_from_optimum(fit, gradient)
            found = {
                **fit.diagnostics,
                "cost": problem.mean_loss + problem.penalty,
                "gradient_norm": float(problem.gradient.norm()),
                "relative_gradient": problem.relative_gradient,
                "at_chance": problem.is_at_chance,
                "l2": noted,
                "distance_from_optimum": distance,
                "gradient_to_noise": _gradient_to_noise(fit, gradient),
            }
            positive = all(float(pairs.values[0]) > 0 for pairs in fit.spectra.values())
            if fit.estimator == "sandwich" and positive:
                covariance = fit.covariance_of("sandwich", fit.rank)
                assert isinstance(covariance, SandwichCovariance)
                found["sandwich"] = {"interval_reach": covariance.interval_reach}
        far = off_optimum(problem.relative_gradient, distance)
        # Where λ is not that of the training, a gradient beside it says nothing.
        other = "" if noted is None or is_auto else _contradiction(noted)
        if problem.is_at_chance or (far and not is_auto):
            problem.warn_of_optimum("" if distance is None else far, other)
        elif other and problem.group.is_first:
            warn(f"l2: {other}", EvidenceWarning)
        return fit.moved(diagnostics=found)


def _level_of(fit: DeltaFit, is_auto: bool) -> dict[str, Any] | None:
    """Return the λ in use beside that of the evidence; None where there is none."""
    try:
        value, low, high = level_by_evidence(fit)
    except BadValueError:
        if is_auto:
            raise
        return None
    found = {"how": AUTO if is_auto else "given", "value": value if is_auto else fit.level}
    return found | {"evidence": value, "evidence_low": low, "evidence_high": high}


def _contradiction(noted: Mapping[str, Any]) -> str:
    """Say that a given λ is more than ten times off the interval of the evidence's, if it is."""
    used, value = noted["value"], noted["evidence"]
    low, high = noted["evidence_low"], noted["evidence_high"]
    if not contradicted(noted):
        return ""
    times, way = (used / value, "less") if used > value else (value / used, "more")
    return (
        f"expected a λ that the data support, got {used:.3g}, where the evidence says {value:.3g} "
        f"({low:.2g} to {high:.2g}), {times:,.0f} times {way}. {option('l2', AUTO)} takes that."
    )


def _gradient_to_noise(fit: DeltaFit, gradient: torch.Tensor) -> float | None:
    """Return the median over the pairs of t = |qₖᵀg|·√(N/qₖᵀG₀qₖ), g the gradient of the cost.

    Near or below 1 the weights are as near an optimum as N examples can tell.
    """
    name = fit.main_matrix
    pairs = fit.spectra[name]
    data = (pairs.values - fit.level).double().cpu()
    own = data if name == "opg" else fit.meats[name].within.diagonal().double().cpu()
    along = fit.coordinates_of(gradient, name).abs()
    # Of directions that the data determine, and where their gradients are more than rounding.
    known = (own > _ROUNDED * own.max()) & (data > _SEEN * fit.level)
    if not bool(known.any()):
        return None
    return float((along[known] * (fit.num_examples / own[known]).sqrt()).median())


def _distance_from_optimum(state: FittedState, gradient: torch.Tensor) -> float | None:
    """Measure how far predictions at the optimum are from those at ω̂, in their error bars.

    The Newton step H⁻¹g, g the gradient (P,), moves a prediction along eigenvector k by N(qₖᵀg)²/λₖ
    of its variance: the root of the mean of that, weighted by the share (λₖ − λ)/λₖ that the data
    determine. None where the curvature is not positive, so that no minimum is known to be near.
    """
    pairs = state.pairs_of(state.main_matrix)
    along = state.coordinates_of(gradient, state.main_matrix)
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
