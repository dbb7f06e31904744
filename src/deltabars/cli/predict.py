"""`deltabars predict`: predictions of other data, as a file or as a folder of any size."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deltabars.cli.blocks import predict_to, summary_of
from deltabars.cli.options import SPREADS
from deltabars.cli.runs import Kept
from deltabars.cli.subject import Code, Subject, call, check_file, program, sayer
from deltabars.cli.tables import ENDINGS
from deltabars.errors import BadValueError, StorageError
from deltabars.runtime.distributed import current_group


def run(options: argparse.Namespace) -> None:
    """Predict, write the table, and say what was found."""
    into_folder = _is_folder(options.out)
    _check_out(options, into_folder)
    subject = Subject.open(options)
    fit, source = subject.load()
    spread = subject.asked.get("spread", SPREADS[0])
    count = f", {len(source):,} inputs" if len(source) else ""
    sayer(options.quiet)(f"data: {subject.data.spec}{count}")
    if into_folder:
        sizes = {"block_size": options.block_size, "batch_size": options.batch_size}
        written = predict_to(fit, source, options.out, **sizes, **subject.asked)
        found = {"computed": written.computed, "blocks": len(written.blocks), "out": options.out}
        _show({**written.summary, "spread": spread, **found}, options)
        return
    kept, path = subject.predict(fit, source, options.out and Path(options.out))
    judgement = kept.prediction.judgement
    result = {**_summary(kept), "spread": spread, "out": options.out, "predictions": str(path)}
    if options.json:
        _show(result | ({} if judgement is None else {"judgement": judgement.plain}), options)
        return
    _show(result, options)
    for line in judgement.lines if judgement is not None else ():
        print(line)
    print(f"\nThe inputs to look at first: deltabars rank {options.fitted}")
    print(f"A page to look through:      deltabars report {options.fitted} --out report.html")


def python(options: argparse.Namespace) -> str:
    """Return the Python that the command stands for."""
    subject = Subject.open(options)
    batch, out = options.batch_size, options.out
    if _is_folder(out):
        sizes = {"block_size": options.block_size, "batch_size": batch}
        return program(
            *subject.lines("from deltabars.blocks import predict_to"),
            "written = "
            + call("predict_to", Code("fit"), Code("source"), out, **sizes, **subject.asked),
            "print(written.summary)",
        )
    parts = Code("[columns_of(prediction, names, targets, source.classes)]")
    return program(
        *subject.lines("from deltabars.cli.tables import columns_of, write_table" if out else ""),
        "prediction = "
        + call("fit.predict", Code("source.data"), batch_size=batch, **subject.asked),
        "print(prediction)",
        "targets = source.read_targets(fit.signature)" if out else "",
        "names = [source.name(k) for k in range(len(prediction))]" if out else "",
        call("write_table", out, parts) if out else "",
    )


def _is_folder(out: str | None) -> bool:
    """Return whether --out means a folder: a slash at its end, or no ending."""
    if out is None:
        return False
    path = Path(out)
    return out.endswith("/") or not path.suffix or (path.is_dir() and path.suffix not in ENDINGS)


def _check_out(options: argparse.Namespace, into_folder: bool) -> None:
    out = options.out or "none"
    if into_folder:
        if options.overwrite:
            raise BadValueError(
                f"--overwrite: expected a FILE as --out with it, got the folder {out}. Remove it "
                "to begin again."
            )
        return
    if current_group().size > 1:
        raise BadValueError(
            f"--out: expected a folder under torchrun, got {out}. Give --out FOLDER/."
        )
    if options.block_size is not None:
        raise BadValueError(f"--block-size: expected a folder as --out with it, got {out}.")
    if options.out is not None:
        check_file(Path(out), ENDINGS)
        if Path(out).exists() and not options.overwrite:
            raise StorageError(
                f"--out: expected a new file, got {out}. Give --overwrite to replace it."
            )


def _show(result: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        kind = {float: ".4f", int: ","}.get(type(value), "")
        if value is not None:
            print(f"{name.replace('_', ' '):22}{value:{kind}}")


def _summary(kept: Kept) -> dict[str, Any]:
    """Return what the predictions show."""
    prediction, targets, label = kept.prediction, kept.targets, kept.prediction.label
    right = None
    if targets is not None and label is not None and label.shape == targets.shape:
        right = (label == targets).numpy() if label.ndim == 1 else None
    found = summary_of(prediction.score.numpy(), prediction.score_error.numpy(), right)
    for name in ("saturated", "impossible"):
        if (mark := getattr(prediction, name)) is not None:
            found[name] = int(mark.sum())
    return found
