"""Models and data as they are named on a command line."""

from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.cli.sources.source import Source

__all__ = ["NamedData", "NamedModel", "Source"]
