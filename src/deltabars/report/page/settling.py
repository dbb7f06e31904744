"""How the scores of a page's inputs settle as K grows, and their pictures: one pass over both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.eigen.pairs import is_whole
from deltabars.errors import BadValueError
from deltabars.fitted import DeltaFit
from deltabars.prediction import Prediction
from deltabars.progress import Progress
from deltabars.report.page.pictures import Pictures, drawn, given, longest_side
from deltabars.report.page.reading import Source, image_of

_CHUNK = 128  # inputs read at a time
_STEPS = 10
_AGREE = 1e-3  # of a score: float32 in chunks of another size differs by less


@dataclass(frozen=True)
class Settling:
    """The scores of n inputs at R ranks, with the ends of their intervals."""

    ranks: list[int]
    score: Tensor  # (n, R)
    low: Tensor  # (n, R)
    high: Tensor  # (n, R)


def choose_ranks(ranks: Sequence[int] | None, most: int) -> list[int]:
    """The K's to show: those given, ascending, or about ten up to `most`, denser at its start."""
    if ranks is None:
        return sorted({round(float(k)) for k in np.geomspace(1, most, _STEPS)})
    for k in ranks:
        if not is_whole(k) or not 1 <= k <= most:
            raise BadValueError(
                f"ranks: expected whole numbers from 1 to the {most} fitted pairs, got {k!r}."
            )
    return sorted({int(k) for k in ranks})


def silent(fit: DeltaFit) -> DeltaFit:
    """The same fit, which shows no bars of its own."""
    quiet = replace(fit, progress=False)
    kept: dict[str, Any] = {
        name: fit.__dict__[name] for name in ("pullback", "overlap") if name in fit.__dict__
    }
    quiet.__dict__.update(kept)
    return quiet


def settle(
    fit: DeltaFit,
    source: Source,
    prediction: Prediction,
    asked: Mapping[str, Any],
    places: Sequence[int],
    ranks: Sequence[int],
    pictures: Pictures | None,
    progress: bool,
) -> tuple[Settling, list[str]]:
    """Scores of some inputs at several ranks, and their pictures (an empty list if there are none).

    Inputs are read once, in chunks. `asked` are the arguments that the prediction was made with.
    Cost: a prediction of these inputs for each rank.

    Raises:
        BadValueError: the scores with all pairs are not those of `prediction`.
    """
    quiet = silent(fit)
    how = {**asked, "classes": _asked_classes(prediction), "moderation": None}
    last = how.pop("rank", fit.rank)
    scores: list[Tensor] = []
    images: list[str] = []
    side = longest_side(len(places))
    with Progress("Report", len(places), "input", progress) as bar:
        for start in range(0, len(places), _CHUNK):
            chosen = list(places[start : start + _CHUNK])
            batch = source.read(chosen)
            at_ranks = []
            for k in ranks:
                found = quiet.predict(batch.inputs, rank=k, **how)
                at_ranks.append(torch.stack([found.score, found.score_low, found.score_high]))
            if at_ranks:
                scores.append(torch.stack(at_ranks, -1).cpu())  # (3, chunk, R)
            seen = image_of(batch)
            if pictures is not None:
                images += given(pictures, chosen, side)
            elif seen is not None:
                images += drawn(seen, side)
            bar.show(start + len(chosen))
    whole = torch.cat(scores, 1) if scores else torch.empty(3, len(places), 0)
    if last in ranks:
        _check_agreement(whole[0, :, -1], prediction.score[torch.as_tensor(places)])
    return Settling(list(ranks), *whole), images


def _asked_classes(prediction: Prediction) -> Any:
    """What `classes=` the prediction was made with."""
    chosen = prediction.classes
    if chosen is None:
        return None
    fixed = bool((chosen == chosen[0]).all()) and len(chosen) > 1
    return chosen[0].tolist() if fixed else f"top{chosen.shape[1]}"


def _check_agreement(computed: Tensor, told: Tensor) -> None:
    off = (computed - told).abs() > _AGREE * told.abs() + 1e-9
    if bool(off.any()):
        raise BadValueError(
            f"prediction: expected fit.predict(inputs) of these inputs, got {int(off.sum())} of "
            f"{len(off)} scores that differ from the fit's own. Give the prediction in the order "
            "of the inputs, with asked= if fit.predict had arguments, or none."
        )
