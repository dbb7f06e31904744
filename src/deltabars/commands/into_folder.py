"""`deltabars predict --out FOLDER/`: any number of inputs, by one process or by many."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltabars.blocks import predict_to
from deltabars.commands.loading import fit_lines
from deltabars.commands.options import named_data
from deltabars.commands.predicting import arguments_for, load_all, open_run
from deltabars.commands.python import Code, call, made, program
from deltabars.judging import Judgement
from deltabars.tables import ENDINGS


def is_folder(out: str | None) -> bool:
    """Whether --out means a folder: a name with a slash at its end, or without an ending."""
    if out is None:
        return False
    path = Path(out)
    return out.endswith("/") or not path.suffix or (path.is_dir() and path.suffix not in ENDINGS)


def predict_into_folder(options: argparse.Namespace) -> None:
    """Predict what is not there yet, and say what was found."""
    found, data, source, fit = load_all(options)
    written = predict_to(
        fit,
        source,
        options.out,
        block_size=options.block_size,
        batch_size=options.batch_size,
        about=asdict(data.absolute()),
        **arguments_for(options, found),
    )
    result = {
        **written.summary,
        "computed": written.computed,
        "blocks": len(written.blocks),
        "out": options.out,
    }
    show(result, options)


def folder_program(options: argparse.Namespace) -> str:
    """The Python that it stands for."""
    found = open_run(options)
    data = named_data(options, found.data)
    given = {"block_size": options.block_size, "batch_size": options.batch_size}
    asked = arguments_for(options, found)
    arguments = [Code("fit"), Code("run.load_data(data)"), options.out]
    about = Code("asdict(data.absolute())")
    return program(
        "from dataclasses import asdict",
        *fit_lines(
            options,
            "from deltabars.blocks import predict_to",
            "from deltabars.sources import NamedData",
        ),
        f"data = {made(data)}",
        f"written = {call('predict_to', *arguments, **given, about=about, **asked)}",
        "print(written.summary)",
    )


def show(
    result: dict[str, Any], options: argparse.Namespace, judgement: Judgement | None = None
) -> None:
    """What was found, as text or as JSON."""
    if options.json:
        told = {} if judgement is None else {"judgement": judgement.plain}
        print(json.dumps({**result, **told}))
        return
    for name, value in result.items():
        if value is not None:
            print(f"{name.replace('_', ' '):22}{_text(value)}")
    for line in judgement.lines if judgement is not None else ():
        print(line)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
