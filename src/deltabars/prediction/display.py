"""Predictions as text, as tables in HTML for notebooks, and as plots in the user's own style."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, library

# Tables have no colours of their own, so that dark pages stay dark.
_AROUND = "font-variant-numeric:tabular-nums;margin:0.3em 0;overflow-x:auto"
_CELL = "padding:0.15em 0.7em;text-align:right;white-space:nowrap"


class Drawn(str):
    """A cell that is HTML already; other cells are text, and escaped."""

    __slots__ = ()


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a row of titles."""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div style="{_AROUND}">{table}</div>'


def paragraph(text: str) -> str:
    """Return a line of text above or below a table."""
    return f'<p style="margin:0.3em 0">{html.escape(text)}</p>'


def _cells(tag: str, cells: Sequence[str]) -> str:
    inside = [cell if isinstance(cell, Drawn) else html.escape(cell) for cell in cells]
    return "".join(f'<{tag} style="{_CELL}">{cell}</{tag}>' for cell in inside)


_IN_TEXT, _IN_HTML = 5, 10  # inputs that are shown
_TITLES = ["input", "output", "mean ± std (± error)", "score (± error)", ""]
_WIDTH, _HEIGHT = 120, 14  # of a drawn error bar, in pixels
_MEANING = {
    "saturated": "the error bar vanishes with the softmax's slope",
    "impossible": "the error bar is above √(p(1 − p))",
}


def describe(prediction: Any) -> str:
    """Describe a prediction by its first inputs, one a line."""
    table = [_TITLES, *(cells for cells, _, _ in _rows(prediction, _IN_TEXT))]
    widths = [max(len(row[j]) for row in table) for j in range(len(_TITLES))]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in table]
    head, below = _around(prediction, _IN_TEXT)
    return "\n".join([head, *lines, *below])


def describe_in_html(prediction: Any) -> str:
    """Describe a prediction by a table of its first inputs, with their error bars drawn."""
    rows = _rows(prediction, _IN_HTML)
    ends = [mean + sign * std for _, mean, std in rows for sign in (-1, 1)]
    if prediction.label is not None and all(0 <= mean <= 1 for _, mean, _ in rows):
        ends = [0.0, 1.0]  # probabilities
    drawn = [[*cells[:3], _bar(mean, std, ends), *cells[3:]] for cells, mean, std in rows]
    table = html_table([*_TITLES[:3], "", *_TITLES[3:]], drawn)
    head, below = _around(prediction, _IN_HTML)
    return paragraph(head) + table + "".join(map(paragraph, below))


def remarks(prediction: Any) -> list[str]:
    """Return the judgement, its remedy, and what the marks of inputs mean, a line each."""
    lines = [] if prediction.judgement is None else prediction.judgement.lines
    marks = [(name, int(mark.sum())) for name, mark in _marks(prediction).items() if mark.any()]
    said = "; ".join(f"{count:,} {name}: {_MEANING[name]}" for name, count in marks)
    return [*lines, f"Marked: {said}."] if said else lines


def marks_of(prediction: Any) -> list[str]:
    """Return what is wrong with the error bars of each input, in a word or two; mostly nothing."""
    known = {name: mark.tolist() for name, mark in _marks(prediction).items()}
    return [", ".join(k for k, mark in known.items() if mark[i]) for i in range(len(prediction))]


def _marks(prediction: Any) -> dict[str, Tensor]:
    marks = {name: getattr(prediction, name) for name in _MEANING}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _rows(prediction: Any, most: int) -> list[tuple[list[str], float, float]]:
    """Return the cells of each input, and the mean and std of its leading output."""
    shown, rows = prediction[:most].to("cpu"), []
    marks = marks_of(shown)
    for i, k in enumerate(shown.mean.argmax(-1).tolist()):
        mean, std, error = (float(x[i, k]) for x in (shown.mean, shown.std, shown.std_error))
        output = k if shown.classes is None else int(shown.classes[i, k])
        bar = f"{mean:.4f} ± {std:.4f} (± {error:.1g})"
        score = f"{float(shown.score[i]):.4f} (± {float(shown.score_error[i]):.1g})"
        rows.append(([f"{i}", f"{output}", bar, score, marks[i]], mean, std))
    return rows


