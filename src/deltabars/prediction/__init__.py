"""Predictions with error bars, and what is done with them: averages, rankings, metrics, display.

`prediction.py` is the result, `scoring.py` computes it. Pictures and pages are in `report`.
"""

from deltabars.prediction.prediction import Prediction

__all__ = ["Prediction"]
