"""Tables in HTML, for notebooks: without colours of their own, so that dark pages stay dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, MissingDependencyError

_AROUND = "font-variant-numeric:tabular-nums;margin:0.3em 0;overflow-x:auto"
_CELL = "padding:0.15em 0.7em;text-align:{};white-space:nowrap"


class Drawn(str):
    """A cell that is HTML already; other cells are text, and escaped."""

    __slots__ = ()


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "right") -> str:
    """A table with a row of titles (none where `head` is empty)."""
    titles = "".join(_cell("th", cell, align) for cell in head)
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, align) for cell in row) + "</tr>" for row in rows
    )
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return f'<div style="{_AROUND}"><table>{top}<tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    """A line of text above or below a table."""
    return f'<p style="margin:0.3em 0">{html.escape(text)}</p>'


def _cell(tag: str, cell: str, align: str) -> str:
    inside = cell if isinstance(cell, Drawn) else html.escape(cell)
    return f'<{tag} style="{_CELL.format(align)}">{inside}</{tag}>'


_FEW = 6  # inputs whose error bars have room side by side
_MOST_DOTS = 20_000


def draw_prediction(
    prediction: Any,
    ax: Any = None,
    targets: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """Error bars of all outputs of a few inputs; of many inputs std against mean.

    Raises:
        BadValueError: there is no input, targets do not fit, or there are not C names.
    """
    shown = prediction.to("cpu")
    count, outputs = shown.mean.shape
    if not count:
        raise BadValueError("plot: expected a prediction of one input or more, got none.")
    if names is not None and (shown.classes is not None or len(names) != outputs):
        raise BadValueError(
            f"names: expected one for each of all {outputs} outputs, got {len(names)} of them"
            f"{' for chosen classes' if shown.classes is not None else ''}."
        )
    wrong = _wrong(shown, targets)
    axes = axes_or_new(ax)
    if count <= _FEW:
        _draw_bars(axes, shown, wrong, names)
    else:
        _draw_dots(axes, shown, wrong)
    return axes


def _draw_bars(axes: Any, shown: Any, wrong: Tensor | None, names: Sequence[str] | None) -> None:
    count, outputs = shown.mean.shape
    places = torch.arange(outputs, dtype=torch.float64)
    for i in range(count):
        said = f"input {i}" + ("" if wrong is None else ", wrong" if wrong[i] else ", right")
        where = places if shown.classes is None else shown.classes[i].double()
        axes.errorbar(
            (where + 0.6 * ((i + 0.5) / count - 0.5)).numpy(),
            shown.mean[i].numpy(),
            yerr=shown.std[i].numpy(),
            linestyle="none",
            marker="o",
            markersize=4,
            capsize=3,
            label=said,
        )
    if shown.classes is None and (names is not None or outputs <= 20):
        axes.set_xticks(
            range(outputs), [str(k) for k in range(outputs)] if names is None else names
        )
    axes.set_xlabel("class" if shown.label is not None else "output")
    axes.set_ylabel(f"{_meaning(shown)} ± std")
    axes.legend()


def _draw_dots(axes: Any, shown: Any, wrong: Tensor | None) -> None:
    label = shown.label
    of_class = label is not None and label.ndim == 1 and shown.classes is None
    mean, std = shown.mean.flatten(), shown.std.flatten()
    if len(mean) > _MOST_DOTS:
        chosen = torch.randperm(len(mean), generator=torch.Generator().manual_seed(0))
        mean, std = mean[chosen[:_MOST_DOTS]], std[chosen[:_MOST_DOTS]]
    said = "all classes" if label is not None else "all outputs"
    axes.scatter(mean.numpy(), std.numpy(), s=4, color="gray", alpha=0.4, linewidths=0, label=said)
    if of_class:
        assert label is not None
        groups = {"predicted class": torch.ones(len(label), dtype=torch.bool)}
        if wrong is not None:
            groups = {"predicted, right": ~wrong, "predicted, wrong": wrong}
        top = shown.mean.gather(1, label[:, None])[:, 0], shown.std.gather(1, label[:, None])[:, 0]
        for (name, these), color in zip(groups.items(), ("#0072B2", "#E69F00"), strict=False):
            x, y = (values[these].numpy() for values in top)
            axes.scatter(
                x, y, s=12, color=color, linewidths=0, label=f"{name} ({int(these.sum()):,})"
            )
    axes.set_xlabel(_meaning(shown))
    axes.set_ylabel("std")
    axes.legend()


def _meaning(shown: Any) -> str:
    inside = bool(((shown.mean >= 0) & (shown.mean <= 1)).all())
    return "probability" if shown.label is not None and inside else "mean"


def _wrong(shown: Any, targets: Tensor | None) -> Tensor | None:
    if targets is None:
        return None
    if shown.label is None or shown.label.ndim > 1 or targets.shape != shown.label.shape:
        raise BadValueError(
            f"targets: expected the true class of each of {len(shown)} inputs, for a prediction of "
            f"one class an input, got the shape {tuple(targets.shape)}."
        )
    return shown.label != targets.cpu()


def marker_for(count: int) -> str | None:
    """A marker for a curve of so many points: a line needs two."""
    return "o" if count == 1 else None


def axes_or_new(ax: Any) -> Any:
    """The Axes given, or those of a new figure."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            "Pictures need matplotlib: pip install 'deltabars[figures]'."
        ) from error
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


