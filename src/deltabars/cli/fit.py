"""`deltabars fit`: from a trained model and its data to a RUN folder."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from deltabars.cli.launching import add_launch
from deltabars.cli.options import (
    DATA_HELP,
    DEVICE_HELP,
    Code,
    add_data,
    add_model,
    add_output,
    call,
    compute_device,
    made,
    memory,
    named_data,
    named_model,
    program,
    sayer,
)
from deltabars.cli.runs import Run, check_new
from deltabars.cli.sources.data import check_together
from deltabars.covariance.estimators import DEFAULT_ESTIMATOR
from deltabars.errors import BadValueError, UsageError
from deltabars.fitting.files import DTYPES, MAX_FILE_SIZE
from deltabars.fitting.fit import fit as fit_error_bars
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.state import FitOptions
from deltabars.likelihoods.gaussian import ESTIMATE
from deltabars.likelihoods.losses import LOSSES, named_loss
from deltabars.problem.parameters import last_layer
from deltabars.runtime.distributed import current_group

_DESCRIPTION = """\
Compute the eigenpairs that put error bars on a trained network's predictions, from the network and
the data that it was trained on, and keep them in a new folder RUN for `deltabars predict`, `rank`,
`spectrum` and `report`.

"""
_EPILOG = """\
examples:
  deltabars fit --model net.py:Net --weights net.safetensors --data train/ --l2 0.01 --out run
  deltabars fit --model net.py:Net --weights net.pt --data train/ --size 64 --mean 0.5 --std 0.25 \\
      --l2 1e-4 --estimator ggn --rank auto --tolerance 0.1 --out run
  deltabars fit --config fit.toml --out run      # fit.toml: model = "net.py:Net", l2 = 0.01, …
  torchrun --nproc-per-node=8 -m deltabars fit --config fit.toml --out run       # on eight GPUs
"""
_LAST_LAYER = "last-layer"
_PLAIN = (
    "estimator", "tolerance", "solver", "seed", "memory_budget", "batch_size",
    "residual_tolerance", "max_products", "smallest", "max_seconds", "checkpoint",
    "allow_probabilities",
)  # fmt: skip


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "fit",
        help="fit error bars to a trained network",
        description=_DESCRIPTION + DATA_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, required=True)
    add_data(parser, required=True)
    add = parser.add_argument_group("the fit").add_argument
    add(
        "--l2",
        required=True,
        nargs="+",
        metavar="λ",
        help="of the training's cost: its weight_decay; or PATTERN=λ …",
    )
    add(
        "--estimator",
        choices=("opg", "hessian", "sandwich", "ggn"),
        help=f"default: {DEFAULT_ESTIMATOR}",
    )
    add("--rank", type=_rank, metavar="K", help="how many eigenpairs, or auto (default: 100)")
    add(
        "--tolerance",
        type=float,
        metavar="X",
        help="of --rank auto: score_error / score at most (default: 0.05)",
    )
    add(
        "--loss",
        choices=tuple(LOSSES),
        help="of the training: CrossEntropyLoss, BCEWithLogitsLoss or MSELoss of torch; λ is its "
        "weight_decay (default: ce)",
    )
    add(
        "--likelihood",
        choices=("categorical", "bernoulli", "gaussian"),
        help="the same, with a loss that is summed over the outputs, in place of --loss",
    )
    add("--label-smoothing", type=float, metavar="X", help="of ce")
    add("--class-weights", type=float, nargs="+", metavar="X", help="of ce, one a class")
    add("--pos-weight", type=float, nargs="+", metavar="X", help="of bce, one, or one an output")
    add(
        "--noise",
        type=_noise,
        metavar="σ",
        help="of mse: the targets' standard deviation around the mean, or estimate (default)",
    )
    add(
        "--allow-probabilities",
        action="store_true",
        default=None,
        help="take outputs that look like those of a softmax or sigmoid for logits",
    )
    add(
        "--params",
        nargs="+",
        metavar="PATTERN",
        help=f"the parameters that count, by name; or {_LAST_LAYER} (default: all)",
    )
    add(
        "--solver",
        choices=("auto", "krylov", "dense", "arpack", "incremental"),
        help="default: auto",
    )
    add("--seed", type=int, metavar="N", help="of the start vectors (default: 0)")
    add("--device", help=DEVICE_HELP)
    add("--dtype", choices=("float32", "float64"), help="how precisely (default: as the model)")
    add(
        "--memory-budget",
        type=memory,
        metavar="BYTES",
        help="such as 8GB (default: half of what is free)",
    )
    add("--batch-size", type=int, metavar="N", help="examples worked on at a time")
    add("--residual-tolerance", type=float, metavar="X", help="of the eigenpairs")
    add("--max-products", type=int, metavar="N", help="passes over the data a matrix at the most")
    add("--smallest", type=int, metavar="N", help="eigenvalues of the Hessian's lower end as well")
    add(
        "--max-seconds",
        type=float,
        metavar="S",
        help="stop after so long with the pairs that there are",
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save the state there every minute; the same command goes on from it",
    )
    add = parser.add_argument_group("how it is kept").add_argument
    add(
        "--store",
        choices=tuple(DTYPES),
        help="what the eigenvectors are stored in (default: as they were computed)",
    )
    add(
        "--max-file-size",
        type=memory,
        metavar="BYTES",
        help=f"several files above that, such as 2GB (default: {MAX_FILE_SIZE})",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="a new folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a RUN that is there")
    add_output(parser)
    add_launch(parser)
    parser.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Fit, write the RUN, and say what was found."""
    arguments = _arguments(options)
    if loss := _loss(options):
        arguments["likelihood"] = named_loss(**loss)
    if arguments.get("params") == Code("deltabars.last_layer()"):
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
    given = FitOptions(**{name: value for name, value in arguments.items() if name in known})
    given.check_for(network, arguments.get("params"), arguments["l2"])
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
        options.out,
        fit,
        model,
        data,
        source.classes,
        columns=source.columns,
        overwrite=options.overwrite,
        loss=_loss(options),
        **_how_kept(options),
    )
    if options.json:
        print(json.dumps({"run": str(kept.path), "seconds": seconds, **summary(fit)}))
        return
    print(fit)
    if fit.noise is not None:
        how = "estimated from the residuals" if options.noise in (None, ESTIMATE) else "given"
        print(f"  noise of the targets: σ = {fit.noise:g}, {how}")
    print(f"\nRUN: {options.out} ({seconds:.1f} s). What next:")
    print(f"  deltabars predict {options.out} --data DATA    error bars of other data")
    print(f"  deltabars rank {options.out}                   the training examples to look at")


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    arguments = _arguments(options)
    if loss := _loss(options):
        arguments["likelihood"] = call("deltabars.likelihoods.named_loss", **loss)
    if "dtype" in arguments:
        arguments["dtype"] = Code(f"torch.{options.dtype}")
    overwrite = options.overwrite or None
    return program(
        "import torch" if "dtype" in arguments else "",
        "import deltabars",
        "from deltabars.cli.runs import Run",
        "from deltabars.cli.sources import NamedData, NamedModel",
        f"\nmodel = {made(named_model(options))}",
        f"data = {made(named_data(options))}",
        "source = data.load()" + ".with_real_targets()" * _is_regression(options),
        "fit = " + call("deltabars.fit", Code("model.load()"), Code("source.data"), **arguments),
        call(
            "Run.create",
            options.out,
            Code("fit"),
            Code("model"),
            Code("data"),
            Code("source.classes"),
            loss=_loss(options),
            columns=Code("source.columns") if options.target else None,
            overwrite=overwrite,
            **_how_kept(options),
        ),
        "print(fit)",
    )


