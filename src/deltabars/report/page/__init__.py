"""One self-contained HTML page about a fit and its predictions (plotly, an extra).

`save_report` writes it, with the html, css and js beside it. `subject.py` has the fit, the
predictions and which inputs are shown; `inputs.py` reads these; `contents.py` and `plots.py` say
what is in the parts of the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from deltabars.covariance.estimators import SPREADS
from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, library
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.state import check_spread
from deltabars.prediction.prediction import Prediction
from deltabars.report.page.contents import columns, facts, notices, ratio, rows_of
from deltabars.report.page.inputs import Source, choose_ranks, settle, texts_of
from deltabars.report.page.plots import class_tables, plots_of
from deltabars.report.page.subject import Shelf, Subject, check_subject, choose_rows, choose_shelves
from deltabars.runtime import VERSION
from deltabars.storage.writing import check_can_write, write_text

TITLE = "Which predictions to trust"

_ASKED = ("estimator", "rank", "full_rank", "classes", "spread")  # arguments of predict
_PROGRAM = ("page.js", "plots.js", "table.js", "gallery.js", "detail.js", "start.js")


def save_report(
    path: str | os.PathLike[str],
    fit: DeltaFit,
    inputs: Any,
    *,
    targets: Any = None,
    prediction: Prediction | None = None,
    asked: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    pictures: Callable[[int], Any] | None = None,
    title: str = TITLE,
    data: str | None = None,
    texts: Sequence[str] | None = None,
    rows: int = 1000,
    ranks: Sequence[int] | None = None,
    progress: bool = True,
) -> None:
    """Write a page about a fit and its predictions: one HTML file that needs no network.

    The fit at a glance, its plots, the most and least certain inputs of each class, and a table
    whose inputs open to their details. All statistics are over all B inputs.

    Args:
        path: the file, whose name ends in `.html`; written whole or not at all.
        fit: the fit.
        inputs: B inputs as `fit.predict` takes them: a tensor, a tuple or mapping of tensors, or a
            map-style Dataset of inputs or of (input, target) pairs.
        targets: class numbers (B,) (Bernoulli and Gaussian: (B, C)); those that come with the
            inputs by default, if any do.
        prediction: that of these inputs, where it is at hand; else it is computed.
        asked: the arguments of `fit.predict` that the prediction was, or is to be, made with:
            `{"rank": 5, "estimator": "opg", "full_rank": False, "classes": "top5", "spread":
            "sampling"}`, or some of it.
        classes, names: of the C classes and the B inputs; their numbers by default.
        pictures: a function from the index of an input to its picture, bytes (H, W) or (H, W, 3).
            By default they are made from inputs (B, 1|3, H, W) or (B, H, W).
        title: the heading.
        data: the name of the data, in the line below the heading.
        texts: the inputs as texts, (B,). By default those of a Dataset whose items are mappings
            with one (`"text"`, `"sentence"`, …), as Hugging Face has them.
        rows: how many inputs are in the page at most: the gallery's, those with the highest scores,
            and a sample of the others.
        ranks: the K's at which scores are shown as they settle; by default about ten, an empty
            list for none.
        progress: show a bar.

    Cost: a prediction of all inputs, and one of those in the page for each rank.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise BadValueError(f"path: expected a name that ends in .html, got {target.name!r}.")
    check_can_write(target, "path")
    if not is_whole(rows) or rows < 1:
        raise BadValueError(f"rows: expected a whole number from 1 on, got {rows!r}.")
    asked = dict(asked or {})
    if odd := sorted(asked.keys() - {*_ASKED}):
        raise BadValueError(f"asked: expected some of {', '.join(_ASKED)}, got {odd}.")
    check_spread(asked.get("spread", SPREADS[0]))
    used = fit.check_request(estimator=asked.get("estimator"), rank=asked.get("rank"))[1]
    steps = choose_ranks(ranks, used)
    library("PIL", "report")  # of the pictures
    plotly = library("plotly", "report")
    library("plotly.offline", "report")
    source = Source.of(inputs, fit)
    if prediction is None:
        prediction = fit.predict(inputs, progress=progress, **asked)
    if targets is None:
        targets = source.targets()
    subject = check_subject(fit, prediction, asked, targets, classes, names, len(source))
    shelves = choose_shelves(subject, rows)
    chosen = choose_rows(subject, rows, shelves)
    settling, images = settle(source, subject.prediction, asked, chosen, steps, pictures, progress)
    table = rows_of(subject, chosen, settling, images, texts_of(inputs, texts, chosen, len(source)))
    about = [
        f"{len(subject):,} input{'' if len(subject) == 1 else 's'}",
        *([data] if data else []),
        f"{type(fit.network.model).__name__}, {asked.get('estimator', fit.estimator)}",
        f"{subject.spread} spread",
        *([f"K = {asked['rank']}"] if "rank" in asked else []),
        *(["the K pairs alone"] if asked.get("full_rank") is False else []),
        f"{date.today():%d %B %Y}",
    ]
    write_text(target, _assemble(subject, table, shelves, str(title), about, plotly))


def _assemble(
    subject: Subject,
    rows: dict[str, Any],
    shelves: Sequence[Shelf],
    title: str,
    about: Sequence[str],
    plotly: Any,
) -> str:
    """Return the HTML. All text that comes from users is escaped, in the HTML and in the data."""
    label = subject.prediction.label
    data = {
        "kind": subject.kind,
        "spread": subject.spread,
        "facts": facts(subject),
        "notices": notices(subject),
        "ratio": ratio(subject),
        "classes": list(subject.classes),
        "total": len(subject),
        "columns": columns(subject),
        "rows": rows,
        "shelves": [vars(shelf) for shelf in shelves],
        "left_out": 0 if label is None else len(label.unique()) - len(shelves),
        "plots": plots_of(subject, rows["index"]),
        "tables": class_tables(subject),
    }
    fitted_with = subject.fit.diagnostics.get("torch")
    versions = f"deltabars {VERSION}, plotly {plotly.__version__}"
    versions += f"; fitted with torch {fitted_with}" if fitted_with else ""
    return Template(_part("page.html")).substitute(
        title=escape(title),
        subtitle=escape(" · ".join(about)),
        versions=escape(versions),
        css=_part("page.css"),
        data=_json(data),
        library=plotly.offline.get_plotlyjs().replace("</script", r"<\/script"),
        program="\n".join(map(_part, _PROGRAM)),
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
