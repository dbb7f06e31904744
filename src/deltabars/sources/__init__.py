"""Models and data as they are named on a command line."""

from deltabars.sources.data import NamedData
from deltabars.sources.models import NamedModel
from deltabars.sources.source import Source

__all__ = ["NamedData", "NamedModel", "Source"]