def interval_of(fit: DeltaFit) -> tuple[float, float] | None:
    """The interval of the effective parameters; None where no eigenvalue is positive."""
    try:
        return fit.effective_parameters_interval
    except BadValueError:
        return None


def summary(fit: DeltaFit) -> dict[str, Any]:
    """What a fit found, for JSON."""
    l2 = fit.l2 if isinstance(fit.l2, float | int) else dict(fit.l2)
    return {
        "estimator": fit.estimator,
        "examples": fit.num_examples,
        "parameters": fit.num_parameters,
        "outputs": fit.num_outputs,
        "rank": fit.rank,
        "likelihood": fit.likelihood.name,
        "noise": fit.noise,
        "l2": l2,
        "level": fit.level,
        "effective_parameters": fit.effective_parameters,
        "effective_parameters_interval": interval_of(fit),
        "train_accuracy": fit.diagnostics["train_accuracy"],
        "relative_gradient": fit.diagnostics["relative_gradient"],
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
    """The keyword arguments of `deltabars.fit` that were given."""
    found: dict[str, Any] = {"l2": _l2(options.l2)}
    found["device"] = str(compute_device(options.device))
    if options.rank is not None:
        found["rank"] = options.rank
    if options.params is not None:
        is_last = options.params == [_LAST_LAYER]
        found["params"] = Code("deltabars.last_layer()") if is_last else options.params
    for name in _PLAIN:
        if getattr(options, name) is not None:
            found[name] = getattr(options, name)
    if options.dtype is not None:
        found["dtype"] = options.dtype
    return found


def _loss(options: argparse.Namespace) -> dict[str, Any] | None:
    """The loss of the training, by the names of `named_loss`; None where nothing says which."""
    given = {name: getattr(options, name) for _, own in LOSSES.values() for name in own}
    given = {name: value for name, value in given.items() if value is not None}
    name = options.loss or options.likelihood
    return {"name": name or "ce", **given} if name or given else None


def _is_regression(options: argparse.Namespace) -> bool:
    return (options.loss or options.likelihood) in ("mse", "gaussian")


def _how_kept(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Run.create` on the fit's files that were given."""
    given = {"dtype": options.store, "max_file_size": options.max_file_size}
    return {name: value for name, value in given.items() if value is not None}


def _l2(given: list[str]) -> float | dict[str, float]:
    """One λ, or λs by pattern."""
    try:
        if len(given) == 1 and "=" not in given[0]:
            return float(given[0])
        pairs = [text.rpartition("=") for text in given]
        if not all(pattern for pattern, _, _ in pairs):
            raise ValueError("a λ without a pattern")
        return {pattern: float(number) for pattern, _, number in pairs}
    except ValueError as error:
        raise BadValueError(
            f"--l2: expected a number, or PATTERN=NUMBER …, got {' '.join(given)!r}."
        ) from error


def _noise(text: str) -> float | str:
    try:
        return text if text == ESTIMATE else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a number or {ESTIMATE}, got {text!r}"
        ) from error


def _rank(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a whole number or auto, got {text!r}"
        ) from error
