"""What a pickle or a deep copy of a fit holds, and a fit whose eigenvectors are elsewhere."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deltabars.vectors import PartedVectors

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit


def reduced(fit: DeltaFit) -> tuple[Any, ...]:
    """How to make the fit again: from its fields, without what was kept of computations."""
    values = {field.name: getattr(fit, field.name) for field in fields(fit)}
    plain = {name: dict(values[name]) for name in ("spectra", "diagnostics")}
    return _rebuilt, (type(fit), values | plain | {"_covariances": {}})


def offloaded(fit: DeltaFit) -> DeltaFit:
    """The fit with eigenvectors in the CPU's memory; columns come to the device when needed."""
    device = fit.network.device
    spectra = {
        name: replace(pairs, vectors=PartedVectors.of(pairs.vectors.cpu(), device))
        if isinstance(pairs.vectors, Tensor)
        else pairs
        for name, pairs in fit.spectra.items()
    }
    return replace(fit, spectra=spectra, _covariances={})


def _rebuilt(kind: type[DeltaFit], values: dict[str, Any]) -> DeltaFit:
    return kind(**values)
