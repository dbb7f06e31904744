"""The callback for `pytorch_lightning`, beside which `lightning` may be installed as well."""

from __future__ import annotations

from typing import Any

from deltabars.errors import library
from deltabars.integrations.lightning import FitsAtTheEnd

Callback: Any = library("pytorch_lightning.callbacks", "lightning").Callback


class DeltaBarsCallback(FitsAtTheEnd, Callback):  # type: ignore[misc]
    """Fits error bars at the end of `trainer.fit`: see `FitsAtTheEnd` for its arguments."""
