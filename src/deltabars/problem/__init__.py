"""A training cost at its trained point: the network, its data, its likelihood and λ.

`problem.py` is the one place where 1/N and λ enter. `parameters.py` is about the user's module: a
private copy of it, which parameters count, and with which λ; `network.py` computes with the copy,
and `definitions.py` has the operations that torch cannot differentiate as it computes them.
`data.py` serves the examples, `sharding.py` splits them between processes. Derivatives beyond one
gradient are in `curvature`.
"""

from deltabars.problem.problem import Problem

__all__ = ["Problem"]
