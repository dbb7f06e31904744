"""The page itself: the parts that are text, and the data that its program draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from deltabars.report import style
from deltabars.report.page.choosing import Shelf
from deltabars.report.page.glance import Fact, Notice, facts, meaning, notices, verdict, versions
from deltabars.report.page.plots import risk_plot, score_histogram, spectrum_plot, uncertainty_plot
from deltabars.report.page.quality import calibration_plot, class_tables
from deltabars.report.page.rows import columns
from deltabars.report.page.subject import Subject

_PROGRAM = ("page.js", "plots.js", "table.js", "gallery.js", "detail.js", "start.js")
_LEFT_OUT = {
    "bernoulli": "There is no gallery by class: an input may have several labels. A prediction "
    "counts as right where all of its labels are.",
    "gaussian": "There is no gallery by class and no risk against coverage: the network predicts "
    "numbers, not classes. The table shows the first output.",
}


def assemble(
    subject: Subject,
    rows: dict[str, Any],
    shelves: Sequence[Shelf],
    title: str,
    about: Sequence[str],
    library: str,
    version: str,
) -> str:
    """The HTML of a page. All text that comes from users is escaped, in the HTML and in the data.

    Args:
        rows: the columns of its inputs (`rows_of`).
        shelves: the gallery.
        about: what the heading says below the title: the data, the model, the day.
        library, version: the program of plotly.
    """
    risk = risk_plot(subject)
    calibration = calibration_plot(subject)
    plots: dict[str, Any] = {
        "spectrum": spectrum_plot(subject),
        "uncertainty": uncertainty_plot(subject, rows["index"]),
        "scores": score_histogram(subject),
        **({"risk": risk} if risk else {}),
        **({"calibration": calibration} if calibration else {}),
    }
    tables = class_tables(subject)
    shown = calibration or {"title": "Calibration", "about": "", "summary": ""}
    data = {
        "kind": subject.kind,
        "classes": list(subject.classes),
        "total": len(subject),
        "columns": columns(subject),
        "rows": rows,
        "shelves": [vars(shelf) for shelf in shelves],
        "plots": plots,
    }
    known = subject.targets is not None
    count = f"{len(subject):,} input{'' if len(subject) == 1 else 's'}"
    parts = {
        "title": escape(title),
        "subtitle": escape(" · ".join([count, *about])),
        "histogram_hidden": "" if risk else "hidden",
        "histogram_about": _SCORES,
        "histogram_summary": escape(plots["scores"]["summary"]),
        "calibration_hidden": "" if calibration else "hidden",
        "calibration_title": escape(shown["title"]),
        "calibration_about": escape(shown["about"]),
        "calibration_summary": escape(shown["summary"]),
        "pair_hidden": "" if risk or calibration else "hidden",
        "classes_hidden": "" if tables else "hidden",
        "class_tables": tables,
        "facts": "\n".join(map(_fact, facts(subject))),
        "meaning": escape(meaning(subject)),
        "notices": _notices(notices(subject), verdict(subject)),
        "spectrum_summary": escape(plots["spectrum"]["summary"]),
        "uncertainty_title": _uncertainty_title(subject),
        "uncertainty_summary": escape(plots["uncertainty"]["summary"]),
        "ranking_id": "risk" if risk else "scores",
        "ranking_title": "Risk against coverage" if risk else "Scores",
        "ranking_about": _RISK if risk else _SCORES + ("" if known else _UNKNOWN),
        "ranking_summary": escape(plots["risk" if risk else "scores"]["summary"]),
        "gallery_hidden": "" if shelves else "hidden",
        "gallery_about": _gallery_about(subject, shelves),
        "left_out": escape(_LEFT_OUT.get(subject.kind, "")),
        "rows_about": escape(_rows_about(subject, len(rows["index"]))),
        "versions": escape(versions(subject, version)),
        "css": Template(_part("page.css")).substitute(_colours()),
        "data": _json(data),
        "library": library.replace("</script", r"<\/script"),
        "program": "\n".join(map(_part, _PROGRAM)),
    }
    return Template(_part("page.html")).substitute(parts)


_RISK = (
    "If the network may decline to answer, it should decline where it errs: the curve to look for "
    "falls quickly towards the left. Each curve orders the inputs by another number."
)
_SCORES = (
    "How many inputs have which score. Those at the right end of this histogram are the ones to "
    "look at first."
)
_UNKNOWN = " The targets were not given, so the page cannot say which predictions are wrong."


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _colours() -> dict[str, str]:
    """The palette of the figures; orange is paler than text may be on white, so vermilion is."""
    return {
        "blue": style.TRUE_POSITIVE,
        "orange": style.FALSE_POSITIVE,
        "vermilion": style.REGRESSION,
        "green": style.FULL_RANK,
    }


def _fact(fact: Fact) -> str:
    name = escape(fact.name).replace("λ_K", "λ<sub>K</sub>")
    return (
        f'<div class="fact"><dt>{name}</dt><dd><strong>{escape(fact.value)}</strong>'
        f"<span>{escape(fact.note)}</span></dd></div>"
    )


def _notices(found: Sequence[Notice], verdict: Notice) -> str:
    kind = "grave" if verdict.grave else "fine"
    return "\n".join(
        [_notice(verdict, kind), *(_notice(n, "grave" if n.grave else "mild") for n in found)]
    )


def _notice(notice: Notice, kind: str) -> str:
    said = {"grave": "", "mild": "Note: ", "fine": ""}[kind]
    return (
        f'<p class="notice {kind}"><strong>{said}{escape(notice.title)}</strong> '
        f"{escape(notice.text)}</p>"
    )


def _uncertainty_title(subject: Subject) -> str:
    return f"Error bar against {'prediction' if subject.kind == 'gaussian' else 'probability'}"


def _gallery_about(subject: Subject, shelves: Sequence[Shelf]) -> str:
    text = "The inputs with the lowest and the highest scores of each predicted class."
    if subject.prediction.label is None or not shelves:
        return text
    missing = len(subject.prediction.label.unique()) - len(shelves)
    more = f" {missing:,} classes that were predicted less often are left out." if missing else ""
    return text + more


def _rows_about(subject: Subject, shown: int) -> str:
    if shown == len(subject):
        return "All inputs are here."
    return (
        f"{shown:,} of {len(subject):,} inputs are here: those of the gallery, those with the "
        "highest scores, and an even sample of the others. All figures above are over all inputs."
    )
