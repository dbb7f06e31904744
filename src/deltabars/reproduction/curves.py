"""What changes as K grows: error bars of the test set, and the score of a foreign image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.recipes.paper import Recipe
from deltabars.report.smoothing import smooth
from deltabars.reproduction.experiment import Experiment
from deltabars.reproduction.stages import Arrays

_GRID = torch.linspace(0, 1, 51, dtype=torch.float64)
_BANDWIDTH = 0.03
_REFERENCES = 10


def surfaces(experiment: Experiment) -> Arrays:
    """The smoothed std and its error (the paper's bound) of the OPG estimator, over K and
    probability, for all classes of all test images.

    Returns:
        `ranks` (R,), `grid` (g,), `std` and `error` (R, g).
    """

    def compute() -> Arrays:
        fit, ranks = experiment.fit, experiment.size.ranks
        images = experiment.test[0].to(experiment.device)
        options: dict[str, Any] = {"estimator": "opg", "bound": "paper", "moderation": None}
        found = [fit.predict(images, rank=rank, **options) for rank in ranks]
        probability = found[-1].mean.flatten().cpu()
        curves = {
            name: smooth(
                probability,
                torch.stack([getattr(each, field).flatten().cpu() for each in found]),
                _GRID,
                _BANDWIDTH,
            ).numpy()
            for name, field in (("std", "std"), ("error", "std_error"))
        }
        return {"ranks": np.array(ranks), "grid": _GRID.numpy(), **curves}

    return experiment.stages.arrays("surfaces", compute)


def foreign(experiment: Experiment) -> Arrays:
    """Scores of the OPG estimator over K: a foreign image at full and at low rank, and the training
    images of the highest scores.

    Returns:
        `image`; `ranks`, `full`, `full_low`, `full_high` and `low_rank` (R,); `references` (n, R)
        of the training images at `places` (n,).
    """

    def compute() -> Arrays:
        fit, ranks = experiment.fit, experiment.size.ranks
        image = chessboard(experiment.recipe)
        score = torch.from_numpy(experiment.predictions("train")["opg_score"])
        places = score.sort(descending=True, stable=True).indices[:_REFERENCES]
        images = torch.cat([image[None], experiment.train[0][places]]).to(experiment.device)
        options: dict[str, Any] = {"estimator": "opg", "moderation": None}
        full = [fit.predict(images, rank=rank, bound="paper", **options) for rank in ranks]
        low = [fit.predict(images, rank=rank, full_rank=False, **options) for rank in ranks]
        scores = torch.stack([each.score for each in full], dim=1).cpu().numpy()  # (1 + n, R)
        return {
            "image": image.numpy(),
            "ranks": np.array(ranks),
            "full": scores[0],
            "full_low": np.array([float(each.score_low[0]) for each in full]),
            "full_high": np.array([float(each.score_high[0]) for each in full]),
            "low_rank": np.array([float(each.score[0]) for each in low]),
            "references": scores[1:],
            "places": places.numpy(),
        }

    return experiment.stages.arrays("foreign", compute)


def chessboard(recipe: Recipe) -> Tensor:
    """Four by four squares, black and white: neither a digit nor anything of CIFAR-10."""
    square = torch.arange(recipe.side) // (recipe.side // 4)
    board = (square[:, None] + square[None, :]) % 2
    return board.float().expand(recipe.channels, -1, -1).clone()
