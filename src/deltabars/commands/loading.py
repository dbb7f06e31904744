"""The first lines of the Python that a command on a RUN stands for."""

from __future__ import annotations

import argparse

from deltabars.commands.options import asked_of, compute_device, is_data_named, named_data
from deltabars.commands.predicting import arguments_for, open_run
from deltabars.commands.python import Code, call, made


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
        "from deltabars.runs import Run",
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
        *fit_lines(options, *imports, "from deltabars.sources import NamedData"),
        f"data = {made(data)}",
        "source = run.load_data(data)",
        f"prediction = {predict}",
        "targets = source.read_targets(fit.signature)",
        "names = [source.name(k) for k in range(len(prediction))]",
    ]
