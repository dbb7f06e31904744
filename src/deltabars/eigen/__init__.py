"""Eigenpairs of symmetric matrices that are seen through their products with vectors.

Each solver takes any object with `shape` and `matmat` (see `Products` in `pairs.py`) and returns
`EigenPairs`. `basis.py` has the Krylov basis, `quadrature.py` encloses quadratic forms.

Nothing here knows networks, data or statistics.
"""

from deltabars.eigen.dense import dense
from deltabars.eigen.incremental_svd import incremental_svd
from deltabars.eigen.krylov import arpack, block_krylov, lanczos
from deltabars.eigen.pairs import EigenPairs, OnStep

__all__ = ["EigenPairs", "OnStep", "arpack", "block_krylov", "dense", "incremental_svd", "lanczos"]
