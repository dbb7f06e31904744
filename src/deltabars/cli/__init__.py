"""The command line: one file a command, RUN folders, named models and data, tables.

`options.py` has all options and imports nothing heavy; what a command computes is in the rooms.
"""

from deltabars.cli.entry import main

__all__ = ["main"]
