"""Which predictions to trust most, and which least."""

from __future__ import annotations

from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.prediction import Prediction


def most_certain(prediction: Prediction, count: int) -> Tensor:
    """The places (count,) of the inputs with the lowest scores, the lowest first."""
    return _order(prediction, count, descending=False)


def least_certain(prediction: Prediction, count: int) -> Tensor:
    """The places (count,) of the inputs with the highest scores, the highest first."""
    return _order(prediction, count, descending=True)


def _order(prediction: Prediction, count: int, descending: bool) -> Tensor:
    if not 1 <= count <= len(prediction):
        raise BadValueError(f"count: expected 1 to {len(prediction)}, got {count}.")
    return prediction.score.sort(descending=descending, stable=True).indices[:count]
