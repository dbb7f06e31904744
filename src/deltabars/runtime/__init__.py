"""How a computation runs: memory, precision, progress, and the processes that share it.

`memory.py` has budgets, `precision.py` determinism and threads, `progress.py` bars and lines,
`distributed.py` the collectives on torch.distributed (public as `deltabars.distributed`), and
`vectors.py` rows of ℝᴾ, which processes may share. Nothing here knows a network.
"""

VERSION = "0.5.0"
