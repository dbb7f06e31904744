"""Error bars for the predictions of any trained PyTorch network, by the Delta method.

The public names are below; everything else is in the rooms, which docs/architecture.md walks
through. Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deltabars.runtime import VERSION

if TYPE_CHECKING:
    from deltabars import curvature, eigen, errors, likelihoods
    from deltabars.cli.sources.models import trained
    from deltabars.eigen.pairs import EigenPairs
    from deltabars.fitting.fit import fit
    from deltabars.fitting.fitted import DeltaFit
    from deltabars.fitting.loading import load
    from deltabars.prediction import metrics, ranking
    from deltabars.prediction.prediction import Prediction
    from deltabars.problem.parameters import last_layer
    from deltabars.problem.problem import Problem
    from deltabars.runtime import distributed
    from deltabars.runtime import distributed as ranks


__version__ = VERSION

__all__ = [
    "DeltaFit",
    "EigenPairs",
    "Prediction",
    "Problem",
    "curvature",
    "distributed",
    "eigen",
    "errors",
    "fit",
    "last_layer",
    "likelihoods",
    "load",
    "metrics",
    "ranking",
    "ranks",
    "trained",
]

_DEFINED_IN = {
    "DeltaFit": "fitting.fitted",
    "EigenPairs": "eigen.pairs",
    "Prediction": "prediction.prediction",
    "Problem": "problem.problem",
    "fit": "fitting.fit",
    "last_layer": "problem.parameters",
    "load": "fitting.loading",
    "trained": "cli.sources.models",
}
# Modules that have a short name beside their own; `ranks`, `blocks` and `checkpoints` are those of
# version 0.5, and go with the next one.
_SHORT = {
    "distributed": "runtime.distributed",
    "metrics": "prediction.metrics",
    "ranking": "prediction.ranking",
    "ranks": "runtime.distributed",
    "blocks": "cli.blocks.predicting",
    "checkpoints": "fitting.checkpoints",
}


class _Short(ModuleType):
    """A module under a short name, imported when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        short = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(f"deltabars.{_SHORT[short]}"), name)


for _name in _SHORT:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _Short(f"{__name__}.{_name}")


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: torch takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _DEFINED_IN:
        return importlib.import_module(f"{__name__}.{name}")
    found = getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
