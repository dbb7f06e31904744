"""`deltabars report`: one page to look through the predictions of a RUN."""

from __future__ import annotations

import argparse
import json

from deltabars.cli.subject import Subject, check_file, load_fit
from deltabars.errors import BadValueError
from deltabars.report.page import save_report


def run(options: argparse.Namespace) -> None:
    """Find or make the predictions, and write the page."""
    check_file(options.out, (".html", ".htm"))
    if options.rows < 1:
        raise BadValueError(f"--rows: expected a whole number from 1 on, got {options.rows}.")
    subject = Subject.open(options, looks=True)
    kept, run = subject.prediction(), subject.run
    source = run.load_data(kept.data)
    if source.fingerprint is not None and source.fingerprint != kept.about["fingerprint"]:
        raise BadValueError(
            f"--data: expected {kept.data.spec} as it was predicted, got it changed. Predict again."
        )
    fit = load_fit(run, options)
    save_report(
        options.out, fit, source.inputs(fit.signature), targets=kept.targets,
        prediction=kept.prediction, asked=kept.about["asked"], classes=run.classes,
        names=kept.names, pictures=source.picture, data=kept.data.spec, rows=options.rows,
        progress=not options.quiet,
        **({} if options.title is None else {"title": options.title}),
    )  # fmt: skip
    if options.json:
        print(json.dumps({"out": str(options.out), "inputs": len(kept.names)}))
        return
    print(f"The page of {subject.describe(kept)}: {options.out}")
