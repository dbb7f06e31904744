"""From a model and its data to a `DeltaFit`, and what a fit can be asked.

`fit.py` is the way from arguments to a result; `state.py` has the data of both, `solving.py` and
`growth.py` choose solver and rank. `fitted.py` is `DeltaFit` itself; `certifying.py` and
`tuning.py` have its longer answers, `files.py` and `checkpoints.py` what is kept of it.
The matrices are in `curvature`, the solvers in `eigen`, the file format in `storage`.
"""
