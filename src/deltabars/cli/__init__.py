"""The command line: one file a command, RUN folders, named models and data, tables."""

from deltabars.cli.entry import main

__all__ = ["main"]
