"""`deltabars predict --out FOLDER/`: any number of inputs, by one process or by many."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltabars.cli.blocks.predicting import predict_to
from deltabars.cli.launching import add_launch
from deltabars.cli.options import (
    DATA_HELP,
    Code,
    add_asked,
    add_data,
    add_output,
    add_run,
    call,
    made,
    named_data,
    program,
)
from deltabars.cli.predicting import (
    arguments_for,
    fit_lines,
    load_all,
    open_run,
    predict_and_keep,
    prediction_lines,
)
from deltabars.cli.runs import Kept
from deltabars.cli.tables import ENDINGS, check_ending
from deltabars.errors import BadValueError, StorageError
from deltabars.prediction.prediction import Judgement
from deltabars.runtime.distributed import current_group
from deltabars.storage.writing import check_can_write


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
            "from deltabars.cli.sources import NamedData",
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


_DESCRIPTION = """\
Put error bars on the predictions of other data with a fit. Writes one row an input: its name, the
target where it is known, the predicted class and its probability, the score and its own error,
mutual information and entropy, and mean, std and std_error of every class. The predictions are kept
in RUN/predictions, for `deltabars rank` and `deltabars report`.

With a FOLDER as --out nothing is held in memory: the rows go to Parquet files of a block of inputs
each, and after a crash or a kill the same command goes on with those that are not there yet, also
under torchrun, on any number of processes. FOLDER/_manifest.json is there when all of them are.

"""
_EPILOG = """\
examples:
  deltabars predict run --data test/ --out test.csv
  deltabars predict run --data scans.npz --out scans.parquet --estimator opg
  deltabars predict run --data photos/ --out photos.jsonl --classes top5
  torchrun --nproc-per-node=8 -m deltabars predict run --data data.py:millions --out scores/
"""


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "predict",
        help="predictions with error bars, as a table",
        description=_DESCRIPTION + DATA_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser)
    add_data(parser, required=True, default=" to predict")
    add_asked(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=".csv, .jsonl or .parquet; or FOLDER/, for any number of inputs",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a FILE that is there")
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="inputs a file in FOLDER (default: by how many there are, up to 10,000)",
    )
    add_output(parser)
    add_launch(parser)
    parser.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Predict, write the table, and say what was found."""
    if is_folder(options.out):
        if options.overwrite:
            raise BadValueError(
                f"--overwrite: expected a FILE as --out with it, got the folder {options.out}. "
                "Remove it to begin again; without the option the blocks that are there stay."
            )
        predict_into_folder(options)
        return
    _check_out(options)
    found, data, source, fit = load_all(options)
    asked = arguments_for(options, found)
    out = None if options.out is None else Path(options.out)
    kept, path = predict_and_keep(found, fit, data, source, asked, options, out)
    result = {**summary(kept), "out": options.out, "predictions": str(path)}
    show(result, options, kept.prediction.judgement)
    if options.json:
        return
    print(f"\nThe inputs to look at first: deltabars rank {options.fitted}")
    print(f"A page to look through:      deltabars report {options.fitted} --out report.html")


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    if is_folder(options.out):
        return folder_program(options)
    wanted = "from deltabars.cli.tables import columns_of, write_table"
    parts = Code("[columns_of(prediction, names, targets, source.classes)]")
    return program(
        *prediction_lines(options, wanted if options.out else ""),
        "print(prediction)",
        call("write_table", options.out, parts) if options.out else "",
    )


def summary(kept: Kept) -> dict[str, Any]:
    """What the predictions show, for JSON."""
    prediction, targets = kept.prediction, kept.targets
    found: dict[str, Any] = {
        "inputs": len(prediction),
        "mean_score": float(prediction.score.mean()),
        "mean_score_error": float(prediction.score_error.mean()),
    }
    labels = prediction.label
    if (
        targets is not None
        and labels is not None
        and labels.shape == targets.shape == (len(prediction),)
    ):
        right = labels == targets
        found["accuracy"] = float(right.double().mean())
        for name, rows in (("right", right), ("wrong", ~right)):
            mean = float(prediction.score[rows].mean()) if bool(rows.any()) else None
            found[f"mean_score_{name}"] = mean
    for name in ("saturated", "impossible"):
        mark = getattr(prediction, name)
        if mark is not None:
            found[name] = int(mark.sum())
    return found


def _check_out(options: argparse.Namespace) -> None:
    """Refuse a file that could not be written at the end."""
    if current_group().size > 1:
        raise BadValueError(
            "--out: expected a folder under torchrun, in which each process writes files of its "
            f"own, got {options.out or 'nothing'}. Give --out FOLDER/."
        )
    if options.block_size is not None:
        raise BadValueError(
            f"--block-size: expected a folder as --out with it, got {options.out or 'none'}."
        )
    if options.out is not None:
        check_ending(Path(options.out))
        check_can_write(Path(options.out), "--out")
        if Path(options.out).exists() and not options.overwrite:
            raise StorageError(
                f"--out: expected a file that does not exist, got {options.out}. Give --overwrite "
                "to replace it."
            )
