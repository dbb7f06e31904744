"""Several processes: collectives on torch.distributed, and rows that the processes share.

`group.py` has the collectives. `space.py` says which columns of ℝᴾ each process holds.
`vectors.py` has eigenvectors (K, P) that are a tensor, sharded over processes, in files, or in the
memory of the CPU. How data are split is in `problem`; what is computed with it is above.
"""

from deltabars.distributed.group import Columns, Group, alone, current_group

__all__ = ["Columns", "Group", "alone", "current_group"]
