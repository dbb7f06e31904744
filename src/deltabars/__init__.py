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
    from deltabars.fitting import checking
    from deltabars.fitting.checkpoints import CheckpointFolder
    from deltabars.fitting.fit import fit
    from deltabars.fitting.fitted import DeltaFit, load
    from deltabars.fitting.polishing import polish
    from deltabars.fitting.replicas import resample
    from deltabars.prediction import metrics, ranking
    from deltabars.prediction.prediction import Prediction
    from deltabars.problem.parameters import last_layer
    from deltabars.problem.problem import Problem
    from deltabars.runtime import distributed

__version__ = VERSION

__all__ = [
    "CheckpointFolder", "DeltaFit", "EigenPairs", "Prediction", "Problem", "checking", "curvature",
    "distributed", "eigen", "errors", "fit", "last_layer", "likelihoods", "load", "metrics",
    "polish", "ranking", "resample", "trained",
]  # fmt: skip

_DEFINED_IN = {
    "CheckpointFolder": "fitting.checkpoints",
    "DeltaFit": "fitting.fitted",
    "EigenPairs": "eigen.pairs",
    "Prediction": "prediction.prediction",
    "Problem": "problem.problem",
    "fit": "fitting.fit",
    "last_layer": "problem.parameters",
    "load": "fitting.fitted",
    "polish": "fitting.polishing",
    "resample": "fitting.replicas",
    "trained": "cli.sources.models",
}
# Modules with a shorter name; those below the line are of version 0.5 and go with the next one.
_ALIASES = {
    "checking": "fitting.checking",
    "distributed": "runtime.distributed",
    "metrics": "prediction.metrics",
    "ranking": "prediction.ranking",
    # ----
    "blocks": "cli.blocks",
    "checkpoints": "fitting.checkpoints",
    "ranks": "runtime.distributed",
}


class _Aliases(MetaPathFinder, Loader):
    """Import modules by their shorter names."""

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
    """Import a public name when it is first used: torch takes seconds to import."""
    if name in _DEFINED_IN:
        found = getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    elif name in __all__ or name in _ALIASES:
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
