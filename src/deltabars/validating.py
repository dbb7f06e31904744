"""The loss of moderated predictions on data that were not trained on, for many λ at once."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltabars.batches import iterate, labelled
from deltabars.covariance import ESTIMATORS, Covariance
from deltabars.decay import scaled
from deltabars.errors import DataError, SpectrumWarning
from deltabars.likelihoods import Bernoulli, Gaussian, Likelihood
from deltabars.moderation import SAMPLES, choose_moderation
from deltabars.noise import noises_at
from deltabars.precision import full_precision
from deltabars.prediction import Prediction
from deltabars.progress import Progress
from deltabars.scoring import Scorer

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit

_READ_SIZE = 1024  # examples


def validation_losses(fit: DeltaFit, data: Any, levels: Tensor) -> Tensor:
    """The mean −log p(target) for each λ, (n,), float64; p as moderated, or with the total std.

    F and its projections are computed once, for all λ. Cost: that of one prediction of the data,
    and n·C·K operations an example.
    """
    names = ESTIMATORS[fit.estimator]
    method = "sampling" if fit.likelihood.discrete else None
    with full_precision(fit.network.device):
        covariances = _covariances(fit, levels)
    scorer = Scorer(
        fit.pullback,
        fit.likelihood,
        fit.signature,
        {matrix: fit.spectra[matrix].vectors for matrix in sorted(names)},
        covariances,
        "probability",
        "rigorous",
        with_covariance=False,
        classes=None,
        moderation=choose_moderation(
            method, SAMPLES, 0, fit.num_outputs, fit.likelihood, subset=False
        ),
        memory_budget=fit.memory_budget,
    )
    total, count = torch.zeros(len(levels), dtype=torch.float64), 0
    with Progress("Validating", None, "example", fit.progress) as bar:
        noises = noises_at(fit, levels).tolist()
        for raw in iterate(data, _READ_SIZE):
            batch = labelled(raw, fit.likelihood.counted)
            assert batch.targets is not None
            if not len(batch):
                continue
            found = scorer.predict(batch.inputs, None, False)
            targets = fit.likelihood.arranged(batch.targets, fit.num_outputs)
            targets = targets.to(fit.network.device)
            fit.likelihood.check_targets(found["0"].mean, targets)
            for place, prediction in enumerate(found.values()):
                losses = _losses(fit.likelihood, prediction, targets, noises[place])
                total[place] += float(losses.sum())
            count += len(targets)
            bar.show(count)
    if not count:
        raise DataError("Validation data: expected at least one example, got none.")
    return total / count


def _covariances(fit: DeltaFit, levels: Tensor) -> dict[str, Covariance]:
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectrumWarning)  # of λs that are only tried
        for place, level in enumerate(levels.tolist()):
            moved = fit.with_l2(scaled(fit.l2, level / fit.level))
            found[str(place)] = moved.covariance_of(fit.estimator, fit.rank)
    return found


def _losses(
    likelihood: Likelihood, prediction: Prediction, targets: Tensor, noise: float
) -> Tensor:
    """−log p of each target at a noise of its own, (B,)."""
    if isinstance(likelihood, Gaussian):
        total_std = (prediction.variance + noise**2).sqrt()
        gap = (targets - prediction.mean) / total_std
        density = 0.5 * gap.square() + total_std.log() + 0.5 * math.log(2 * math.pi)
        return density.sum(-1)
    assert prediction.moderated is not None
    if isinstance(likelihood, Bernoulli):
        right = torch.where(targets > 0, prediction.moderated, 1 - prediction.moderated)
        return -right.log().sum(-1)
    return -prediction.moderated.gather(1, targets.long()[:, None]).squeeze(1).log()
