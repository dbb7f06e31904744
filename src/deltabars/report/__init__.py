"""Figures (matplotlib) and the page (plotly) about fits and predictions; both are extras."""
