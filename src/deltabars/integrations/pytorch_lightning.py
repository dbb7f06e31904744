"""The callback for `pytorch_lightning`: error bars at the end of the training."""

from __future__ import annotations

from deltabars.errors import MissingDependencyError
from deltabars.integrations.callbacks import FitsAtTheEnd

try:
    from pytorch_lightning.callbacks import Callback
except ImportError as error:
    needed = "This callback needs Lightning: pip install 'deltabars[lightning]'."
    raise MissingDependencyError(needed) from error


class DeltaBarsCallback(FitsAtTheEnd, Callback):
    """Fits error bars at the end of `trainer.fit`: see `FitsAtTheEnd` for its arguments."""
