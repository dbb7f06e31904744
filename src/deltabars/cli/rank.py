"""`deltabars rank`: the inputs to look at first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from deltabars.cli.predicting import find_or_predict, open_run, prediction_lines, subject
from deltabars.cli.tables import check_ending, columns_of, plain_rows, write_table
from deltabars.errors import BadValueError, printable
from deltabars.prediction.display import remarks
from deltabars.prediction.ranking import CRITERIA, ranked, target_probability
from deltabars.storage.writing import check_can_write

_DESCRIPTION = """\
List the inputs to look at first: those with the highest score, whose probabilities are least
settled. Without --data the last predictions of the RUN, or else its training data. Of a labelled
training folder, --by target lists the examples whose own label is least probable (odd or
mislabelled ones), and --wrong --most-certain those that the network contradicts with certainty.

"""
_EPILOG = """\
examples:
  deltabars rank run                               # of what was predicted last
  deltabars rank run --data train/ --by target     # training pictures that may be mislabelled
  deltabars rank run --data test/ --wrong --most-certain --out wrong.csv
  deltabars rank run --by mutual_information       # unlike the training data
"""
# Columns of a table that no other column shows.
_SORTED_BY = {
    "target": ("target_probability", "probability of target"),
    "entropy": ("entropy", "entropy"),
    "mutual_information": ("mutual_information", "mutual information"),
}


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "rank",
        help="the inputs to look at first",
        description=_DESCRIPTION + DATA_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser)
    add_data(parser, required=False, default=" (default: what was predicted last)")
    add_asked(parser)
    add = parser.add_argument_group("the list").add_argument
    add("--count", type=int, default=20, metavar="N", help="how many (default: %(default)s)")
    add("--by", choices=CRITERIA, default="score", help="what the order is by (default: score)")
    add("--most-certain", action="store_true", help="the other end of the order")
    add("--per-class", action="store_true", help="so many of each predicted class")
    add("--wrong", action="store_true", help="those alone whose predicted class is not the target")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".csv, .jsonl or .parquet")
    add_output(parser)
    parser.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Find or make the predictions, and list the first."""
    if options.count < 1:
        raise BadValueError(f"--count: expected a whole number from 1 on, got {options.count}.")
    if options.out is not None:
        check_ending(options.out)
        check_can_write(options.out, "--out")
    found = open_run(options)
    kept = find_or_predict(options, found)
    places = ranked(
        kept.prediction,
        options.count,
        by=options.by,
        targets=kept.targets,
        most_certain=options.most_certain,
        per_class=options.per_class,
        wrong=options.wrong,
    )
    chosen = kept.prediction[places]
    targets = None if kept.targets is None else kept.targets[places]
    names = [kept.names[place] for place in places.tolist()]
    columns = columns_of(chosen, names, targets, found.classes)
    if options.by == "target":
        columns["target_probability"] = target_probability(chosen, targets).numpy()
    if options.out is not None:
        write_table(options.out, [columns])
    if options.json:
        judged = kept.prediction.judgement
        told = {} if judged is None else {"judgement": judged.plain}
        result = {"data": kept.data.spec, "inputs": len(kept.names), "by": options.by, **told}
        print(json.dumps({**result, "rows": plain_rows(columns)}))
        return
    print(f"{len(places):,} of the {subject(found, kept)}, by {options.by}")
    lines = _table(plain_rows(columns), chosen.std, _places(chosen), options.by)
    for line in [*lines, *remarks(chosen)]:
        print(line)


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    flags = {
        name: getattr(options, name) or None for name in ("most_certain", "per_class", "wrong")
    }
    arguments = {"by": options.by, "targets": Code("targets"), **flags}
    wanted = "from deltabars.cli.tables import columns_of, write_table"
    columns = Code("[columns_of(prediction[places], first, given, run.classes)]")
    return program(
        *prediction_lines(
            options,
            "from deltabars.ranking import ranked",
            wanted if options.out else "",
            default_is_latest=True,
        ),
        "places = " + call("ranked", Code("prediction"), options.count, **arguments),
        "first = [names[place] for place in places.tolist()]",
        "given = None if targets is None else targets[places]" if options.out else "",
        call("write_table", options.out, columns) if options.out else "",
        "for name, score in zip(first, prediction.score[places].tolist(), strict=True):",
        "    print(name, score)",
    )


def _places(chosen: Any) -> Tensor:
    """Where the leading output is among those computed, (B,)."""
    return chosen.mean.argmax(-1) if len(chosen) else torch.empty(0, dtype=torch.int64)


def _table(rows: Sequence[dict[str, Any]], std: Tensor, leading: Tensor, by: str) -> list[str]:
    """Lines of text with aligned columns, that of the order among them."""
    column, title = _SORTED_BY.get(by, ("", ""))
    titles = [
        "", "input", "target", title, "predicted", "probability ± std", "score (± error)", "note",
    ]  # fmt: skip
    cells = [titles]
    for number, row in enumerate(rows):
        label = row.get("label_name", row.get("label", ""))
        bar = float(std[number, leading[number]])
        probability = row.get("probability")
        cells.append(
            [
                str(number + 1),
                printable(row["input"]),
                printable(row.get("target_name", row.get("target", ""))),
                f"{row[column]:.4f}" if column and row[column] is not None else "",
                printable(label),
                "" if probability is None else f"{probability:.4f} ± {bar:.4f}",
                f"{row['score']:.4f} (± {row['score_error']:.1g})",
                ", ".join(name for name in ("saturated", "impossible") if row.get(name)),
            ]
        )
    used = [j for j in range(len(titles)) if any(row[j] for row in cells[1:]) or j == 1]
    widths = {j: max(len(row[j]) for row in cells) for j in used}
    left = (1, 2, 4, 7)
    return [
        "  ".join(
            row[j].ljust(widths[j]) if j in left else row[j].rjust(widths[j]) for j in used
        ).rstrip()
        for row in cells
    ]
