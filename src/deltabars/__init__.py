"""Error bars for the predictions of any trained PyTorch network, by the Delta method.

The public names are below; everything else is in the rooms, which docs/architecture.md walks
through. Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
# Modules that can be imported by a shorter name; `ranks`, `blocks` and `checkpoints` are those of
# version 0.5, and go with the next one.
_ALIASES = {
    "metrics": "prediction.metrics",
    "ranking": "prediction.ranking",
    "ranks": "runtime.distributed",
    "distributed": "runtime.distributed",
    "blocks": "cli.blocks.predicting",
    "checkpoints": "fitting.checkpoints",
}


class _Aliases(MetaPathFinder, Loader):
    """Imports the modules that have shorter names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, alias = name.rpartition(".")
        return ModuleSpec(name, self) if package == __name__ and alias in _ALIASES else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        alias = module.__name__.rpartition(".")[2]
        sys.modules[module.__name__] = importlib.import_module(f"{__name__}.{_ALIASES[alias]}")


sys.meta_path.append(_Aliases())


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
