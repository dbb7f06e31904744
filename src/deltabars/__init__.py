"""Error bars for the predictions of any trained PyTorch network, by the Delta method."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltabars import curvature, eigen, errors, likelihoods, ranks
    from deltabars.eigen import EigenPairs
    from deltabars.fitted import DeltaFit
    from deltabars.fitting import fit
    from deltabars.loading import load
    from deltabars.parameters import last_layer
    from deltabars.prediction import Prediction
    from deltabars.problem import Problem
    from deltabars.sources.models import trained

__version__ = "0.5.0"

__all__ = [
    "DeltaFit",
    "EigenPairs",
    "Prediction",
    "Problem",
    "curvature",
    "eigen",
    "errors",
    "fit",
    "last_layer",
    "likelihoods",
    "load",
    "ranks",
    "trained",
]

_ROOMS = {
    "DeltaFit": "fitted",
    "EigenPairs": "eigen",
    "Prediction": "prediction",
    "Problem": "problem",
    "fit": "fitting",
    "last_layer": "parameters",
    "load": "loading",
    "trained": "sources.models",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used.

    torch takes seconds to import, and a command must be able to answer Ctrl-C in them.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = importlib.import_module(f"{__name__}.{_ROOMS.get(name, name)}")
    found = getattr(room, name) if name in _ROOMS else room
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
