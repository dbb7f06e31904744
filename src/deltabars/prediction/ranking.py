"""Which predictions to trust most, and which least."""

from __future__ import annotations

import torch
from torch import Tensor

from deltabars.errors import BadValueError
from deltabars.prediction.prediction import Prediction

CRITERIA = ("score", "mutual_information", "entropy", "probability", "target")


def most_certain(prediction: Prediction, count: int) -> Tensor:
    """Return the indices (count,) of the inputs with the lowest scores, the lowest first."""
    return _first(prediction, count, most_certain=True)


def least_certain(prediction: Prediction, count: int) -> Tensor:
    """Return the indices (count,) of the inputs with the highest scores, the highest first."""
    return _first(prediction, count, most_certain=False)


def _first(prediction: Prediction, count: int, most_certain: bool) -> Tensor:
    if not 1 <= count <= len(prediction):
        raise BadValueError(f"count: expected 1 to {len(prediction)}, got {count}.")
    return ranked(prediction, count, most_certain=most_certain)


def ranked(
    prediction: Prediction,
    count: int,
    *,
    by: str = "score",
    targets: Tensor | None = None,
    most_certain: bool = False,
    per_class: bool = False,
    wrong: bool = False,
) -> Tensor:
    """Return the indices (n,) of the inputs to look at first, at most `count` of them.

    Args:
        count: how many; with `per_class`, of each predicted class, one class after the other.
        by: `"score"`, `"mutual_information"` or `"entropy"`, the highest first; `"probability"` of
            the predicted class or `"target"`, the probability of the target, the lowest first.
        targets: class numbers (B,), for `"target"` and `wrong`.
        most_certain: the other end of the order.
        wrong: only inputs whose predicted class is not the target.

    Example:
        >>> import deltabars
        >>> from deltabars.ranking import ranked
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, l2=L2, rank=20, progress=False)
        >>> out = fit.predict(digits.test_images)
        >>> first = ranked(out, 10, by="probability")  # the ten least confident predictions
        >>> bool(out.mean.amax(1)[first].max() < 0.5)
        True
    """
    doubt = _doubt(prediction, by, targets)
    doubt = doubt.nan_to_num(torch.inf if most_certain else -torch.inf)  # last in both orders
    order, labels = doubt.sort(descending=not most_certain, stable=True).indices, prediction.label
    if not wrong and not per_class:
        return order[:count]
    if labels is None or labels.ndim != 1:
        raise BadValueError("wrong, per_class: expected predictions of one class an input.")
    if wrong:
        if targets is None or targets.ndim != 1:
            raise BadValueError("wrong: expected data with targets, got none.")
        order = order[labels.ne(targets)[order]]
    if not per_class or not len(order):
        return order[:count]
    return torch.cat([order[labels[order] == label][:count] for label in labels[order].unique()])


def target_probability(prediction: Prediction, targets: Tensor | None) -> Tensor:
    """Return the probability (B,) of each input's own target, or answer; NaN if it is no class."""
    labels, mean = prediction.label, prediction.mean
    if targets is not None and labels is not None and labels.shape == (len(mean), 1):
        yes = targets.reshape(-1).to(mean)
        return yes * mean[:, 0] + (1 - yes) * (1 - mean[:, 0])
    if targets is None or targets.ndim != 1 or prediction.classes is not None:
        raise BadValueError(
            "by: expected class numbers as targets, and the probabilities of all classes, for "
            "'target', got data without them."
        )
    last = mean.shape[1] - 1
    found = mean.gather(1, targets.clamp(0, last)[:, None])[:, 0]
    return found.masked_fill((targets < 0) | (targets > last), torch.nan)


def _doubt(prediction: Prediction, by: str, targets: Tensor | None) -> Tensor:
    if by not in CRITERIA:
        raise BadValueError(f"by: expected one of {CRITERIA}, got {by!r}.")
    if by != "score" and prediction.total_std is not None:
        raise BadValueError(f"by: expected 'score' for a regression, got {by!r}.")
    if by == "probability":
        return -prediction.mean.amax(1)
    if by == "target":
        return -target_probability(prediction, targets)
    value: Tensor | None = getattr(prediction, by)
    if value is None:
        raise BadValueError(
            f"by: expected a prediction with {by} (computed for up to 100 classes), got none."
        )
    return value
