"""Figures (matplotlib) and the page (plotly) about fits and predictions; both are extras.

The numbers in them come from `fitting` and `prediction`.
"""
