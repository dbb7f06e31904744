"""One self-contained HTML page about a fit and its predictions (plotly, an extra)."""

from deltabars.report.page.assembling import save_report

__all__ = ["save_report"]
