"""The first lines of the Python that a command on a RUN stands for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltabars.cli.options import (
    Code,
    asked_of,
    call,
    compute_device,
    is_data_named,
    made,
    named_data,
    named_model,
    sayer,
)
from deltabars.cli.runs import Kept, Run
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.source import Source
from deltabars.cli.tables import Columns, columns_of, write_table
from deltabars.errors import DataError, printable
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.prediction import Prediction
from deltabars.runtime.progress import Progress
from deltabars.storage.writing import check_parent


def fit_lines(options: argparse.Namespace, *imports: str) -> list[str]:
    """Code that opens a RUN as `run` and loads its fit into `fit`."""
    given = {
        "spec": options.model,
        "weights": options.weights,
        "arguments": options.model_args,
    }
    other_model = any(value is not None for value in given.values())
    model = call("replace", Code("run.model"), **given)
    device = str(compute_device(options.device))
    return [
        "from dataclasses import replace" if other_model else "",
        "from deltabars.cli.runs import Run",
        *imports,
        f"\nrun = {call('Run.open', options.fitted)}",
        f"run = replace(run, model={model})" if other_model else "",
        f"fit = {call('run.load_fit', device=device, offload=options.offload)}",
    ]


def is_latest(options: argparse.Namespace) -> bool:
    """Whether a command without data is about the last prediction of the RUN."""
    if is_data_named(options) or asked_of(options):
        return False
    return open_run(options).latest() is not None


def prediction_lines(
    options: argparse.Namespace, *imports: str, default_is_latest: bool = False
) -> list[str]:
    """Code that gives `fit`, `source`, `prediction`, `targets` and `names`, as a command does."""
    found = open_run(options)
    latest = found.latest() if default_is_latest and options.data is None else None
    if latest is not None and not is_data_named(options) and not asked_of(options):
        return [
            *fit_lines(options, *imports),
            "kept = run.latest()",
            "data = kept.data",
            "source = run.load_data(data)",
            "prediction, targets, names = kept.prediction, kept.targets, kept.names",
        ]
    data = named_data(options, found.data if latest is None else latest.data)
    asked = arguments_for(options, found)
    predict = call("fit.predict", Code("source.data"), batch_size=options.batch_size, **asked)
    return [
        *fit_lines(options, *imports, "from deltabars.cli.sources import NamedData"),
        f"data = {made(data)}",
        "source = run.load_data(data)",
        f"prediction = {predict}",
        "targets = source.read_targets(fit.signature)",
        "names = [source.name(k) for k in range(len(prediction))]",
    ]


MANY_CLASSES = 100
FEW = "top5"


def open_run(options: argparse.Namespace) -> Run:
    """The RUN that was named, with another model where one was given."""
    found = Run.open(options.fitted)
    return replace(found, model=named_model(options, found.model))


def load_fit(found: Run, options: argparse.Namespace) -> DeltaFit:
    """The fit of a RUN, on the device that was asked for."""
    device = str(compute_device(options.device))
    return found.load_fit(device=device, offload=options.offload, progress=not options.quiet)


def load_all(options: argparse.Namespace) -> tuple[Run, NamedData, Source, DeltaFit]:
    """A RUN, the data that a command is about (its own, if none were named), and its fit."""
    found = open_run(options)
    data = named_data(options, found.data)
    fit = load_fit(found, options)
    _check(fit, arguments_for(options, found), options)
    source = found.load_data(data)
    count = f", {len(source):,} inputs" if len(source) else ""
    sayer(options.quiet)(f"data: {data.spec}{count}")
    return found, data, source, fit


def arguments_for(options: argparse.Namespace, found: Run) -> dict[str, Any]:
    """The arguments of `predict`: a few classes where there are many and none was asked for."""
    asked = asked_of(options)
    if "classes" not in asked and found.num_outputs > MANY_CLASSES:
        asked["classes"] = FEW
    return asked


def find_or_predict(options: argparse.Namespace, found: Run) -> Kept:
    """The prediction that a command is about.

    Of the data that were named; else of those that were predicted last; else of the training data.
    It is computed, and kept, where it is not there yet.
    """
    latest = None if options.data is not None else found.latest()
    if latest is not None and not is_data_named(options) and not asked_of(options):
        return latest
    data = named_data(options, found.data if latest is None else latest.data)
    asked = arguments_for(options, found)
    fit = None
    if asked_of(options) or options.batch_size is not None:
        fit = load_fit(found, options)
        _check(fit, asked, options)
    source = found.load_data(data)
    kept = found.find(data, about(asked, source))
    if kept is not None:
        return kept
    sayer(options.quiet)(f"predicting {data.spec}")
    fit = fit or load_fit(found, options)
    return predict_and_keep(found, fit, data, source, asked, options, aside=True)[0]


def subject(found: Run, kept: Kept) -> str:
    """What a prediction is of, how it was asked for, and when it was made, in words."""
    asked = [
        f"{name.replace('_', '-')} {value}" for name, value in dict(kept.about["asked"]).items()
    ]
    when = found.when(kept)
    return (
        f"{len(kept.names):,} inputs of {printable(kept.data.spec)}"
        + ("" if when is None else f", predicted {when:%Y-%m-%d %H:%M}")
        + (f" with {printable(', '.join(asked))}" if asked else "")
    )


def _check(fit: DeltaFit, asked: dict[str, Any], options: argparse.Namespace) -> None:
    """Refuse what the fit cannot give, before data are read."""
    known = {name: asked[name] for name in ("estimator", "rank", "classes") if name in asked}
    fit.check_request(batch_size=options.batch_size, **known)


def predict_and_keep(
    found: Run,
    fit: DeltaFit,
    data: NamedData,
    source: Source,
    asked: dict[str, Any],
    options: argparse.Namespace,
    out: Path | None = None,
    *,
    aside: bool = False,
) -> tuple[Kept, Path]:
    """Predict all inputs, write a table of them, and keep the result: that, and where it is.

    `aside` of a command that was to look at them, which does not decide what others are about.
    """
    check_parent(found.path / "predictions", "RUN")
    into = _Predicted([], [], [])
    parts = _tables(
        fit, source, asked, into, batch_size=options.batch_size, progress=not options.quiet
    )
    if out is not None:
        write_table(out, parts)
    else:
        for _ in parts:
            pass
    kept = into.kept(data, about(asked, source))
    return kept, found.keep(kept, aside=aside)


def about(asked: dict[str, Any], source: Source) -> dict[str, Any]:
    """What tells a kept prediction from others, beside the names of the data."""
    return {"asked": asked, "fingerprint": source.fingerprint}


@dataclass
class _Predicted:
    """The parts of a prediction, as they come."""

    parts: list[Prediction]
    names: list[str]
    targets: list[Tensor]

    def kept(self, data: NamedData, asked: dict[str, Any]) -> Kept:
        """All parts as one."""
        targets = torch.cat(self.targets) if self.targets else None
        prediction = Prediction.concatenate(self.parts)
        return Kept(prediction, tuple(self.names), targets, data, asked)


def _tables(
    fit: DeltaFit,
    source: Source,
    asked: dict[str, Any],
    into: _Predicted,
    *,
    batch_size: int | None,
    progress: bool,
) -> Iterator[Columns]:
    """Predict a batch at a time: the table of each, while its prediction goes `into` the rest.

    Raises:
        DataError: there are no inputs.
    """
    quiet = fit.with_progress(False)
    with Progress("Predicting", len(source) or None, "input", progress) as bar:
        for batch in source.batches(fit.signature):
            part = quiet.predict(batch.inputs, batch_size=batch_size, **asked).to("cpu")
            done = len(into.names)
            names = [source.name(done + k) for k in range(len(part))]
            into.parts.append(part)
            into.names += names
            if batch.targets is not None:
                into.targets.append(batch.targets)
            yield columns_of(part, names, batch.targets, source.classes)
            bar.show(len(into.names))
    if not into.names:
        raise DataError("--data: expected at least one input, got none.")
