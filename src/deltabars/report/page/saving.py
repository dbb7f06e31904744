"""`save_report`: from a fit and inputs to one HTML file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from torch import Tensor

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError, MissingDependencyError
from deltabars.fitted import DeltaFit
from deltabars.predicting import check_asked
from deltabars.prediction import Prediction
from deltabars.progress import Progress
from deltabars.report.page.assembling import assemble
from deltabars.report.page.choosing import choose_rows, choose_shelves
from deltabars.report.page.reading import Source, joined_targets, texts_of
from deltabars.report.page.rows import rows_of
from deltabars.report.page.settling import choose_ranks, settle, silent
from deltabars.report.page.subject import check_subject
from deltabars.writing import check_can_write, write_text

TITLE = "Which predictions to trust"


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

    The fit at a glance, its spectrum, error bars against probability, risk against coverage, the
    most and least certain inputs of each class, and a table whose inputs open to their class
    probabilities with error bars and to how their score settles as K grows. All statistics are over
    all B inputs.

    Args:
        path: the file, whose name ends in `.html`; written whole or not at all.
        fit: the fit.
        inputs: B inputs as `fit.predict` takes them: a tensor, a tuple or mapping of tensors, or a
            map-style Dataset of inputs or of (input, target) pairs.
        targets: class numbers (B,) (Bernoulli and Gaussian: (B, C)); those that come with the
            inputs by default, if any do.
        prediction: that of these inputs, where it is at hand; else it is computed.
        asked: the arguments of `fit.predict` that the prediction was, or is to be, made with:
            `{"rank": 5, "estimator": "opg", "full_rank": False, "classes": "top5"}`, or some of it.
        classes: the names of the C classes; their numbers by default.
        names: the names of the B inputs, such as their files'.
        pictures: a function from the place of an input to its picture, bytes (H, W) or (H, W, 3).
            By default they are made from inputs (B, 1|3, H, W) or (B, H, W).
        title: the heading.
        data: the name of the data, which stands below the heading with the model and the day.
        texts: the inputs as texts, (B,). By default those of a Dataset whose items are mappings
            with one (`"text"`, `"sentence"`, …), as Hugging Face has them.
        rows: how many inputs are in the page at most: the gallery's, those with the highest scores,
            and a sample of the others.
        ranks: the K's at which scores are shown as they settle; by default about ten, an empty
            list for none.
        progress: show a bar.

    Raises:
        MissingDependencyError: plotly is not installed.
        BadValueError: arguments do not fit one another.
        StorageError: the file cannot be written.

    Cost: a prediction of all inputs, and one of those in the page for each rank.
    """
    target = _check_path(path)
    if not is_whole(rows) or rows < 1:
        raise BadValueError(f"rows: expected a whole number from 1 on, got {rows!r}.")
    asked = dict(asked or {})
    if odd := sorted(asked.keys() - {"estimator", "rank", "full_rank", "classes"}):
        raise BadValueError(
            f"asked: expected estimator, rank, full_rank or classes of fit.predict, got {odd}."
        )
    used = check_asked(
        fit, **{name: asked[name] for name in ("estimator", "rank") if name in asked}
    )[1]
    steps = choose_ranks(ranks, used)
    library, version = _plotly()
    source = Source.of(inputs, fit.signature)
    if prediction is None:
        prediction, found = _predict(fit, source, asked, progress)
        targets = found if targets is None else targets
    elif targets is None:
        targets = source.targets()
    subject = check_subject(fit, prediction, asked, targets, classes, names, len(source))
    shelves = choose_shelves(subject, rows)
    places = choose_rows(subject, rows, shelves)
    settling, images = settle(
        fit, source, subject.prediction, asked, places, steps, pictures, progress
    )
    table = rows_of(subject, places, settling, images, texts_of(inputs, texts, places, len(source)))
    model = type(fit.network.model).__name__
    about = [
        *([data] if data else []),
        f"{model}, {asked.get('estimator', fit.estimator)}",
        *_how(asked),
        f"{date.today():%d %B %Y}",
    ]
    write_text(target, assemble(subject, table, shelves, str(title), about, library, version))


def _how(asked: Mapping[str, Any]) -> list[str]:
    """What stands below the heading of a prediction with less than the fit has."""
    how = [f"K = {asked['rank']}"] if "rank" in asked else []
    return how + (["the K pairs alone"] if asked.get("full_rank") is False else [])


def _predict(
    fit: DeltaFit, source: Source, asked: Mapping[str, Any], progress: bool
) -> tuple[Prediction, Tensor | None]:
    """The prediction of all inputs, and the targets that come with them: one pass."""
    quiet, parts, targets, done = silent(fit), [], [], 0
    with Progress("Predicting", len(source), "input", progress) as bar:
        for batch in source.batches():
            parts.append(quiet.predict(batch.inputs, **asked).to("cpu"))
            targets.append(batch.targets)
            done += len(batch)
            bar.show(done)
    return Prediction.concatenate(parts), joined_targets(targets)


def _plotly() -> tuple[str, str]:
    """The program of plotly, and its version."""
    try:
        import plotly
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependencyError(
            "The report needs plotly: pip install 'deltabars[report]'."
        ) from error
    return get_plotlyjs(), plotly.__version__


def _check_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise BadValueError(f"path: expected a name that ends in .html, got {target.name!r}.")
    check_can_write(target, "path")
    return target
