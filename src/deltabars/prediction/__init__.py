"""Predictions with error bars, and what is done with them: averages, rankings, metrics, display."""

from deltabars.prediction.prediction import Prediction

__all__ = ["Prediction"]
