"""How a computation runs: memory, precision, progress, and the processes that share it.

`memory.py` has budgets, `precision.py` determinism and threads, `progress.py` bars and lines,
`sums.py` inner products in float64, `fingerprint.py` one digest for values of every kind.
`distributed.py` has the collectives, on torch.distributed (public as `deltabars.distributed`), and
`vectors.py` rows of ℝᴾ that several processes share. Nothing here knows a network.
"""

VERSION = "0.5.0"
