"""What the outputs of a network mean: the loss, the mean and its derivatives.

One file a likelihood; `base.py` says what each must have, `losses.py` reads torch's loss modules.
"""

from deltabars.likelihoods.base import Likelihood, unit_rows
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.likelihoods.losses import Loss, get_likelihood, named_loss, read_loss

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "Loss",
    "get_likelihood",
    "named_loss",
    "read_loss",
    "unit_rows",
]