def _around(prediction: Any, most: int) -> tuple[str, list[str]]:
    """Return the line above a table of so many inputs, and those below it."""
    (count, outputs), left = prediction.mean.shape, len(prediction) - most
    inputs, outputs = (
        f"{n} {what}{'s' * (n != 1)}" for n, what in ((count, "input"), (outputs, "output"))
    )
    more = [f"… and {left} more"] if left > 0 else []
    return f"Prediction of {inputs}, {outputs}", [*more, *remarks(prediction)]


def _bar(mean: float, std: float, ends: Sequence[float]) -> Drawn:
    """Draw the mean as a dot and its std as a whisker, on the scale from the least of the ends."""
    low, width = min(ends), (max(ends) - min(ends)) or 1.0
    values = mean - std, mean, mean + std
    left, at, right = (round((_WIDTH - 8) * (value - low) / width + 4, 1) for value in values)
    return Drawn(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" style="vertical-align:middle" '
        f'aria-label="{mean:.4f} ± {std:.4f}"><rect y="3" width="{_WIDTH}" height="8" '
        f'fill="currentColor" opacity="0.12"/><path d="M{left} 7H{right}M{left} 3V11M{right} 3V11" '
        f'stroke="currentColor" stroke-width="1.5"/><circle cx="{at}" cy="7" r="3.5" '
        'fill="#3D8FD1"/></svg>'
    )


_FEW = 6  # inputs whose error bars have room side by side
_MOST_DOTS = 20_000


def axes_or_new(ax: Any) -> Any:
    """Return the Axes given, or those of a new figure."""
    pyplot = library("matplotlib.pyplot", "figures")
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


def draw(prediction: Any, ax: Any = None, targets: Tensor | None = None) -> Any:
    """Draw error bars of all outputs of a few inputs; of many inputs std against mean."""
    shown = prediction.to("cpu")
    label, count, wrong = shown.label, len(shown), None
    if not count:
        raise BadValueError("plot: expected a prediction of one input or more, got none.")
    if targets is not None:
        if label is None or label.ndim > 1 or targets.shape != label.shape:
            got = f"got the shape {tuple(targets.shape)}, or no classes"
            raise BadValueError(
                f"targets: expected the true class of each of {count} inputs, {got}."
            )
        wrong = label != targets.cpu()
    axes = axes_or_new(ax)
    inside = label is not None and bool(((shown.mean >= 0) & (shown.mean <= 1)).all())
    meaning = "probability" if inside else "mean"
    if count <= _FEW:
        _draw_bars(axes, shown, wrong)
        axes.set(xlabel="output" if label is None else "class", ylabel=f"{meaning} ± std")
    else:
        _draw_dots(axes, shown, wrong)
        axes.set(xlabel=meaning, ylabel="std")
    axes.legend()
    return axes


def _draw_bars(axes: Any, shown: Any, wrong: Tensor | None) -> None:
    count, outputs = shown.mean.shape
    style = {"fmt": "o", "markersize": 4, "capsize": 3}
    for i in range(count):
        where = torch.arange(outputs) if shown.classes is None else shown.classes[i]
        beside = (where + 0.6 * ((i + 0.5) / count - 0.5)).numpy()
        label = f"input {i}" + ("" if wrong is None else ", wrong" if wrong[i] else ", right")
        axes.errorbar(beside, shown.mean[i].numpy(), shown.std[i].numpy(), label=label, **style)
    if shown.classes is None and outputs <= 20:
        axes.set_xticks(range(outputs))


def _draw_dots(axes: Any, shown: Any, wrong: Tensor | None) -> None:
    label, mean, std = shown.label, shown.mean.flatten(), shown.std.flatten()
    order = torch.randperm(len(mean), generator=torch.Generator().manual_seed(0))[:_MOST_DOTS]
    every = "all outputs" if label is None else "all classes"
    style = {"s": 4, "color": "gray", "alpha": 0.4, "linewidths": 0}
    axes.scatter(mean[order].numpy(), std[order].numpy(), label=every, **style)
    if label is None or label.ndim > 1 or shown.classes is not None:
        return
    groups = [("predicted class", "#0072B2", torch.ones_like(label, dtype=torch.bool))]
    if wrong is not None:
        groups = [("predicted, right", "#0072B2", ~wrong), ("predicted, wrong", "#E69F00", wrong)]
    x, y = (values.gather(1, label[:, None])[:, 0] for values in (shown.mean, shown.std))
    for name, color, these in groups:
        style = {"s": 12, "color": color, "label": f"{name} ({int(these.sum()):,})"}
        axes.scatter(x[these].numpy(), y[these].numpy(), linewidths=0, **style)
