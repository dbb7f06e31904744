"""What the outputs of a network mean: likelihoods, and the losses that belong to them."""

from deltabars.likelihoods.base import Likelihood, unit_rows
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.likelihoods.losses import Loss, named_loss, read_loss
from deltabars.likelihoods.named import get_likelihood

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
