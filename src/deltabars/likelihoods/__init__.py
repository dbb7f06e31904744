"""What the outputs of a network mean: the loss, the mean and its derivatives.

One file a likelihood; `base.py` says what each must have, and reads names and torch's loss modules.
"""

from deltabars.likelihoods.base import Likelihood, Loss, named_loss
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "Loss", "named_loss"]
