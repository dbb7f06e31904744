"""The callback for `pytorch_lightning`: error bars at the end of the training."""

from __future__ import annotations

from deltabars.errors import MissingDependencyError
from deltabars.integrations.callbacks import FitsAtTheEnd

try:
    from pytorch_lightning.callbacks import Callback
except ImportError as error:
    raise MissingDependencyError(
        "This callback needs Lightning: pip install 'deltabars[lightning]'."
    ) from error


class DeltaBarsCallback(FitsAtTheEnd, Callback):
    """Fits error bars at the end of `trainer.fit`, and scores predictions from then on.

    Arguments, attributes and what is logged: see `FitsAtTheEnd`.
    """
