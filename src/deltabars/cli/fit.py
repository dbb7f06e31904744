"""`deltabars fit`: from a trained model and its data to a RUN folder."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, fields
from typing import Any

import torch

from deltabars.cli.launching import compute_device
from deltabars.cli.runs import Run, check_new
from deltabars.cli.sources.data import check_together
from deltabars.cli.subject import Code, call, made, named_data, named_model, program, sayer
from deltabars.errors import BadValueError, UsageError
from deltabars.fitting.files import MAX_FILE_SIZE
from deltabars.fitting.fit import fit as fit_error_bars
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.state import FitOptions
from deltabars.likelihoods.base import LOSSES, named_loss
from deltabars.problem.parameters import AUTO, last_layer
from deltabars.runtime.distributed import current_group

_LAST_LAYER = Code("deltabars.last_layer()")
# Options that are arguments of deltabars.fit as they are.
_PLAIN = (
    "rank", "params", "dtype", "estimator", "tolerance", "solver", "seed", "memory_budget",
    "batch_size", "residual_tolerance", "max_products", "smallest", "max_seconds", "checkpoint",
    "allow_probabilities",
)  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Fit, write the RUN, and say what was found."""
    loss, arguments = _loss(options), _arguments(options)
    if loss:
        arguments["likelihood"] = named_loss(**loss)
    if arguments.get("params") == _LAST_LAYER:
        arguments["params"] = last_layer()
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, options.dtype)
    if current_group().is_first:  # which may have made it before another one looks
        check_new(options.out.absolute(), options.overwrite)
    if options.loss and options.likelihood:
        raise UsageError("--likelihood: expected no --loss with it, got both")
    model, data = named_model(options), named_data(options)
    model.check_weights()
    network = model.load()
    known = {field.name for field in fields(FitOptions)}
    known -= {"estimator"} if options.estimator == AUTO else set()  # opg and ggn take the same
    given = FitOptions(**{name: value for name, value in arguments.items() if name in known})
    given.check_for(network, arguments.get("params"), arguments.get("l2", AUTO))
    source = data.load()
    if _is_regression(options):
        source = source.with_real_targets()
    check_together(network, source, data)
    count = f", {len(source):,} examples" if len(source) else ""
    sayer(options.quiet)(f"{model.spec} and {data.spec}{count}")
    started = time.perf_counter()
    fit = fit_error_bars(network, source.data, progress=not options.quiet, **arguments)
    seconds = time.perf_counter() - started
    kept = Run.create(
        options.out, fit, model, data, source.classes, columns=source.columns, loss=loss,
        overwrite=options.overwrite, dtype=options.store,
        max_file_size=options.max_file_size or MAX_FILE_SIZE,
    )  # fmt: skip
    if options.json:
        print(json.dumps({"run": str(kept.path), "seconds": seconds, **summary(fit)}))
        return
    print(fit)
    print(f"  {level_line(fit)}")
    if fit.noise is not None:
        how = "estimated from the residuals" if options.noise in (None, "estimate") else "given"
        print(f"  noise of the targets: σ = {fit.noise:g}, {how}")
    print(f"\nRUN: {options.out} ({seconds:.1f} s). What next:")
    print(f"  deltabars predict {options.out} --data DATA    error bars of other data")
    print(f"  deltabars rank {options.out}                   the training examples to look at")


def python(options: argparse.Namespace) -> str:
    """Return the Python that the command stands for."""
    loss, arguments = _loss(options), _arguments(options)
    if loss:
        arguments["likelihood"] = call("deltabars.likelihoods.named_loss", **loss)
    if "dtype" in arguments:
        arguments["dtype"] = Code(f"torch.{options.dtype}")
    written = call(
        "Run.create", options.out, *map(Code, ("fit", "model", "data", "source.classes")),
        loss=loss, columns=Code("source.columns") if options.target else None,
        overwrite=options.overwrite or None, dtype=options.store,
        max_file_size=options.max_file_size,
    )  # fmt: skip
    return program(
        "import torch" if "dtype" in arguments else "", "import deltabars",
        "from deltabars.cli.runs import Run", "from deltabars.cli.sources.data import NamedData",
        "from deltabars.cli.sources.models import NamedModel",
        f"\nmodel = {made(named_model(options))}", f"data = {made(named_data(options))}",
        "source = data.load()" + ".with_real_targets()" * _is_regression(options),
        "fit = " + call("deltabars.fit", Code("model.load()"), Code("source.data"), **arguments),
        written, "print(fit)",
    )  # fmt: skip


def interval_of(fit: DeltaFit) -> tuple[float, float] | None:
    """Return the interval of the effective parameters; None where no eigenvalue is positive."""
    try:
        return fit.effective_parameters_interval
    except BadValueError:
        return None


def level_line(fit: DeltaFit) -> str:
    """Say which λ a fit has, how it was found, and where the evidence has it."""
    name, value, how = fit.described_level
    return f"{name} = {value}{' ' if how.startswith('by') else ', '}{how}"


def summary(fit: DeltaFit) -> dict[str, Any]:
    """Return what a fit found, for JSON."""
    return {
        "estimator": fit.estimator,
        "examples": fit.num_examples,
        "parameters": fit.num_parameters,
        "outputs": fit.num_outputs,
        "rank": fit.rank,
        "likelihood": fit.likelihood.name,
        "noise": fit.noise,
        "l2": fit.l2 if isinstance(fit.l2, float | int) else dict(fit.l2),
        "level": fit.level,
        "l2_by_evidence": fit.diagnostics.get("l2"),
        "calibration": {spread: asdict(found) for spread, found in fit.calibration.items()},
        "effective_parameters": fit.effective_parameters,
        "effective_parameters_interval": interval_of(fit),
        **{name: fit.diagnostics[name] for name in ("train_accuracy", "relative_gradient")},
        "spectra": {
            name: {
                "largest": float(pairs.values[0]),
                "last": float(pairs.values[-1]),
                "largest_residual": float(pairs.residuals.max()),
            }
            for name, pairs in fit.spectra.items()
        },
    }


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `deltabars.fit` that were given."""
    found: dict[str, Any] = {"l2": None if options.l2 is None else _l2(options.l2)}
    found["device"] = str(compute_device(options.device))
    found |= {name: getattr(options, name) for name in _PLAIN}
    if options.params == ["last-layer"]:
        found["params"] = _LAST_LAYER
    return {name: value for name, value in found.items() if value is not None}


def _loss(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the loss of the training, by the names of `named_loss`; None if nothing says which."""
    given = {name: getattr(options, name) for _, own in LOSSES.values() for name in own}
    given = {name: value for name, value in given.items() if value is not None}
    name = options.loss or options.likelihood
    return {"name": name or "ce", **given} if name or given else None


def _is_regression(options: argparse.Namespace) -> bool:
    return (options.loss or options.likelihood) in ("mse", "gaussian")


def _l2(given: list[str]) -> float | str | dict[str, float]:
    """Return one λ, λs by pattern, or "auto"."""
    try:
        if given == [AUTO]:
            return AUTO
        if len(given) == 1 and "=" not in given[0]:
            return float(given[0])
        pairs = [text.rpartition("=") for text in given]
        if not all(pattern for pattern, _, _ in pairs):
            raise ValueError("a λ without a pattern")
        return {pattern: float(number) for pattern, _, number in pairs}
    except ValueError as error:
        raise BadValueError(
            f"--l2: expected a number, PATTERN=NUMBER …, or auto, got {' '.join(given)!r}."
        ) from error
