"""Tables in HTML, for notebooks: without colours of their own, so that dark pages stay dark."""

from __future__ import annotations

import html
from collections.abc import Sequence

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