_IN_TEXT, _IN_HTML = 5, 10  # inputs that are shown
_WIDTH, _HEIGHT = 120, 14  # of a bar, in pixels
_FILL = "#3D8FD1"  # is seen on white and on black


@dataclass(frozen=True)
class _Row:
    """One input: its leading output with the error bar, and the score."""

    place: int
    output: int
    note: str
    mean: float
    std: float
    std_error: float
    score: float
    score_error: float

    @property
    def cells(self) -> list[str]:
        return [
            f"{self.place}",
            f"{self.output}",
            f"{self.mean:.4f} ± {self.std:.4f} (± {self.std_error:.1g})",
            f"{self.score:.4f} (± {self.score_error:.1g})",
            self.note,
        ]


_TITLES = ["input", "output", "mean ± std (± error)", "score (± error)", ""]


def _note_of(prediction: Any, place: int) -> str:
    """What is wrong with the error bars of an input, in a word."""
    marks = {"saturated": prediction.saturated, "impossible": prediction.impossible}
    return ", ".join(name for name, mark in marks.items() if mark is not None and mark[place])


def remarks(prediction: Any) -> list[str]:
    """The judgement, a line for its reason and one for the remedy; of marks what they mean."""
    lines = [] if prediction.judgement is None else prediction.judgement.lines
    counts = [
        (int(mark.sum()), said)
        for mark, said in (
            (prediction.saturated, "saturated: the error bar vanishes with the softmax's slope"),
            (prediction.impossible, "impossible: the error bar is above √(p(1 − p))"),
        )
        if mark is not None
    ]
    said = "; ".join(f"{count:,} {said}" for count, said in counts if count)
    return [*lines, *([f"Marked: {said}."] if said else [])]


def describe_prediction(prediction: Any) -> str:
    """The first inputs, one a line."""
    table = [_TITLES, *(row.cells for row in _rows(prediction, _IN_TEXT))]
    widths = [max(len(row[j]) for row in table) for j in range(len(_TITLES))]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in table]
    more = _more(prediction, _IN_TEXT)
    return "\n".join([_head(prediction), *lines, *more, *remarks(prediction)])


def describe_prediction_in_html(prediction: Any) -> str:
    """The first inputs as a table, with a bar for each mean and a whisker for its std."""
    rows = _rows(prediction, _IN_HTML)
    is_probability = prediction.label is not None and all(0 <= row.mean <= 1 for row in rows)
    ends = [row.mean + sign * row.std for row in rows for sign in (-1, 1)]
    scale = (0.0, 1.0) if is_probability or not ends else (min(ends), max(ends))
    table = html_table(
        [*_TITLES[:3], "", *_TITLES[3:]],
        [[*row.cells[:3], _bar(row, scale, is_probability), *row.cells[3:]] for row in rows],
    )
    lines = [*_more(prediction, _IN_HTML), *remarks(prediction)]
    more = "".join(paragraph(line) for line in lines)
    return paragraph(_head(prediction)) + table + more


def _rows(prediction: Any, most: int) -> list[_Row]:
    shown = prediction[:most].to("cpu")
    rows = []
    for i, k in enumerate(shown.mean.argmax(-1).tolist()):
        numbers = (shown.mean[i, k], shown.std[i, k], shown.std_error[i, k])
        output = k if shown.classes is None else int(shown.classes[i, k])
        scores = (shown.score[i], shown.score_error[i])
        told = (float(x) for x in (*numbers, *scores))
        rows.append(_Row(i, output, _note_of(shown, i), *told))
    return rows


def _head(prediction: Any) -> str:
    count, outputs = prediction.mean.shape
    return f"Prediction of {_count(count, 'input')}, {_count(outputs, 'output')}"


def _more(prediction: Any, most: int) -> list[str]:
    left = len(prediction) - most
    return [f"… and {left} more"] if left > 0 else []


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _bar(row: _Row, scale: tuple[float, float], filled: bool) -> Drawn:
    """The mean as a bar from 0 (or as a dot on a scale of all rows), its std as a whisker."""
    low, high = scale
    width = (high - low) or 1.0
    middle = _HEIGHT / 2

    def place(value: float) -> float:
        return round((_WIDTH - 4) * (value - low) / width + 2, 1)  # room for a whisker's end

    at, left, right = place(row.mean), place(row.mean - row.std), place(row.mean + row.std)
    mark = (
        f'<rect x="2" y="3" width="{at - 2:.1f}" height="{_HEIGHT - 6}" fill="{_FILL}"/>'
        if filled
        else f'<circle cx="{at}" cy="{middle:g}" r="3.5" fill="{_FILL}"/>'
    )
    whisker = f"M{left} {middle:g}H{right}M{left} 3.5V{_HEIGHT - 3.5}M{right} 3.5V{_HEIGHT - 3.5}"
    return Drawn(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" style="vertical-align:middle" '
        f'aria-label="{row.mean:.4f} ± {row.std:.4f}">'
        f'<rect x="2" y="3" width="{_WIDTH - 4}" height="{_HEIGHT - 6}" fill="currentColor" '
        f'opacity="0.12"/>{mark}<path d="{whisker}" stroke="currentColor" stroke-width="1.5" '
        'fill="none"/></svg>'
    )
