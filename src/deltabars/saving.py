"""DeltaFit to a file: what goes into the header, and what into tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deltabars import storage
from deltabars.errors import StorageError
from deltabars.likelihoods.named import LIKELIHOODS, described, is_own

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit

TENSORS = ("values", "vectors", "residuals", "smallest", "smallest_residuals")


def save(fit: DeltaFit, path: Any) -> None:
    """Write a fit to one file."""
    if not is_own(fit.likelihood):
        raise StorageError(
            f"Cannot write {path}: expected one of the likelihoods {sorted(LIKELIHOODS)}, got one "
            "of your own, which a file cannot hold."
        )
    space = fit.network.parameters
    header = {
        "estimator": fit.estimator,
        "l2": dict(fit.l2) if isinstance(fit.l2, Mapping) else fit.l2,
        "level": fit.level,
        "scales": dict(fit.decay.scales),
        "num_examples": fit.num_examples,
        "num_outputs": fit.num_outputs,
        "likelihood": described(fit.likelihood),
        "dtype": str(fit.network.dtype),
        "parameters": [
            {"name": name, "shape": list(shape)}
            for name, shape in zip(space.names, space.shapes, strict=True)
        ],
        "weights": fit.weights,
        "deterministic": fit.network.deterministic,
        "inputs": asdict(fit.signature),
        "diagnostics": dict(fit.diagnostics),
        "statistics": {name: dict(pairs.statistics) for name, pairs in fit.spectra.items()},
    }
    tensors = {
        f"{name}.{field}": getattr(pairs, field)
        for name, pairs in fit.spectra.items()
        for field in TENSORS
    }
    storage.write(path, header, tensors)
