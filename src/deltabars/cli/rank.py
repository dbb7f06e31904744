"""`deltabars rank`: the inputs to look at first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from deltabars.cli.subject import Subject, check_file
from deltabars.cli.tables import ENDINGS, columns_of, plain_rows, write_table
from deltabars.errors import BadValueError, printable
from deltabars.prediction.display import remarks
from deltabars.prediction.prediction import Prediction
from deltabars.prediction.ranking import ranked, target_probability


def run(options: argparse.Namespace) -> None:
    """Find or make the predictions, and list the first."""
    if options.count < 1:
        raise BadValueError(f"--count: expected a whole number from 1 on, got {options.count}.")
    check_file(options.out, ENDINGS)
    subject = Subject.open(options, looks=True)
    kept = subject.prediction()
    indices = ranked(
        kept.prediction,
        options.count,
        by=options.by,
        targets=kept.targets,
        most_certain=options.most_certain,
        per_class=options.per_class,
        wrong=options.wrong,
    )
    chosen = kept.prediction[indices]
    targets = None if kept.targets is None else kept.targets[indices]
    names = [kept.names[index] for index in indices.tolist()]
    columns = columns_of(chosen, names, targets, subject.run.classes)
    if options.by == "target":
        columns["target_probability"] = target_probability(chosen, targets).numpy()
    if options.out is not None:
        write_table(options.out, [columns])
    rows = plain_rows(columns)
    if options.json:
        found = {"data": kept.data.spec, "inputs": len(kept.names), "by": options.by, "rows": rows}
        if (judgement := kept.prediction.judgement) is not None:
            found["judgement"] = judgement.plain
        print(json.dumps(found))
        return
    print(f"{len(indices):,} of the {subject.describe(kept)}, by {options.by}")
    print("\n".join([*_table(rows, chosen, options.by), *remarks(chosen)]))


def _table(rows: Sequence[dict[str, Any]], chosen: Prediction, by: str) -> list[str]:
    """Return lines of text with aligned columns, that of the order among them."""
    column = {"target": "target_probability", "score": "", "probability": ""}.get(by, by)
    title = "probability of target" if by == "target" else column.replace("_", " ")
    titles = [
        "", "input", "target", title, "predicted", "probability ± std", "score (± error)", "note",
    ]  # fmt: skip
    cells = [titles]
    for number, row in enumerate(rows):
        probability, bar = row.get("probability"), chosen.std[number, chosen.mean[number].argmax()]
        cells.append([
            str(number + 1),
            printable(row["input"]),
            printable(row.get("target_name", row.get("target", ""))),
            f"{row[column]:.4f}" if column and row[column] is not None else "",
            printable(row.get("label_name", row.get("label", ""))),
            "" if probability is None else f"{probability:.4f} ± {float(bar):.4f}",
            f"{row['score']:.4f} (± {row['score_error']:.1g})",
            ", ".join(name for name in ("saturated", "impossible") if row.get(name)),
        ])  # fmt: skip
    used = [j for j in range(len(titles)) if any(row[j] for row in cells[1:]) or j == 1]
    widths = {j: max(len(row[j]) for row in cells) for j in used}
    aligned = {j: "<" if j in (1, 2, 4, 7) else ">" for j in used}
    lines = ("  ".join(f"{row[j]:{aligned[j]}{widths[j]}}" for j in used) for row in cells)
    return [line.rstrip() for line in lines]
