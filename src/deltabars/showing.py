"""A prediction in a few lines of text, and as a table in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltabars.markup import Drawn, html_table, paragraph

if TYPE_CHECKING:
    from deltabars.prediction import Prediction

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


def _note_of(prediction: Prediction, place: int) -> str:
    """What is wrong with the error bars of an input, in a word."""
    marks = {"saturated": prediction.saturated, "impossible": prediction.impossible}
    return ", ".join(name for name, mark in marks.items() if mark is not None and mark[place])


def remarks(prediction: Prediction) -> list[str]:
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


def describe_prediction(prediction: Prediction) -> str:
    """The first inputs, one a line."""
    table = [_TITLES, *(row.cells for row in _rows(prediction, _IN_TEXT))]
    widths = [max(len(row[j]) for row in table) for j in range(len(_TITLES))]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in table]
    more = _more(prediction, _IN_TEXT)
    return "\n".join([_head(prediction), *lines, *more, *remarks(prediction)])


def describe_prediction_in_html(prediction: Prediction) -> str:
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


def _rows(prediction: Prediction, most: int) -> list[_Row]:
    shown = prediction[:most].to("cpu")
    rows = []
    for i, k in enumerate(shown.mean.argmax(-1).tolist()):
        numbers = (shown.mean[i, k], shown.std[i, k], shown.std_error[i, k])
        output = k if shown.classes is None else int(shown.classes[i, k])
        scores = (shown.score[i], shown.score_error[i])
        told = (float(x) for x in (*numbers, *scores))
        rows.append(_Row(i, output, _note_of(shown, i), *told))
    return rows


def _head(prediction: Prediction) -> str:
    count, outputs = prediction.mean.shape
    return f"Prediction of {_count(count, 'input')}, {_count(outputs, 'output')}"


def _more(prediction: Prediction, most: int) -> list[str]:
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
