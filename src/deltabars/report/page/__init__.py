"""One self-contained HTML page about a fit and its predictions (plotly, an extra).

`document.py` writes it, with the html, css and js beside it. `subject.py` has the fit, the
predictions and which inputs are shown; `inputs.py` reads these; `contents.py` and `plots.py` say
what is in the parts of the page.
"""

from deltabars.report.page.document import save_report

__all__ = ["save_report"]
