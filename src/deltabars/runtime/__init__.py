"""How a computation runs: memory, precision, progress, threads, and several processes."""

VERSION = "0.5.0"
