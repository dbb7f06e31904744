"""A training cost at its trained point: the network, its data, its likelihood and λ.

`problem.py` is the one place where 1/N and λ enter. `network.py` holds a private copy of the model,
`parameters.py` and `prior.py` say which parameters count and with which λ, `data.py` serves the
examples. Derivatives beyond one gradient are in `curvature`.
"""

from deltabars.problem.problem import Problem

__all__ = ["Problem"]
