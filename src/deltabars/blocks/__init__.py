"""Predictions of any number of inputs, written to a folder in blocks, each input exactly once."""

from deltabars.blocks.predicting import predict_to
from deltabars.blocks.working import Written

__all__ = ["Written", "predict_to"]
