"""`deltabars report`: one page to look through the predictions of a RUN."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deltabars.cli.options import (
    DATA_HELP,
    Code,
    add_asked,
    add_data,
    add_output,
    add_run,
    call,
    program,
)
from deltabars.cli.predicting import (
    arguments_for,
    find_or_predict,
    is_latest,
    load_fit,
    open_run,
    prediction_lines,
    subject,
)
from deltabars.errors import BadValueError
from deltabars.storage.writing import check_can_write

_DESCRIPTION = """\
Write one page that opens in a browser, from disk and without a network: the fit at a glance, its
spectrum, error bars against probabilities, the most and least certain inputs with their pictures,
and a table to sort and filter. Without --data it is about the last predictions of the RUN, or else
about its training data.

"""
_EPILOG = """\
examples:
  deltabars report run --out report.html
  deltabars report run --data train/ --out training.html --title "Which training pictures are odd?"
"""
_ENDINGS = (".html", ".htm")


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "report",
        help="a page to look through the predictions",
        description=_DESCRIPTION + DATA_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser)
    add_data(parser, required=False, default=" (default: what was predicted last)")
    add_asked(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the page: .html")
    add("--rows", type=int, default=1000, metavar="N", help="inputs in the page (default: 1000)")
    add("--title", help="of the page")
    add_output(parser)
    parser.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Find or make the predictions, and write the page."""
    from deltabars.report.page import save_report

    if options.out.suffix.lower() not in _ENDINGS:
        raise BadValueError(
            f"--out: expected a file name that ends in one of {', '.join(_ENDINGS)}, got "
            f"{options.out.name!r}."
        )
    if options.rows < 1:
        raise BadValueError(f"--rows: expected a whole number from 1 on, got {options.rows}.")
    check_can_write(options.out, "--out")
    found = open_run(options)
    kept = find_or_predict(options, found)
    source = found.load_data(kept.data)
    if source.fingerprint is not None and source.fingerprint != kept.about["fingerprint"]:
        raise BadValueError(
            f"--data: expected {kept.data.spec} as it was when it was predicted, got it changed. "
            f"Run deltabars predict {options.fitted} --data {kept.data.spec} again."
        )
    fit = load_fit(found, options)
    save_report(
        options.out,
        fit,
        source.inputs(fit.signature),
        targets=kept.targets,
        prediction=kept.prediction,
        asked=kept.about["asked"],
        classes=found.classes,
        names=kept.names,
        pictures=source.picture,
        data=kept.data.spec,
        rows=options.rows,
        progress=not options.quiet,
        **({} if options.title is None else {"title": options.title}),
    )
    if options.json:
        print(json.dumps({"out": str(options.out), "inputs": len(kept.names)}))
        return
    print(f"The page of {subject(found, kept)}: {options.out}")


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    asked = arguments_for(options, open_run(options))
    return program(
        *prediction_lines(
            options, "from deltabars.report.page import save_report", default_is_latest=True
        ),
        call(
            "save_report",
            options.out,
            Code("fit"),
            Code("source.inputs(fit.signature)"),
            targets=Code("targets"),
            prediction=Code("prediction"),
            asked=Code('kept.about["asked"]') if is_latest(options) else asked or None,
            classes=Code("run.classes"),
            names=Code("names"),
            data=Code("data.spec"),
            pictures=Code("source.picture"),
            rows=options.rows,
            title=options.title,
        ),
    )
