"""What a pickle or a deep copy of a fit holds."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit


def reduced(fit: DeltaFit) -> tuple[Any, ...]:
    """How to make the fit again: from its fields, without what was kept of computations."""
    values = {field.name: getattr(fit, field.name) for field in fields(fit)}
    plain = {name: dict(values[name]) for name in ("spectra", "diagnostics")}
    return _rebuilt, (type(fit), values | plain | {"_covariances": {}})


def _rebuilt(kind: type[DeltaFit], values: dict[str, Any]) -> DeltaFit:
    return kind(**values)
